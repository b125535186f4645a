"""The clients of a role's replicas, called together."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from mpiml.client import Client, Submitting
from mpiml.errors import UsageError
from mpiml.payload import SNAPSHOT
from mpiml.reducing import Reducing
from mpiml.target import Target

__all__ = ["ClientGroup"]


class _Verb:
    """One way of calling a group: its attributes are the methods, as futures or waited for."""

    def __init__(
        self, targets: Sequence[Target], make: Callable[..., Any], waits: bool
    ) -> None:
        self._targets = targets
        self._make = make
        self._waits = waits

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for target in self._targets:
            target.check(name)
        return self._make(self._targets, name, self._waits)


class _Call:
    """A method of the replicas, in one way of calling them."""

    __slots__ = ("_bound", "_name", "_targets", "_waits")

    def __init__(self, targets: Sequence[Target], name: str, waits: bool) -> None:
        self._targets = targets
        self._name = name
        self._waits = waits
        self._bound = [Submitting(target, name) for target in targets]

    def _gathered(self, futures: list[Any], began: float) -> list[Any]:
        """Return the results in order, each within the deadline of its client."""
        if not self._waits:
            return futures
        results = []
        for target, future in zip(self._targets, futures, strict=True):
            timeout = target.timeout
            left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
            results.append(future.result(left))
        return results


class _Same(_Call):
    """``clients.method(x)``: the same arguments for all."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all replicas at once; a list in their order."""
        began = time.monotonic()
        return self._gathered([bound(*args, **kwargs) for bound in self._bound], began)


class _Scattered(_Call):
    """``clients.scatter.method(xs, common=y)``: item i for replica i, keywords for all."""

    __slots__ = ()

    def __call__(self, items: Any, /, **kwargs: Any) -> list[Any]:
        """Call all replicas at once, each with its item; a list in their order.

        Raises
        ------
        UsageError
            There are not as many items as replicas, or it is no sequence.
        """
        try:
            own = list(items)
        except TypeError:
            raise UsageError(
                f"clients.scatter.{self._name}: expected a sequence with one item for each of "
                f"{len(self._bound)} replicas, got {items!r}. The same for all goes without scatter."
            ) from None
        if len(own) != len(self._bound):
            raise UsageError(
                f"clients.scatter.{self._name}: expected one item for each of "
                f"{len(self._bound)} replicas, got {len(own)}"
            )
        began = time.monotonic()
        calls = zip(self._bound, own, strict=True)
        return self._gathered([bound(item, **kwargs) for bound, item in calls], began)


class _LeastLoaded:
    """``clients.least_loaded.method(x)``: the replica with the fewest calls of this group."""

    def __init__(
        self, loads: "_Loads", targets: Sequence[Target], name: str, waits: bool
    ) -> None:
        self._loads = loads
        self._name = name
        self._waits = waits
        self._targets = {target.vertex: target for target in targets}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call one replica; return its result, or its future."""
        vertex = self._loads.take(list(self._targets))
        target = self._targets[vertex]
        deadline = None if target.timeout is None else time.monotonic() + target.timeout
        try:
            if self._waits:
                future, scope = target.submit(self._name, SNAPSHOT, args, kwargs, deadline)
            else:
                future = Submitting(target, self._name)(*args, **kwargs)
        except BaseException:
            self._loads.give_back(vertex)
            raise
        if not self._waits:
            future.when_done(lambda _: self._loads.give_back(vertex))
            return future
        # not `result`: a call that is given up at its deadline still loads its replica
        try:
            in_time = future.ready or target.engine.wait(future, deadline, scope)
        finally:  # not before: who has waited finds it given back, whichever thread ended it
            future.when_done(lambda _: self._loads.give_back(vertex))
        if not in_time:
            raise target.late(self._name)
        return future._value()


class _Loads:
    """How many calls are under way at each replica, by vertex.

    A group shares it with its slices, and with what `with_options` makes of them.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last: dict[int, int] = {}  # when each was called last
        self._turns = itertools.count(1)
        self._lock = threading.Lock()

    def take(self, vertices: Sequence[int]) -> int:
        """Return the replica to call next: of several, the one that was called longest ago."""
        with self._lock:
            counts, last = self._counts, self._last
            vertex = min(vertices, key=lambda v: (counts.get(v, 0), last.get(v, 0)))
            counts[vertex] = counts.get(vertex, 0) + 1
            last[vertex] = next(self._turns)
            return vertex

    def give_back(self, vertex: int) -> None:
        with self._lock:
            self._counts[vertex] -= 1


class _Group:
    """What a group has in both spellings, waiting and not."""

    _waits = True

    def __init__(self, clients: Sequence[Client], loads: _Loads | None = None) -> None:
        self._clients = list(clients)
        self._targets = [client.__dict__["_target"] for client in self._clients]
        self._loads = loads or _Loads()

    @property
    def scatter(self) -> _Verb:
        """``clients.scatter.method(xs, common=y)``: item i for replica i, keywords for all."""
        return _Verb(self._targets, _Scattered, self._waits)

    @property
    def least_loaded(self) -> _Verb:
        """``clients.least_loaded.method(x)``: one replica does it.

        The one with the fewest calls under way that this group of clients has made so, or its
        slices; what other nodes ask of it is not known here.
        """
        if not self._clients:
            raise UsageError("clients.least_loaded: expected a replica, got an empty group")

        def make(targets: Sequence[Target], name: str, waits: bool) -> _LeastLoaded:
            return _LeastLoaded(self._loads, targets, name, waits)

        return _Verb(self._targets, make, self._waits)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(_Verb(self._targets, _Same, self._waits), name)


class _GroupFutures(_Group):
    """``clients.futures.method(x)``: a list of futures, one for each replica."""

    _waits = False


class ClientGroup(_Group):
    """The clients of a role's replicas: a sequence, whose methods call all of them.

    Local. ``clients.method(x)`` returns the list of results, ``clients.futures.method(x)`` a
    list of futures; slices are groups. `scatter`, `least_loaded` and `reduced` are other ways
    of calling them; the first two also after ``futures``.
    """

    # Registered as a Sequence below, not derived from it: its `count` and `index` would hide
    # methods of such names.

    @property
    def futures(self) -> _GroupFutures:
        """The same calls, as futures."""
        return _GroupFutures(self._clients, self._loads)

    @property
    def stream(self) -> Any:
        """Refused: items of several streams have no order of their own."""
        raise UsageError(
            f"{self!r}.stream: expected the client of one replica, got a group. Stream from "
            "each: for c in clients: c.stream.method(...)"
        )

    def reduced(self, op: str) -> _Verb:
        """``clients.reduced("sum").method(x)``: all replicas do it, and one result comes.

        The replicas combine their results on the way, along a binary tree of calls among
        themselves, so what the caller receives does not depend on how many there are. Calls that
        were made to them before have started by then, to keep their order; to make sure of it, a
        replica with open calls is asked first, by an empty call.

        Parameters
        ----------
        op : str
            ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``, of numbers, arrays, or
            trees of arrays; combined in the order of the replicas, in the dtype of the results.

        Raises
        ------
        UsageError
            There is no such operation, or no replica.
        """
        reducing = Reducing(op, len(self._clients))
        return _Verb(self._targets, reducing.bind, True)

    def with_options(self, *, timeout: float | None = None) -> "ClientGroup":
        """Return a group whose blocking calls have a deadline, in seconds."""
        clients = [c.with_options(timeout=timeout) for c in self._clients]
        return ClientGroup(clients, self._loads)

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> "ClientGroup": ...
    def __getitem__(self, index: int | slice) -> "Client | ClientGroup":
        if isinstance(index, slice):
            return ClientGroup(self._clients[index], self._loads)
        return self._clients[index]

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients)

    def __repr__(self) -> str:
        return f"<ClientGroup of {len(self._clients)}>"


Sequence.register(ClientGroup)
