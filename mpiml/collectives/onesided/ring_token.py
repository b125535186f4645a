"""The token of HogWild++'s ring: what it says, and how it comes from member to member.

It is a message, so there is one, wherever the members live: threads of a process hand it over
in memory, others send it by MPI. Beside it, words in the memory of each host say where it is
as far as the host knows, so that a member of the same host looks for the message only when it
is under way to it: a load from memory, not a call of MPI.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from mpiml.collectives.mail import Channel, Sending
from mpiml.collectives.onesided.ring_rule import RingRule

__all__ = ["WORDS", "Carrier", "Token"]

WORDS: Final = 64  #: bytes of the words in a host's memory
_HEAD: Final = struct.Struct("<qii")
_OFTEN: Final = 8  # looks, one of which asks MPI, where other hosts may have sent the token


class Token(NamedTuple):
    """What the token says."""

    hops: int  #: how often it has been given on
    last: int  #: the turn that ended last; at first the one before turn 0
    idle: int  #: how often it has been given on since then, by members that have stepped aside
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
        return cls(*_HEAD.unpack_from(head), absent)


class Carrier:
    """Takes the token and gives it on, for one member. Local.

    Parameters
    ----------
    rule : RingRule
        The ring.
    members : sequence of int
        The numbers in the team, by those in the ring.
    own : int
        This member's number in the team.
    channel : Channel
        For the token alone.
    words : memoryview
        `WORDS` bytes of the host's memory, zero at first.
    apart : bool
        Whether there are other hosts.
    """

    def __init__(
        self,
        rule: RingRule,
        members: Sequence[int],
        own: int,
        channel: Channel,
        words: memoryview,
        apart: bool,
    ) -> None:
        self._rule = rule
        self._turn = rule.token(members.index(own))
        self._members = members
        self._channel = channel
        self._words = words.cast("q")  # turn + 1, hops, last turn + 1; its holder writes them
        self._apart = apart
        self._looks = 0
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
        if self._words[0] != self._turn + 1 and not eager:
            if not self._apart:
                return None
            self._looks += 1
            if self._looks % _OFTEN:
                return None
        parcel = self._channel.poll()
        if parcel is None:
            return None
        token = Token.unpack(parcel.head)
        self.note(self._turn, token)
        return token

    def give(self, turn: int, token: Token) -> None:
        """Send the token to whose turn comes next."""
        self.note(turn, token)
        to = self._members[self._rule.member(turn)]
        self._sendings = [sending for sending in self._sendings if not sending.test()]
        self._sendings.append(self._channel.send(to, token.pack(self._rule.size)))

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
