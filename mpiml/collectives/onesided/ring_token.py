"""The token of HogWild++'s ring: what it says, and how it comes from member to member.

It is a message, so there is one, wherever the members live: threads of a process hand it over
in memory, others send it by MPI. Beside it, words in the memory of each host say where it is
as far as the host knows, so that a member of the same host looks for the message only when it
is under way to it: a load from memory, not a call of MPI. Where a process has died that had
the token, the next member of its host makes it anew; a token that is lost with a host, is lost:
the clusters go on without meeting.
"""

import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from mpiml.collectives.mail import Channel, Sending
from mpiml.collectives.onesided.ring_rule import RingRule
from mpiml.collectives.team import PlainHooks, Team
from mpiml.errors import RankFailedError

__all__ = ["WORDS", "Carrier", "Token"]

WORDS: Final = 64  #: bytes of the words in a host's memory
_HEAD: Final = struct.Struct("<qii")
_OFTEN: Final = 8  # looks, one of which asks MPI, where other hosts may have sent the token
_RARELY: Final = 256  # looks, one of which minds how long the token has been where it is
_STILL: Final = 2.0  # s there, after which one looks whether its holder is dead


class Token(NamedTuple):
    """What the token says."""

    hops: int  #: how often it has been given on
    last: int  #: the turn that ended last; at first the one before turn 0
    idle: int  #: how often since then by members that are aside, from 1 again after each round
    absent: frozenset[int] = frozenset()  #: members, by their numbers in the ring, that ended

    def pack(self, size: int) -> bytes:
        """Return it as bytes, for a ring of so many members."""
        bits = sum(1 << member for member in self.absent)
        return _HEAD.pack(self.hops, self.last, self.idle) + bits.to_bytes(
            -(-size // 8), "little"
        )

    @classmethod
    def unpack(cls, head: bytes) -> "Token":
        """Return what `pack` made bytes of."""
        bits = int.from_bytes(head[_HEAD.size :], "little")
        absent = frozenset(i for i in range(bits.bit_length()) if bits >> i & 1)
        hops, last, idle = _HEAD.unpack_from(head)
        return cls(hops, last, idle, absent)


class Carrier:
    """Takes the token and gives it on, for one member. Local.

    Parameters
    ----------
    rule : RingRule
        The ring.
    members : sequence of int
        The numbers in the team, by those in the ring.
    team : Team
        As this member sees it: that of the host's memory.
    channel : Channel
        For the token alone.
    words : memoryview
        `WORDS` bytes of the host's memory, zero at first.
    """

    def __init__(
        self,
        rule: RingRule,
        members: Sequence[int],
        team: Team,
        channel: Channel,
        words: memoryview,
    ) -> None:
        self._rule = rule
        self._turn = rule.token(members.index(team.index))
        self._members = members
        self._team = team
        self._channel = channel
        self._words = words.cast("q")  # turn + 1, hops, last turn + 1; its holder writes them
        self._looks = 0
        self._hops, self._since = -1, 0.0  # what the words said, and since when
        self._known = (0, rule.size - 1)  # hops and the last turn, as other hosts have said
        self._sendings: list[Sending] = []

    def first(self) -> Token | None:
        """Return the token, if it begins at this member."""
        if self._turn:
            return None
        token = Token(0, self._rule.size - 1, 0)
        self.note(0, token)
        return token

    def take(self, eager: bool = False) -> Token | None:
        """Return the token if it has come.

        Parameters
        ----------
        eager : bool
            Whether to ask MPI in any case.
        """
        self._looks += 1
        if not self._looks % _RARELY and (token := self._anew()) is not None:
            return token
        asks = eager or (self._team.several_hosts and not self._looks % _OFTEN)
        if self._words[0] != self._turn + 1 and not asks:
            return None
        parcel = self._channel.poll()
        if parcel is None:
            return None
        token = Token.unpack(parcel.head)
        self.note(self._turn, token)
        return token

    def _anew(self) -> Token | None:
        """Return the token if who has it is dead, and this member is the next of the host.

        A token that is with a member of this host, is there as the words say.
        """
        turn, hops, now = self._words[0] - 1, self._words[1], time.monotonic()
        if hops != self._hops:
            self._hops, self._since = hops, now
        if turn < 0 or now - self._since < _STILL:
            return None
        self._since = now
        absent: set[int] = set()
        while turn != self._turn:
            member = self._rule.member(turn)
            if self._members[member] in self._team.local or not absent:
                if not self._dead(self._members[member]):
                    return None
                absent.add(member)
            turn = (turn + 1) % self._rule.size
        if not absent:
            return None
        token = Token(hops + 1, self._words[2] - 1, 0, frozenset(absent))
        self.note(turn, token)
        return token

    def _dead(self, member: int) -> bool:
        """Tell whether the process of a member of this host is gone. A program ends with it."""
        hooks = self._team.hooks
        if member not in self._team.local or not isinstance(hooks, PlainHooks):
            return False
        try:
            hooks.waiting(1.0, (member,), "RingModel: a turn in the ring")
        except RankFailedError:
            return True
        return False

    def give(self, turn: int, token: Token) -> None:
        """Send the token to whose turn comes next."""
        self.note(turn, token)
        to = self._members[self._rule.member(turn)]
        self._sendings = [sending for sending in self._sendings if not sending.test()]
        self._sendings.append(self._channel.send(to, token.pack(self._rule.size)))

    def close(self) -> None:
        """Take no token any more."""
        self._channel.close()

    def note(self, turn: int, token: Token) -> None:
        """Note on this host whose turn comes next, and what the token says."""
        words = self._words
        words[1], words[2] = token.hops, token.last + 1
        words[0] = turn + 1

    def seen(self) -> tuple[int, int]:
        """Return how often the token has been given on, and the turn that ended last."""
        words = self._words
        return max((words[1], words[2] - 1), self._known) if words[2] else self._known

    def hear(self, seen: tuple[int, int]) -> None:
        """Take in what `seen` returned elsewhere."""
        self._known = max(self._known, seen)
