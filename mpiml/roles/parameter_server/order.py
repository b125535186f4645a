"""Which gradients are applied when, and who may read: the state of one server of a consistency.

Pure: events come in the order in which the server takes them, gradients are opaque. Messages of
one worker keep their order, so what a worker has pushed before a read is there when it reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpiml.consistency import SSP, Async, Backup, BoundedDelay, Consistency, DropStale
from mpiml.errors import UsageError

__all__ = ["Order", "Pushed", "Update", "order_of"]


class Update(NamedTuple):
    """Gradients to be applied as one step, with their mean.

    Attributes
    ----------
    gradients : tuple
        What was pushed, in the order of the workers.
    workers : tuple of int
        Whose.
    staleness : tuple of int
        How many updates came between the pull that each was computed from, and this one.
    """

    gradients: tuple[Any, ...]
    workers: tuple[int, ...]
    staleness: tuple[int, ...]


class Pushed(NamedTuple):
    """What follows from a push.

    Attributes
    ----------
    updates : list of Update
        To be applied now, in this order.
    dropped : str
        Why the gradient itself is not used; empty if it is, now or later.
    """

    updates: list[Update]
    dropped: str = ""


class Order(ABC):
    """What one server knows of its workers.

    Parameters
    ----------
    workers : int
        How many there are, numbered from 0.
    """

    def __init__(self, workers: int) -> None:
        self.version = 0  #: how many updates have been returned to be applied
        self.dropped = 0  #: how many gradients were not used
        self.clocks = [0] * workers  #: the iterations that each worker has finished
        self._live = set(range(workers))

    def push(self, worker: int, version: int, gradient: Any) -> Pushed:
        """Take in a gradient that was computed from a version of the parameters.

        Raises
        ------
        UsageError
            The version has not been yet; the worker has left.
        """
        if not 0 <= version <= self.version:
            raise UsageError(
                f"push: version: expected one that pull() has returned, 0 to {self.version}, got "
                f"{version}"
            )
        if worker not in self._live:
            raise UsageError(
                f"push: worker {worker}: expected a node that has not returned, got one that has"
            )
        found = self._push(worker, version, gradient)
        self.dropped += bool(found.dropped)
        return found

    @abstractmethod
    def _push(self, worker: int, version: int, gradient: Any) -> Pushed: ...

    def takes(self, worker: int) -> bool:
        """Tell whether a gradient of this worker may come now; it waits else, as a read does."""
        return True

    @abstractmethod
    def readable(self, worker: int) -> bool:
        """Tell whether a read of this worker may be answered now; it waits else."""

    def all_readable(self) -> list[bool]:
        """Tell it of each worker."""
        return [self.readable(worker) for worker in range(len(self.clocks))]

    def behind(self, worker: int) -> list[int]:
        """Return whom a worker waits for that may not read."""
        return []

    def clock(self, worker: int) -> list[Update]:
        """Note that a worker has finished an iteration; return what is to be applied now."""
        self.clocks[worker] += 1
        return []

    def leave(self, worker: int) -> list[Update]:
        """Wait for a worker no more; return what is to be applied now."""
        self._live.discard(worker)
        return []

    def _apply(self, held: Sequence[tuple[int, int, Any]]) -> Update:
        """Return one update of (worker, version, gradient)."""
        workers, versions, gradients = zip(*sorted(held, key=lambda h: h[0]), strict=True)
        staleness = tuple(self.version - version for version in versions)
        self.version += 1
        return Update(gradients, workers, staleness)

    def _slowest(self) -> int:
        """Return the clock of the slowest worker that is still there."""
        return min((self.clocks[worker] for worker in self._live), default=max(self.clocks))


class _OnArrival(Order):
    """Every gradient is a step of its own, if it is not too old."""

    def __init__(self, workers: int, oldest: int | None) -> None:
        super().__init__(workers)
        self._oldest = oldest

    def _push(self, worker: int, version: int, gradient: Any) -> Pushed:
        self.clocks[worker] += 1
        staleness = self.version - version
        if self._oldest is not None and staleness > self._oldest:
            return Pushed([], f"{staleness} updates old, of {self._oldest} at most")
        return Pushed([self._apply([(worker, version, gradient)])])

    def readable(self, worker: int) -> bool:
        return True


class _Stale(Order):
    """`SSP`: on arrival, and reads wait for who is too far behind."""

    def __init__(self, workers: int, s: int) -> None:
        super().__init__(workers)
        self._s = s

    def _push(self, worker: int, version: int, gradient: Any) -> Pushed:
        return Pushed([self._apply([(worker, version, gradient)])])

    def readable(self, worker: int) -> bool:
        return self.clocks[worker] - self._slowest() <= self._s

    def all_readable(self) -> list[bool]:
        slowest = self._slowest()
        return [clock - slowest <= self._s for clock in self.clocks]

    def behind(self, worker: int) -> list[int]:
        return [w for w in sorted(self._live) if self.clocks[worker] - self.clocks[w] > self._s]


class _ByIteration(Order):
    """`BoundedDelay`: all gradients of an iteration together, and reads wait for iterations."""

    def __init__(self, workers: int, tau: int) -> None:
        super().__init__(workers)
        self._tau = tau
        self._finished = 0  # iterations, of all workers
        self._held: dict[int, list[tuple[int, int, Any]]] = {}  # iteration -> gradients

    def _push(self, worker: int, version: int, gradient: Any) -> Pushed:
        self._held.setdefault(self.clocks[worker], []).append((worker, version, gradient))
        self.clocks[worker] += 1
        return Pushed(self._ripe())

    def clock(self, worker: int) -> list[Update]:
        """Note an iteration to which the worker adds nothing."""
        super().clock(worker)
        return self._ripe()

    def leave(self, worker: int) -> list[Update]:
        super().leave(worker)
        return self._ripe()

    def _ripe(self) -> list[Update]:
        updates = []
        while self._finished < self._slowest():
            held = self._held.pop(self._finished, None)
            self._finished += 1
            if held:
                updates.append(self._apply(held))
        return updates

    def takes(self, worker: int) -> bool:
        return self.readable(worker)  # so at most tau + 1 gradients of a worker are held

    def readable(self, worker: int) -> bool:
        return self._finished >= self.clocks[worker] - self._tau

    def behind(self, worker: int) -> list[int]:
        return [
            w for w in sorted(self._live) if self.clocks[worker] - self.clocks[w] > self._tau
        ]


class _FirstOf(Order):
    """`Backup`: the first gradients of a step."""

    def __init__(self, workers: int, backups: int) -> None:
        super().__init__(workers)
        self._needed = workers - backups
        self._held: list[tuple[int, int, Any]] = []
        self._without = 0  # workers of this step that add nothing
        self._last = [-1] * workers  # the step of each worker's last gradient

    def _push(self, worker: int, version: int, gradient: Any) -> Pushed:
        self.clocks[worker] += 1
        late = version < self.version
        again = self._last[worker] == version
        self._last[worker] = version
        if late:
            return Pushed([], f"of step {version}, and step {self.version} has begun")
        if again:
            return Pushed([], f"the second of this worker for step {version}")
        self._held.append((worker, version, gradient))
        return Pushed(self._ripe())

    def clock(self, worker: int) -> list[Update]:
        """Note that a worker takes part in this step with nothing."""
        super().clock(worker)
        if self._last[worker] == self.version:
            return []  # it has its part in it
        self._last[worker] = self.version
        self._without += 1
        return self._ripe()

    def leave(self, worker: int) -> list[Update]:
        super().leave(worker)
        return self._ripe()

    def _ripe(self) -> list[Update]:
        present = len(self._live | {held[0] for held in self._held})
        if len(self._held) + self._without < max(1, min(self._needed, present)):
            return []
        held, self._held = self._held, []
        self._without = 0
        if not held:  # nobody adds anything: the same step once more
            self._last = [-1] * len(self._last)
            return []
        return [self._apply(held)]

    def readable(self, worker: int) -> bool:
        return self._last[worker] < self.version

    def behind(self, worker: int) -> list[int]:
        return [w for w in sorted(self._live) if self._last[w] < self.version]


def order_of(consistency: Consistency, workers: int) -> Order:
    """Return the state of a server at its beginning. Local.

    Raises
    ------
    UsageError
        There are too few workers for it.
    """
    if isinstance(consistency, BoundedDelay):
        return _ByIteration(workers, consistency.tau)
    if isinstance(consistency, SSP):
        return _Stale(workers, consistency.s)
    if isinstance(consistency, Backup):
        if consistency.b >= workers:
            raise UsageError(
                f"{consistency!r}: expected more workers than backups, got {workers}. Give the "
                "handle to more nodes, or take fewer backups."
            )
        return _FirstOf(workers, consistency.b)
    if isinstance(consistency, DropStale):
        return _OnArrival(workers, consistency.n)
    assert isinstance(consistency, Async), consistency
    return _OnArrival(workers, None)
