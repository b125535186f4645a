"""What the first shard decides for all: an order of the gradients, by the consistency; counted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mpiml.consistency import SSP, Async, Consistency, DropStale
from mpiml.roles.parameter_server.following import Apply, Drop, Entry
from mpiml.roles.parameter_server.order import Update, order_of
from mpiml.whole import whole_number

__all__ = ["Decider"]

_SHOWN = 4  # workers in a message
_EXACT = 16  # numbers of updates that have a bin of their own


class Decider:
    """Gives what the state of the consistency says as entries that all shards follow. Pure.

    Parameters
    ----------
    consistency : Consistency
        The user's.
    workers : sequence of str
        What they are called.

    Attributes
    ----------
    pulls : int
        That were answered by message.
    """

    def __init__(self, consistency: Consistency, workers: Sequence[str]) -> None:
        self._consistency = consistency
        self._names = workers
        self._order = order_of(consistency, len(workers))
        self._pushed = [0] * len(workers)  # gradients of each
        self._by_staleness = isinstance(consistency, Async) and consistency.by_staleness
        #: whether workers may always read
        self.open_to_all = isinstance(consistency, Async | DropStale)
        self._staleness: Counter[int] = Counter()
        self._pushes = self._nonfinite = self.pulls = 0

    def push(self, worker: int, number: int, version: int) -> tuple[bool, list[Entry]]:
        """Take a push in; return whether it is used, and what is to be done now.

        Raises
        ------
        UsageError
            The version is no number, or has not been yet; the worker has left.
        """
        version = whole_number("push: version", version)
        key = worker, number
        pushed = self._order.push(worker, version, (key, version))
        self._pushes += 1
        self._pushed[worker] += 1
        entries: list[Entry] = [Drop(key)] if pushed.dropped else []
        return not pushed.dropped, entries + self._entries(pushed.updates)

    def skip(self, worker: int) -> list[Entry]:
        """Count a gradient that is not finite: the iteration goes on without it."""
        self._nonfinite += 1
        if isinstance(self._consistency, SSP):  # which counts iterations by `clock`
            return []
        return self.clock(worker)

    def clock(self, worker: int) -> list[Entry]:
        """Note that a worker has finished an iteration; return what is to be done now."""
        return self._entries(self._order.clock(worker))

    def leave(self, worker: int) -> list[Entry]:
        """Wait for a worker no more; return what is to be done now."""
        return self._entries(self._order.leave(worker))

    def readable(self, worker: int) -> bool:
        """Tell whether a worker may read now."""
        return self._order.readable(worker)

    def takes(self, worker: int) -> bool:
        """Tell whether a gradient of a worker may come now."""
        return self._order.takes(worker)

    def all_readable(self) -> list[bool]:
        """Tell it of each worker."""
        return self._order.all_readable()

    def lagging(self, worker: int, what: str) -> str:
        """Return what a worker waits for that may not go on with a pull or a push."""
        behind = [self._names[other] for other in self._order.behind(worker)]
        shown = ", ".join(behind[:_SHOWN]) + (", ..." if len(behind) > _SHOWN else "")
        return (
            f"{what} of {self._names[worker]}, by {self._consistency!r}, waits for {shown}. (A node "
            "that only pulls is given handle.reader(), and is not waited for.)"
        )

    def forgotten(self, worker: int) -> str:
        """Return what a worker that returns has done wrong all the time, if so."""
        pushed, clocks = self._pushed[worker], self._order.clocks[worker]
        if isinstance(self._consistency, SSP) and pushed > 1 and not clocks:
            return (
                f"{self._names[worker]} has pushed {pushed} gradients and never called clock(), by "
                f"which {self._consistency!r} counts iterations: nobody could wait for it"
            )
        return ""

    def _entries(self, updates: Sequence[Update]) -> list[Entry]:
        return [self._entry(update) for update in updates]

    def _entry(self, update: Update) -> Entry:
        for staleness in update.staleness:
            self._staleness[_bin(staleness)] += 1
        rate = 1.0
        if self._by_staleness:
            (staleness,) = update.staleness  # each gradient is a step of its own
            rate = 1 / (staleness + 1)
        keys, versions = zip(*update.gradients, strict=True)
        return Apply(keys, update.workers, versions, rate)

    def statistics(self) -> dict[str, Any]:
        """Return what there was, for logs.

        ``staleness`` counts the gradients that were applied, by how many updates came between:
        each number below 16, above that ranges up to the next power of two, by their beginning.
        """
        return {
            "pushes": self._pushes,
            "pulls": self.pulls,
            "dropped": self._order.dropped,
            "nonfinite": self._nonfinite,
            "staleness": dict(sorted(self._staleness.items())),
            "clocks": list(self._order.clocks),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be saved: the version. Workers begin anew."""
        return {"version": self._order.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a version."""
        self._order.version = state["version"]


def _bin(staleness: int) -> int:
    """Return where the bin of the histogram begins: there are few, however stale some are."""
    return staleness if staleness < _EXACT else 1 << staleness.bit_length() - 1
