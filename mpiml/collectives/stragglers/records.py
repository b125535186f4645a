"""What members and their collector tell each other: the heads of messages."""

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

__all__ = ["Kind", "Record", "mask", "members_of"]

_HEAD: Final = struct.Struct("<Bqi")  # kind, step, member


class Kind(IntEnum):
    """What a message is about."""

    GRADIENT = 1  #: to the collector: what a member brings to a step
    TOOK = 2  #: a member has the result of a step
    ASK = 3  #: who is waited for?
    LOST = 4  #: a member will not come any more, as another has found; with the reason
    GONE = 5  #: a member takes part no more; with the reason
    RESULT = 6  #: from the collector: of a step, with who is in it
    STATE = 7  #: who is waited for
    FAILED = 8  #: there will be no result any more; with the reason
    BYE = 9  #: the answer to GONE, and the last message


class Record(NamedTuple):
    """The head of a message."""

    kind: Kind
    step: int = -1
    member: int = -1
    more: bytes = b""  #: a text, or members as bits

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _HEAD.pack(self.kind, self.step, self.member) + self.more

    @property
    def text(self) -> str:
        """What follows, as text."""
        return self.more.decode("utf-8", "replace")

    @classmethod
    def unpack(cls, head: bytes) -> "Record":
        """Return what `pack` has packed."""
        kind, step, member = _HEAD.unpack_from(head)
        return cls(Kind(kind), step, member, head[_HEAD.size :])


def mask(members: Iterable[int]) -> bytes:
    """Return members as bits."""
    bits = 0
    for member in members:
        bits |= 1 << member
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def members_of(bits: bytes) -> tuple[int, ...]:
    """Return what `mask` was given, ascending."""
    number = int.from_bytes(bits, "little")
    return tuple([i for i in range(number.bit_length()) if number >> i & 1])
