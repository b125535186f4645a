"""Bodies of control frames: fixed layouts, never pickle, and the tree they travel along."""

import struct
from typing import NamedTuple

__all__ = [
    "EXIT",
    "FAILED",
    "FANOUT",
    "FINISHED",
    "REQUESTED",
    "SIGNALLED",
    "STUCK",
    "TIME",
    "Note",
    "children",
    "parent",
]

FINISHED, REQUESTED, FAILED, SIGNALLED, TIME, EXIT, STUCK = range(7)
FANOUT = 8
_HEAD = struct.Struct("<BBiIII")
_BENIGN = (FINISHED, REQUESTED, SIGNALLED, TIME)


class Note(NamedTuple):
    """Why a program stops: travels up as a request and down as the order.

    Layout: reason u8, encoding of the error u8, exit status i32, vertex u32, rank u32, length
    of the text u32; then the text (UTF-8: who, and the traceback) and the encoded error.
    """

    reason: int
    status: int
    vertex: int
    rank: int
    text: str
    encoding: int = 0
    error: bytes = b""

    @property
    def benign(self) -> bool:
        """Whether the program is done or was asked to end; not so after a failure."""
        return self.reason in _BENIGN

    def pack(self) -> bytes:
        """Return the bytes."""
        text = self.text.encode("utf-8", "backslashreplace")
        head = _HEAD.pack(
            self.reason, self.encoding, self.status, self.vertex, self.rank, len(text)
        )
        return head + text + self.error

    @classmethod
    def unpack(cls, data: bytes) -> "Note":
        """Take the bytes apart."""
        reason, encoding, status, vertex, rank, length = _HEAD.unpack_from(data)
        start = _HEAD.size
        text = bytes(data[start : start + length]).decode("utf-8", "replace")
        return cls(reason, status, vertex, rank, text, encoding, bytes(data[start + length :]))


def parent(rank: int) -> int:
    """Return the rank above `rank` in the tree; rank 0 has none and returns -1."""
    return (rank - 1) // FANOUT if rank else -1


def children(rank: int, size: int) -> range:
    """Return the ranks right below `rank`."""
    first = rank * FANOUT + 1
    return range(min(first, size), min(first + FANOUT, size))
