"""`ParameterClient`: what the handle of a parameter server becomes inside a node."""

import copy
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

from mpiml.errors import ServiceGoneError, UsageError
from mpiml.futures import wait
from mpiml.payload import SNAPSHOT, give, pack_call
from mpiml.roles.parameter_server.by_path import ByPath
from mpiml.roles.parameter_server.posting import Posting
from mpiml.roles.parameter_server.reading import LocalReader, is_near
from mpiml.roles.parameter_server.settings import Settings
from mpiml.roles.parameter_server.tree import TreeParts
from mpiml.roles.parameter_server.waiting import OneAtATime
from mpiml.scope import Scope, enter, leave
from mpiml.target import Reply

__all__ = ["ParameterClient"]


_clients = itertools.count()  # of this process; a vertex is of one
_MOST: Final = 32  # pushes of a client that may be under way to several servers


class ParameterClient(ByPath):
    """Pulls parameters from a `mpiml.ParameterServerNode` and pushes gradients to it.

    Local. Made where a node holds the handle. Safe from several threads of its node, which are
    one worker; what they push is applied in the order of their calls.
    """

    def __init__(
        self, shards: Sequence[Any], node: Any, worker: int | None, settings: Settings
    ) -> None:
        self._shards = shards
        self._node = node
        self._worker = worker
        self._settings = settings
        self._lock = threading.Lock()
        # whole pulls, which filters must see one after the other; else they need not wait
        self._in_order: Any = nullcontext()
        if settings.pull_filters and worker is not None:
            self._in_order = OneAtATime(node.runtime.engine, "another pull of this node")
        self._number = next(_clients)
        self._numbers = itertools.count()
        # pushes that have not been waited for, and whether the user has their future
        self._sent: deque[tuple[Any, bool]] = deque()
        self._known = _Known()
        self.futures = Posting(self)
        if worker is not None:
            node.leaving.append(self._leave)

    def with_options(self, *, timeout: float | None = None) -> "ParameterClient":
        """Return this client with a deadline, in seconds, on every call: `DeadlineError`.

        A push that is late may have been sent; then it is used all the same.

        Raises
        ------
        UsageError
            `timeout` is negative; pulls are filtered, since filters miss what has not come.
        """
        if self._settings.pull_filters:
            raise UsageError(
                f"{self!r}.with_options: expected a server without pull_filters, which need the "
                "answer to every pull"
            )
        other = copy.copy(self)
        other._shards = [shard.with_options(timeout=timeout) for shard in self._shards]
        other.futures = Posting(other)
        return other

    # -- parameters ----------------------------------------------------------------------------

    def pull(self, names: Sequence[str] | None = None, indices: Any = None) -> tuple[Any, int]:
        """Return the parameters and their version; wait until the consistency lets this worker.

        What is returned are new NumPy arrays, of one version on all servers. A worker on the
        servers' host copies the whole tree from their memory, without a message where it does not
        have to wait.

        Parameters
        ----------
        names : sequence of str, optional
            Only these entries of the tree, which is a dict.
        indices : array of int, or dict, optional
            Only these rows, along the first axis; of a `Keys` these keys. By name where the tree
            is a dict; what is named neither here nor in `names` is left out.

        Returns
        -------
        tree
            In the structure of `init`, or a dict of what was named.
        version : int
            How many updates it has seen; to be given to `push`.

        Raises
        ------
        UsageError
            There is no such name or row; a `Keys` is pulled without keys.
        """
        tree, local = self._open()
        self._reap()
        if names is not None or indices is not None:
            request = tree.request(names, indices, "pull")
            version, values = self._ask(request.selections)
            return request.build(values), version
        tree.check_whole("pull")
        if local is not None:
            found = self._read(tree, local)
            if found is not None:
                return found
        with self._in_order:
            version, spans = self._ask(None)
            self._known.unsure = False
            return self._joined(tree, spans), version

    def _joined(self, tree: TreeParts, spans: Mapping[int, Any]) -> Any:
        """Return the tree, of what each server has sent."""
        if self._known.filters is None:
            return tree.join(spans)
        with self._lock:
            leaves = self._known.filters.decode(spans)
            self._known.filters.saw(leaves)
        return tree.of(leaves)

    def _read(self, tree: TreeParts, local: LocalReader) -> tuple[Any, int] | None:
        """Read the memory of the servers, once nothing of this worker's is under way to them."""
        self._shards[0].__dict__["_target"].calling_scope()  # raises once the body is to stop
        if self._sent or self._known.unsure:
            return None
        if not local.readable:
            self._shards[0].pull(self._worker, None, (), ())  # wait, and bring nothing
        found = local.read(tree)
        if found is not None and self._known.filters is not None:
            with self._lock:
                self._known.filters.saw(tree.leaves(found[0]))
        return found

    def _request_key(self) -> tuple[int, int, int]:
        """Return a name for a pull that no other has, of any client in the program."""
        return self._node.vertex, self._number, next(self._numbers)

    def _ask(self, selections: Mapping[int, Any] | None) -> tuple[int, dict[int, Any]]:
        """Ask for parts of one version: all, or some of some servers."""
        key = self._request_key()
        count = len(self._shards)
        asked = [s for s in range(1, count) if selections is None or s in selections]
        first = None if selections is None else selections.get(0, ())
        if not asked:
            version, value = self._shards[0].pull(self._worker, key, first, asked)
            return version, {0: value}
        answer = self._shards[0].futures.pull(self._worker, key, first, asked)
        with self._all_or_none():
            parts = {
                s: self._shards[s].futures.part(
                    self._worker, key, None if selections is None else selections[s]
                )
                for s in asked
            }
        version, value = answer.result()
        return version, {0: value, **{s: part.result() for s, part in parts.items()}}

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Send to the other servers what the first one has been sent, come what may.

        What only some servers hear of, the others would wait for. So neither a stop nor a want of
        room may come in between: both are met by the call to the first one.
        """
        token = enter(Scope(self._node, nested=True))
        try:
            yield
        finally:
            leave(token)

    # -- gradients -----------------------------------------------------------------------------

    def push(
        self,
        gradient: Any,
        version: int,
        names: Sequence[str] | None = None,
        indices: Any = None,
    ) -> bool:
        """Push a gradient; return whether it is used, now or later.

        Waits until the servers have it; `futures.push` does not.

        Parameters
        ----------
        gradient : array or tree of arrays
            Like what `pull` returns for the same `names` and `indices`: same shapes, same dtypes.
            Rows that come twice are added up.
        version : int
            Of the parameters that it was computed from.
        names, indices
            As for `pull`. What is left out has a gradient of zero.

        Returns
        -------
        bool
            False: the consistency has dropped it, or it is not finite and the server's
            ``nonfinite`` is ``"drop"``. The server counts both.

        Raises
        ------
        UsageError
            It is not like the parameters; it is not finite; the version has not been yet; this
            node only reads.
        """
        return self._hand_over(self._parts(gradient, names, indices, "push"), version)

    def _push(self, parts: Any, version: int) -> bool:
        """Send a gradient to all servers, and wait until they have it."""
        if len(parts) == 1 and self._known.filters is None:
            number = next(self._numbers)
            return bool(self._shards[0].push(self._worker, number, version, parts[0]))
        with self._lock:
            first, *others = self._post(version, parts, give)
        used: bool = first.result()
        for other in others:
            other.result()
        return used

    def _post(self, version: int, parts: Any, mark: Any, *pull: Any) -> list[Any]:
        """Send a gradient to all servers. Under the lock, so that filters see one order.

        `pull` is what the first one has to know to answer with its parameters too.
        """
        number = next(self._numbers)
        if self._known.filters is not None:
            parts = self._known.filters.encode(parts)
        futures = self._shards[0].futures
        send = futures.push_pull if pull else futures.push
        first = send(self._worker, number, version, mark(parts[0]), *pull)
        with self._all_or_none():
            return [
                first,
                *[
                    shard.futures.push(self._worker, number, version, mark(part))
                    for shard, part in zip(self._shards[1:], parts[1:], strict=True)
                ],
            ]

    def push_pull(self, gradient: Any, version: int) -> tuple[Any, int]:
        """Push a gradient of the whole tree, then pull the whole tree: what `pull` returns."""
        tree, local = self._open()
        if local is not None:
            self.push(gradient, version)
            return self.pull()
        parts = self._parts(gradient, None, None, "push_pull")
        self._reap()
        if parts is None:
            self._shards[0].skip(self._worker)
            return self.pull()
        tree.check_whole("push_pull")
        with self._in_order:
            version, spans = self._push_and_ask(parts, version)
            return self._joined(tree, spans), version

    def _push_and_ask(self, parts: Any, version: int) -> tuple[int, dict[int, Any]]:
        """Push to all servers and ask for all parts, in one round trip."""
        key = self._request_key()
        asked = range(1, len(self._shards))
        with self._lock:
            first, *others = self._post(version, parts, give, key, list(asked))
        with self._all_or_none():
            pulls = [self._shards[s].futures.part(self._worker, key, None) for s in asked]
        _, found, value = first.result()
        for other in others:
            other.result()
        return found, {0: value, **{s: pulls[s - 1].result() for s in asked}}

    def clock(self) -> None:
        """Tell the servers that this worker has finished an iteration.

        For `mpiml.consistency.SSP`, which counts iterations by it. With the others every push is
        one; there it is an iteration to which this worker adds nothing.
        """
        self._check_worker("clock")
        self._reap()
        self._shards[0].clock(self._worker)

    def _parts(self, gradient: Any, names: Any, indices: Any, call: str) -> Any:
        """Return the message for each server; None where the gradient is to be dropped."""
        self._check_worker(call)
        tree, _ = self._open()
        parts = tree.gradients(gradient, names, indices, call, self._settings.nonfinite)
        if parts is None or self._known.filters is not None:
            return parts
        dense = names is None and indices is None
        return tree.messages(parts, dense, self._settings.encode)

    # -- the rest ------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Return what the servers have done so far: pushes, drops, staleness, clocks."""
        found: dict[str, Any] = self._shards[0].statistics()
        _, local = self._open()
        if self._known.filters is not None:
            found["filters"] = self._known.filters.statistics()
        return {**found, "reads": 0 if local is None else local.reads}

    def _ready_targets(self) -> list[Any]:
        return [shard.__dict__["_target"] for shard in self._shards]

    def _open(self) -> tuple[TreeParts, LocalReader | None]:
        if self._known.opened is None:
            # not under the lock: a service that waits lets calls in that get here too
            opened = [shard.futures.open() for shard in self._shards]
            found = [future.result() for future in opened]
            tree = TreeParts(found)
            with self._lock:
                if self._known.opened is None:
                    filtered = self._settings.push_filters or self._settings.pull_filters
                    if filtered and self._worker is not None:
                        from mpiml.roles.parameter_server.filtering.links import WorkerFilters

                        self._known.filters = WorkerFilters(
                            tree.plan, self._worker, self._settings
                        )
                    local = None
                    if is_near(self._node, self._shards):
                        local = LocalReader.of(found, self._worker, self._settings)
                    self._known.opened = tree, local
        return self._known.opened

    def _reap(self) -> None:
        """Look at the pushes that nobody waits for: errors that the user does not see are raised.

        Waits where there are many: only what goes to the first server waits for room.
        """
        while True:
            self._reap_done()
            if len(self._shards) == 1 or len(self._sent) <= _MOST * len(self._shards):
                return
            with suppress(IndexError):  # another thread has taken it
                wait([self._sent[0][0]])

    def _reap_done(self) -> None:
        while self._sent:
            with self._lock:
                if not self._sent or not self._sent[0][0].ready:
                    return
                future, seen = self._sent.popleft()
            if not seen:
                future.result()

    def _check_worker(self, call: str) -> None:
        if self._worker is None:
            raise UsageError(
                f"{self!r}.{call}: {self._node.title} holds handle.reader(), which only pulls. Give "
                "it the handle itself; then it is a worker, for which others may have to wait."
            )

    def _leave(self, _: BaseException | None) -> None:
        """Tell the servers that this worker pushes nothing more. Does not wait."""
        self._sent.clear()  # an error that nobody looks at is logged when its future is gone
        if self._node.runtime.done:  # a service: all messages have been counted
            return
        target = self._shards[0].__dict__["_target"]
        quiet = Scope(self._node, nested=True)  # a stop does not end it, nor does credit
        try:
            packed = pack_call((self._worker,), {}, SNAPSHOT)
            target.send(b"leave", packed, Reply(target, "leave"), quiet, 0)
        except ServiceGoneError:
            pass  # the program has ended

    def __repr__(self) -> str:
        label = self._shards[0].__dict__["_target"].title.rpartition("/")[0]
        return f"<ParameterClient of {label!r}, {len(self._shards)} shards>"

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]


class _Known:
    """What a client has learnt of the servers; one for all of its `with_options`."""

    def __init__(self) -> None:
        self.opened: tuple[TreeParts, LocalReader | None] | None = None
        self.filters: Any = None
        self.unsure = False  # whether servers may have a push that they have not answered
