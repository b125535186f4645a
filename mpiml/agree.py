"""The agreed stop of a role: all its ranks leave their loop after the same round.

No message is sent while the program runs. A round is a call of ``agree_stop`` or a collective
of `mpiml.collectives`. Each rank counts its rounds; when a stop comes,
every rank freezes at its count, and the furthest count goes up a tree of the role's members. From
its top comes down the target: one round more than the furthest has begun. A rank below it goes on,
so collectives that others have entered are finished by all. If no further round is begun, because
all members are idle, they stop at once (see `mpiml.idle`). Pure state: what to send is returned,
not sent (see `mpiml.agreeing`).
"""

import threading

from mpiml.control import children, parent
from mpiml.waits import Wait
from mpiml.wire import AGREE_COUNT, AGREE_REST, AGREE_TARGET

__all__ = ["Agreement", "Branch", "Message"]

Message = tuple[int, int, int]
"""Kind of a frame, index of the member that is meant, number."""

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


class Branch:
    """What one member knows of those below it in the tree of its role, and passes on.

    Each method takes in what was heard and returns messages: kind, index of the member that is
    meant, number. One to the member itself is for its own node.

    Parameters
    ----------
    index, replicas
        Which member of how many.
    """

    __slots__ = ("_asking", "_counts", "_idle", "_told", "above", "below", "index", "target")

    def __init__(self, index: int, replicas: int) -> None:
        self.index = index
        self.above = parent(index)
        self.below = children(index, replicas)
        self.target: int | None = None
        self._counts: dict[int, int] = {}  # the furthest of each branch, and of the member
        self._idle: set[int] = set()  # branches all of whose members are, and the member
        self._told = False  # that all here are idle; until it has been taken back
        self._asking: list[int] = []  # to go on all the same

    def count(self, index: int, count: int) -> list[Message]:
        """Take in the furthest count of a branch below, or the member's own."""
        self._counts[index] = count
        if len(self._counts) <= len(self.below):
            return []
        furthest = max(self._counts.values())
        if self.above >= 0:
            return [(AGREE_COUNT, self.above, furthest)]
        return self.decide(furthest + 1 if furthest else 0)

    def rest(self, index: int, idle: bool) -> list[Message]:
        """Take in that all of a branch, or the member, are idle; or that one wants to go on.

        It may, unless somebody has heard that all are. So where that was told above, it is asked
        there first.
        """
        if idle:
            self._idle.add(index)
            if len(self._idle) <= len(self.below):
                return []
            if self.above < 0:
                return self.decide(0)
            self._told = True
            return [(AGREE_REST, self.above, 1)]
        if self.target == 0:
            return []  # too late, which it will hear
        self._idle.discard(index)
        if not self._told:
            return [(AGREE_TARGET, index, self.target or 0)]
        self._asking.append(index)
        return [(AGREE_REST, self.above, 0)] if len(self._asking) == 1 else []

    def decide(self, target: int) -> list[Message]:
        """Take in what comes down: the target, 0 to stop at once, or that who asks may go on."""
        if self.target is None or (self.target and not target):
            self.target = target
            return [(AGREE_TARGET, index, target) for index in (*self.below, self.index)]
        if not target:
            return []
        self._told = False
        asking, self._asking = self._asking, []
        return [(AGREE_TARGET, index, target) for index in asking]
