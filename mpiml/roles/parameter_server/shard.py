"""`Shard`: the service behind a parameter server, one for each of its ranks.

The first shard decides the order in which gradients are applied, as the consistency has it, and
tells the others, which follow: see `following`. So every version of the parameters is a version
on all shards, and the parts of a pull belong together. Methods run one at a time; those that wait
let others in.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

from mpiml.errors import UsageError
from mpiml.payload import give
from mpiml.roles.parameter_server.deciding import Decider
from mpiml.roles.parameter_server.following import Apply, Drop, Entry, Following, Mark, Step
from mpiml.roles.parameter_server.holding import holders_of, workers_of
from mpiml.roles.parameter_server.memory import Address
from mpiml.roles.parameter_server.part import Part
from mpiml.roles.parameter_server.plan import LeafSpec, Plan
from mpiml.roles.parameter_server.settings import Settings
from mpiml.roles.parameter_server.specs import checksum_of, flatten_init
from mpiml.roles.parameter_server.waiting import Waiters
from mpiml.scope import current_scope

__all__ = ["Opened", "Shard"]

_AHEAD: Final = 16  # pushes of a worker that may wait for other workers

_Selection = Sequence[tuple[int, Any]] | None
"""What a pull asks of a shard; None: all."""


class Opened(NamedTuple):
    """What a worker must know of a shard."""

    treedef: Any
    leaves: tuple[LeafSpec, ...]
    address: Address | None  #: of its memory, if workers of its host can read that
    checksum: int  #: of all parameters at first


class _Request:
    """A part that is asked of a shard that follows, until it is there."""

    def __init__(self, worker: int | None, selection: _Selection) -> None:
        self.worker, self.selection = worker, selection
        self.done = False
        self.value: Any = None


class Shard:
    """Holds a part of the parameters. Made by `mpiml.ParameterServerNode`; called by its clients."""

    def __init__(self, settings: Settings) -> None:
        scope = current_scope()
        assert scope is not None
        self._node = node = scope.owner
        runtime = node.runtime
        workers = workers_of(runtime.vertices, node.spec.node)
        self._treedef, self._specs, leaves = flatten_init(settings.init)
        plan = Plan(self._specs, settings.shards)
        self._checksum = checksum_of(leaves) if settings.shards > 1 else 0
        here = node.spec.index
        filters = None
        if settings.push_filters or settings.pull_filters:
            from mpiml.roles.parameter_server.filtering.links import ServerFilters

            filters = ServerFilters(plan, here, settings)
        self._part = Part(
            leaves, plan, here, settings, len(workers), self._shares(settings), filters
        )
        self._following = Following()
        self._decider: Decider | None = None
        self._others: list[Any] = []
        if here == 0:
            names = [runtime.vertices[vertex].title for vertex in workers]
            self._decider = Decider(settings.consistency, names)
            role = [v for v in runtime.vertices if v.role_index == node.spec.role_index]
            self._others = [runtime.client(v.id, node) for v in role[1:]]
        self._waiters = Waiters(runtime.engine)
        node.at_end.append(self._waiters.end)
        self._pushing: dict[int, deque[int]] = {}  # of each worker, pushes that wait
        self._publish()
        node.leaving.append(self._close)

    def _shares(self, settings: Settings) -> bool:
        """Tell whether somebody of this host may read the memory."""
        if settings.pull_filters:
            return False
        runtime, spec = self._node.runtime, self._node.spec
        here = runtime.hosts.host_of(runtime.ranks[spec.id])
        return any(
            runtime.hosts.host_of(runtime.ranks[vertex]) == here
            for vertex, _ in holders_of(runtime.vertices, spec.node)
        )

    def _close(self, _: BaseException | None) -> None:
        self._waiters.close()
        self._part.memory.close()

    def open(self) -> Opened:
        """Return what a client has to know."""
        return Opened(self._treedef, self._specs, self._part.memory.address, self._checksum)

    # -- gradients -----------------------------------------------------------------------------

    def push(self, worker: int, number: int, version: int, message: Any) -> bool:
        """Take a worker's gradient in; return whether it is used, now or later."""
        key = worker, number
        if self._decider is None:
            try:
                gradient = self._part.decode(worker, message)
            except Exception as error:  # the first shard may have decided that it counts
                self._node.fail(error)
                raise
            self._do(self._following.arrive(key, gradient))
            return True
        try:
            gradient = self._part.decode(worker, message)
            self._await_turn(worker, number)
            used, entries = self._decider.push(worker, number, version)
        except BaseException:
            self._tell([Drop(key)])
            raise
        self._decide(entries, self._following.arrive(key, gradient))
        return used

    def push_pull(
        self, worker: int, number: int, version: int, message: Any, key: Hashable, asked: Any
    ) -> tuple[bool, int, Any]:
        """Do `push`, then `pull` all there is."""
        try:
            used = self.push(worker, number, version, message)
        except BaseException:
            self._mark(key, asked)  # the parts are asked for already
            raise
        return used, *self.pull(worker, key, None, asked)

    def skip(self, worker: int) -> bool:
        """Note that a worker had a gradient that is not finite; return that it is not used."""
        assert self._decider is not None
        self._decide(self._decider.skip(worker))
        return False

    def clock(self, worker: int) -> None:
        """Note that a worker has finished an iteration."""
        assert self._decider is not None
        self._decide(self._decider.clock(worker))

    def leave(self, worker: int) -> None:
        """Note that a worker has returned."""
        assert self._decider is not None
        said = self._decider.forgotten(worker)
        if said and not self._node.runtime.stopping:
            self._node.runtime.say(f"mpiml: {self._node.title}: {said}\n")
        self._decide(self._decider.leave(worker))

    def follow(self, entries: Sequence[Entry]) -> None:
        """Take in what the first shard has decided."""
        self._do(self._following.follow(entries))

    def _decide(self, entries: Sequence[Entry], steps: Sequence[Step] = ()) -> None:
        """Do what has been decided, here, after `steps`, and on the other shards."""
        if entries:
            self._tell(entries)
        self._do([*steps, *self._following.follow(entries)])
        assert self._decider is not None
        if self._decider.open_to_all:
            return
        readable = self._publish()
        if self._waiters:
            self._waiters.wake(*[worker for worker, may in enumerate(readable) if may])

    def _tell(self, entries: Sequence[Entry]) -> None:
        for other in self._others:
            other.futures.follow(list(entries))

    def _do(self, steps: Sequence[Step]) -> None:
        for entry, found in steps:
            if isinstance(entry, Apply):
                try:
                    self._part.apply(entry, found)
                except Exception as error:  # shards are no longer alike
                    self._node.fail(error)
                    raise
            else:
                (request,) = found
                request.value = self._values(request.worker, request.selection)
                request.done = True
                self._waiters.wake(request)

    # -- parameters ----------------------------------------------------------------------------

    def pull(
        self, worker: int | None, key: Hashable, selection: _Selection, asked: Sequence[int]
    ) -> tuple[int, Any]:
        """Return the version and what is asked of this shard; wait until the worker may read.

        `asked` are the other shards of which something is asked, by `part` with the same key.
        """
        assert self._decider is not None
        if worker is not None:
            self._await_readable(worker)
        self._mark(key, asked)
        self._decider.pulls += 1
        return self._part.version, self._values(worker, selection)

    def _mark(self, key: Hashable, asked: Sequence[int]) -> None:
        for shard in asked:
            self._others[shard - 1].futures.follow([Mark(key)])

    def part(self, worker: int | None, key: Hashable, selection: _Selection) -> Any:
        """Return what is asked of this shard, of the version that `pull` returns."""
        request = _Request(worker, selection)
        self._do(self._following.arrive(key, request))
        about = f"{self._node.title}: a part of the parameters, for the first shard to name it"
        self._waiters.until(lambda: request.done, lambda: about, request)
        return request.value

    def _values(self, worker: int | None, selection: _Selection) -> Any:
        if selection is None:
            return give(self._part.whole(worker))
        return give(self._part.some(selection))

    def _await_readable(self, worker: int) -> None:
        """Wait until a worker may read, and what it has pushed before has been taken."""
        decider = self._decider
        assert decider is not None
        self._waiters.until(
            lambda: decider.readable(worker) and not self._pushing.get(worker),
            lambda: f"{self._node.title}: {decider.lagging(worker, 'a pull')}",
            worker,
        )

    def _await_turn(self, worker: int, number: int) -> None:
        """Wait until the consistency takes a gradient of a worker, after those before it."""
        decider = self._decider
        assert decider is not None
        queue = self._pushing.get(worker)
        if not queue and decider.takes(worker):
            return
        if queue is None:
            queue = self._pushing[worker] = deque()
        if len(queue) >= _AHEAD:
            raise UsageError(
                f"push: expected at most {_AHEAD} pushes of a worker that wait for others, got one "
                f"more: {decider.lagging(worker, 'it')}. Wait for the future of a push, or pull, "
                "before the next."
            )
        queue.append(number)
        try:
            self._waiters.until(
                lambda: queue[0] == number and decider.takes(worker),
                lambda: f"{self._node.title}: {decider.lagging(worker, 'a push')}",
                worker,
            )
        finally:
            queue.remove(number)
            self._waiters.wake(worker)

    def _publish(self) -> list[bool]:
        """Return which workers may read; those of this host are told, in shared memory."""
        if self._decider is None:
            return []
        readable = self._decider.all_readable()
        if self._part.memory.words is not None:
            self._part.memory.words[:] = readable
        return readable

    # -- what there was ------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Return what this shard has done, for logs."""
        done = {} if self._decider is None else self._decider.statistics()
        waiting = len(self._following) + len(self._waiters)
        return {"version": self._part.version, "waiting": waiting, **done}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this shard, to be saved; never served as a call."""
        order = None if self._decider is None else self._decider.state_dict()
        return {"part": self._part.state_dict(), "order": order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state over, before workers begin; never served as a call."""
        self._part.load_state_dict(state["part"])
        if self._decider is not None:
            self._decider.load_state_dict(state["order"])
        self._publish()
