"""The agreed stop of a role: all its ranks leave their loop after the same round.

No message is sent while the program runs. A round is a call of ``agree_stop`` or a collective
of `mpiml.collectives`. Each rank counts its rounds; when a stop comes,
every rank freezes at its count and tells the first of the role, which answers with the target:
one round more than the furthest has begun. A rank below it goes on, so collectives that others
have entered are finished by all. If no further round is begun, because all members are idle, they
stop at once (see `mpiml.idle`). Pure state: what to send is returned, not sent.
"""

import threading

from mpiml.waits import Wait

__all__ = ["Agreement", "Tally"]

_MORE = 100  # rounds after the last ``agree_stop``, beyond ten times as many as there ever were


class Agreement:
    """One rank's side.

    Attributes
    ----------
    decided : Wait
        Ready once the target is known.
    rounds : int
        How many rounds have begun.
    alert : bool
        Whether rounds may not pass unnoticed any more: a stop is being agreed, or has come.
    ending : bool
        Whether the target is known.
    """

    def __init__(self, title: str) -> None:
        self.decided = Wait(f"{title}: agreeing with its role on the round to stop after")
        self.alert = False
        self.ending = False
        self.rounds = 0  #: how many rounds have begun
        self._lock = threading.Lock()
        self._frozen = False
        self._target: int | None = None
        self._asked = 0  # the round of the last ``agree_stop``
        self._period = 0  # the most rounds from one to the next

    def next(self) -> int:
        """Count a round, return its number; look at `alert` afterwards."""
        with self._lock:
            self.rounds += 1
            return self.rounds

    def begin_round(self) -> bool:
        """Count a call of ``agree_stop``; whether a stop is being agreed: await `decided` then."""
        number = self.next()
        if self._asked:
            self._period = max(self._period, number - self._asked)
        self._asked = number
        return self._frozen

    @property
    def at_once(self) -> bool:
        """Whether all members stop without another round."""
        return self._target == 0

    def is_over(self, number: int) -> bool:
        """Return whether the rank leaves before this round, which is a collective.

        In a loop that calls ``agree_stop`` it leaves there, not in the middle of the loop. That
        the loop is over is known from rounds only, so it is known alike on all ranks.
        """
        target = self._target
        if target is None or number <= target:
            return False
        return not target or not self._asked or number > self._asked + 10 * self._period + _MORE

    def is_last(self) -> bool:
        """Return whether the rank leaves in the call of ``agree_stop`` that it is in."""
        target = self._target
        return target is not None and self.rounds >= target

    def freeze(self) -> int | None:
        """Stop rounds from passing unnoticed; how many have begun, None from the second time."""
        with self._lock:
            if self._frozen:
                return None
            self._frozen = self.alert = True  # before the look: who counts looks after it
            return self.rounds

    def decide(self, target: int) -> bool:
        """Take the target in; whether the rank stops at once, since nobody counts rounds."""
        self._target = target
        self.ending = True
        return target == 0


class Tally:
    """The first rank's side: collects the counts of a role."""

    def __init__(self, replicas: int) -> None:
        self._counts: dict[int, int] = {}
        self._idle: set[int] = set()
        self._lock = threading.Lock()
        self._replicas = replicas
        self.target = 0

    def add(self, vertex: int, count: int) -> int | None:
        """Take a count in; return the target once all have come: 0, or the furthest plus 1."""
        self._counts[vertex] = count
        if len(self._counts) < self._replicas:
            return None
        furthest = max(self._counts.values())
        self.target = furthest + 1 if furthest else 0
        return self.target

    def rest(self, vertex: int, idle: bool) -> bool:
        """Note that a member is idle, or wants to go on; whether all are: then it is too late."""
        with self._lock:
            if len(self._idle) < self._replicas:
                (self._idle.add if idle else self._idle.discard)(vertex)
            return len(self._idle) == self._replicas
