"""The agreed stop of a role: all its ranks leave their loop after the same round.

No message is sent while the program runs. A round is a call of ``agree_stop`` or a collective
of `mpiml.collectives`. Each rank counts its rounds; when a stop comes,
every rank freezes at its count and tells the first of the role, which answers with the target:
one round more than the furthest has begun. A rank below it goes on, so collectives that others
have entered are finished by all. Pure state: what to send is returned, not sent.
"""

import threading

from mpiml.waits import Wait

__all__ = ["Agreement", "Tally"]


class Agreement:
    """One rank's side.

    Attributes
    ----------
    decided : Wait
        Ready once the target is known.
    ending : bool
        Whether it is.
    """

    def __init__(self, title: str) -> None:
        self.decided = Wait(f"{title}: agreeing with its role on the round to stop after")
        self.ending = False
        self._lock = threading.Lock()
        self._count = 0
        self._frozen = False
        self._target: int | None = None

    def begin_round(self) -> bool:
        """Count a round; whether a stop is being agreed, so that `decided` must be awaited."""
        with self._lock:
            self._count += 1
            return self._frozen

    def enter(self) -> int:
        """Count a round; its number if a stop is being agreed, so that `decided` counts, or 0."""
        with self._lock:
            self._count += 1
            return self._count if self._frozen else 0

    @property
    def rounds(self) -> int:
        """How many rounds have begun."""
        return self._count

    def is_over(self, number: int) -> bool:
        """Return whether the rank leaves before this round."""
        target = self._target
        return target is not None and number > target

    def is_last(self) -> bool:
        """Return whether the rank leaves now: the round that has begun is the one to leave at."""
        target = self._target
        return target is not None and self._count >= target

    def freeze(self) -> int | None:
        """Stop rounds from passing unnoticed; how many have begun, None from the second time."""
        with self._lock:
            if self._frozen:
                return None
            self._frozen = True
            return self._count

    def decide(self, target: int) -> bool:
        """Take the target in; whether the rank stops at once, since nobody counts rounds."""
        self._target = target
        self.ending = True
        return target == 0


class Tally:
    """The first rank's side: collects the counts of a role."""

    def __init__(self, replicas: int) -> None:
        self._counts: dict[int, int] = {}
        self._replicas = replicas

    def add(self, vertex: int, count: int) -> int | None:
        """Take a count in; return the target once all have come: 0, or the furthest plus 1."""
        self._counts[vertex] = count
        if len(self._counts) < self._replicas:
            return None
        furthest = max(self._counts.values())
        return furthest + 1 if furthest else 0
