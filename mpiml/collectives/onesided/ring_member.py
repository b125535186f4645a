"""One member of HogWild++'s ring: has its turns between its updates, and steps aside.

A turn is had inside of a call that adds, once its updates are counted: nobody waits. A member
that waits for others, or has ended, steps aside: meanwhile the agent's thread gives the token
on as it comes, and the turn is left out. A token that finds everybody aside goes on round all the
same, with a rest in each round: who comes back next, has a turn, wherever the token was.
"""

import time
from typing import Final, NamedTuple

from mpiml.collectives.onesided.agent import Agent
from mpiml.collectives.onesided.ring_meeting import Meeting
from mpiml.collectives.onesided.ring_places import StepSize
from mpiml.collectives.onesided.ring_rule import Due, RingRule, Turns, weights
from mpiml.collectives.onesided.ring_token import Carrier, Token
from mpiml.errors import ServiceGoneError

__all__ = ["RingDone", "RingMember"]

_NEVER: Final = 1 << 62  # updates
_REST: Final = 5e-3  # s, of a token in each round of members that are all aside


class RingDone(NamedTuple):
    """What one member has done in the ring."""

    syncs: int  #: turns it had
    moved: int  #: components, over all its turns, that were passed on
    kept: int  #: those whose delta was not above the tolerance
    late: int  #: updates that it made while it looked for the token
    left_out: int  #: turns that it gave on


class RingMember:
    """Counts a member's updates, and has its turns.

    Local: every method, by the member's thread.

    Parameters
    ----------
    rule : RingRule
        The ring.
    member : int
        The member's number in it.
    carrier : Carrier
        Brings the token.
    meeting : Meeting
        Brings the models together.
    agent : Agent
        Gives the token on while the member is aside.
    step : StepSize
        What deltas are multiplied by: the model's.
    """

    def __init__(
        self,
        rule: RingRule,
        member: int,
        carrier: Carrier,
        meeting: Meeting,
        agent: Agent,
        step: StepSize,
    ) -> None:
        self._rule = rule
        self._step = step
        self._member = member
        self._turns = Turns(rule, member)
        self._carrier = carrier
        self._meeting = meeting
        self._agent = agent
        self._token: Token | None = carrier.first()
        self._pending = 0  # updates not counted yet
        self._next = self._turns.left  # so many of them are
        self._looks = False  # whether nothing is to be done until the token comes
        self._aside = self._ended = False
        self._rests = 0.0  # until when the token stays here, once it is to rest
        self._moved = self._kept = self._left_out = 0

    # -- turns ---------------------------------------------------------------------------------

    def count(self, updates: int) -> None:
        """Count own updates; have a turn, or end it, if it is time."""
        self._pending += updates
        if self._pending >= self._next:
            self._advance()

    @property
    def room(self) -> int:
        """How many updates to make, at the most, before they are counted."""
        left = self._turns.left - self._pending
        return left if left > 0 else self._rule.delay

    def _advance(self) -> None:
        if self._looks:  # all that a call costs while the token is elsewhere
            self._token = self._carrier.take()
            if self._token is None:
                return
            self._looks = False
        pending, self._pending = self._pending, 0
        due = self._turns.count(pending)
        if self._aside:
            self._next = _NEVER
            return
        self._next = 1
        if due is Due.LOOK:
            self._look()
        elif due is Due.PASS and self._meeting.applied():
            self._pass()
        self._next = self._turns.left or 1

    def _look(self) -> None:
        if self._token is None:
            self._token = self._carrier.take()
            if self._token is None:
                self._looks = True
                return
        if not self._meeting.begun:
            own = self._rule.cluster(self._turns.token)
            to = self._rule.following(own, self._token.absent)
            if to is None:  # this cluster alone is left: its members have their turns still
                self._turns.synced()
                return
            self._meeting.begin(to)
        if self._meeting.ready():
            self._meet()

    def _meet(self) -> None:
        assert self._token is not None
        rule = self._rule
        beta, lam = weights(rule.living(self._token.absent))
        moved, kept = self._meeting.finish(self._step.now, beta, lam, rule.tolerance)
        self._moved += moved
        self._kept += kept
        self._turns.synced()

    def _pass(self) -> None:
        token, own = self._token, self._turns.token
        assert token is not None
        turn = self._turns.passed(token.absent)
        token = Token(token.hops + 1, own, 0, token.absent)
        self._token = None
        if turn is None or turn == own:  # nobody else is left
            self._token = token
            self._carrier.note(own, token)
        else:
            self._carrier.give(turn, token)

    # -- aside ---------------------------------------------------------------------------------

    def aside(self, end: bool = False) -> None:
        """Have no turns until `back`; a turn that has begun is ended first.

        Parameters
        ----------
        end : bool
            Whether the member never comes back.
        """
        self._ended = self._ended or end
        if self._aside:
            return
        if self._meeting.begun:
            self._meeting.wait()
            self._meet()
        if self._turns.holds:
            self._meeting.flush()
            self._pass()
        self._step_aside()

    def _step_aside(self) -> None:
        if not self._aside:
            self._looks = False
            self._aside = True
            self._agent.add(self._carry)

    def back(self) -> None:
        """Have turns again, unless the member has ended."""
        if not self._aside or self._ended:
            return
        self._agent.remove(self._carry)
        self._aside, self._rests = False, 0.0
        if self._token is not None:  # it is this member's to have; then it goes round anew
            self._token = self._token._replace(idle=0)
        self._next = self._turns.left or 1

    def abandon(self) -> None:
        """End without a wait: an error does not hold the ring."""
        self._ended = True
        self._meeting.drop()
        if self._turns.holds:
            self._pass()
        self._step_aside()

    def _carry(self) -> bool:
        """Give the token on, on the agent's thread; return whether it came."""
        token, rule = self._token, self._rule
        if token is None:
            token = self._token = self._carrier.take(eager=True)
        if token is None:
            return False
        if self._ended and self._member not in token.absent:
            token = self._token = token._replace(absent=token.absent | {self._member})
        if token.idle >= rule.size:
            now = time.monotonic()
            self._rests = self._rests or now + _REST
            if now < self._rests:
                return False
        own = self._turns.token
        turn = rule.after(own, token.absent)
        if turn is None or turn == own:
            return False
        idle = token.idle % rule.size + 1
        try:
            self._carrier.give(turn, token._replace(hops=token.hops + 1, idle=idle))
        except ServiceGoneError:  # the program ends
            return False
        self._token, self._rests = None, 0.0
        self._left_out += 1
        return True

    def settle(self) -> bool:
        """Take in a token that is under way, once all have ended; return whether it is here."""
        self._agent.remove(self._carry)
        if self._token is None:
            self._token = self._carrier.take(eager=True)
        return self._token is not None

    def close(self) -> None:
        """Take no token any more. Local: once it is known where the token is."""
        self._carrier.close()

    # -- what there was ------------------------------------------------------------------------

    @property
    def seen(self) -> tuple[int, int]:
        """How often the token has been given on, and the turn that ended last: as known here."""
        return self._carrier.seen()

    def hear(self, seen: tuple[int, int]) -> None:
        """Take in what `seen` is elsewhere."""
        self._carrier.hear(seen)

    def statistics(self) -> RingDone:
        """Return what there was."""
        done = self._turns.statistics()
        late = done.late + (self._pending if self._turns.due is Due.LOOK else 0)
        return RingDone(done.syncs, self._moved, self._kept, late, self._left_out)
