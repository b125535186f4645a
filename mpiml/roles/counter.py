"""`Counter`: counts of a whole program by name, and limits at which it ends."""

import math
import threading
from collections.abc import Mapping
from typing import Any

from mpiml.context import context
from mpiml.errors import UsageError

__all__ = ["Counter"]


class Counter:
    """A service that counts for the whole program: steps, episodes, frames.

    Local: any node that holds its handle calls it when it likes, and none waits for another. Only
    the end at a limit is everybody's. Add it as ``ServiceNode(mpiml.roles.Counter)``. Nobody has
    to look whether a limit is reached: the counter ends the program in order by itself, when it is.

    Parameters
    ----------
    limits : mapping of str to number, optional
        By name: the count at which the program is to end.
    """

    def __init__(self, limits: Mapping[str, float] | None = None) -> None:
        self._counts: dict[str, Any] = {}
        self._limits: dict[str, float] = {}
        self._lock = threading.Lock()
        for name, at in (limits or {}).items():
            self.limit(name, at)

    def increment(self, /, **counts: Any) -> dict[str, Any]:
        """Add to the counts, all of them or, after an error, none; return all totals.

        Where a limit is reached the program ends, and the call is still answered.

        Raises
        ------
        UsageError
            One is no finite number.
        """
        for name, count in counts.items():
            _check(f"Counter.increment: {name}", count)
        with self._lock:
            sums = {name: self._counts.get(name, 0) + count for name, count in counts.items()}
            self._counts.update(sums)  # only now: numbers may be of types that do not add up
            totals = dict(self._counts)
        self._look(totals, counts)
        return totals

    def get_counts(self) -> dict[str, Any]:
        """Return all totals by name."""
        with self._lock:
            return dict(self._counts)

    def limit(self, name: str, at: float | None) -> None:
        """End the program when `name` has come to `at`; None: no more.

        Raises
        ------
        UsageError
            `name` is no text, or `at` no finite number.
        """
        if not isinstance(name, str):
            raise UsageError(f"Counter.limit: expected the name of a count, got {name!r}")
        if at is None:
            with self._lock:
                self._limits.pop(name, None)
            return
        _check(f"Counter.limit: {name}", at)
        with self._lock:
            self._limits[name] = at
            totals = dict(self._counts)
        self._look(totals, {name: None})

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; limits are settings, not state."""
        return {"counts": self.get_counts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these counts, in place of those there are."""
        counts = dict(state["counts"])
        for name, count in counts.items():
            _check(f"Counter.load_state_dict: {name}", count)
        with self._lock:
            self._counts = counts
        self._look(counts, counts)

    def _look(self, totals: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Stop the program where one of the counts has come to its limit."""
        with self._lock:
            limits = dict(self._limits)
        for name in names:
            if name in limits and totals.get(name, -math.inf) >= limits[name]:
                context().stop()
                return


def _check(where: str, number: Any) -> None:
    try:
        good = not isinstance(number, str | bytes) and math.isfinite(number)
    except (TypeError, OverflowError):  # a whole number that no float holds adds to none
        good = False
    if not good:
        raise UsageError(f"{where}: expected a finite number, got {number!r}")
