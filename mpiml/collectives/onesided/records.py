"""What members ask of another host's memory, as bytes. Pure.

A head of fixed size, and a body of plain arrays. Additions to elements travel as rows of a
CSR block, so that many that wait for a message become one.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = [
    "ADD",
    "ASSIGN",
    "FAILED",
    "LOOK",
    "LOOKS",
    "MARK",
    "READ",
    "ROWS",
    "SNAPSHOT",
    "Ask",
    "Said",
    "Sparse",
    "pack_rows",
    "unpack_rows",
]

# The first three change a block and are acknowledged, many at a time; the others are answered.
ADD: Final = 1  #: body: the arrays of a block in its layout, or one leaf
ROWS: Final = 2  #: body: rows of a CSR block
ASSIGN: Final = 3  #: as ADD
SNAPSHOT: Final = 4  #: the arrays of a block, between two updates; `first`: 1 clears them
READ: Final = 5  #: `count` bytes of the host's memory from `first` on
MARK: Final = 6  #: the version of a block
FAILED: Final = 7  #: an answer: body: why
LOOK: Final = 8  #: nothing is asked; whoever serves the memory looks often, for `LOOKS`

LOOKS: Final = 5e-3  #: s

_ASK: Final = struct.Struct("<BBHiIIqqd")
_SAID: Final = struct.Struct("<BBHIqqq")


class Ask(NamedTuple):
    """The head of a request."""

    kind: int
    wide: int  #: whether the indices of ROWS have 8 bytes, not 4
    marked: int  #: whether the version before it is to be told
    leaf: int  #: -1: all of them
    block: int  #: the member whose block it is
    number: int  #: of an answer that is expected; else 0
    first: int
    count: int  # type: ignore[assignment]  # of elements, or of bytes
    scale: float

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _ASK.pack(*self)

    @classmethod
    def unpack(cls, head: bytes) -> "Ask":
        """Return what `pack` made bytes of."""
        return cls._make(_ASK.unpack(head))


class Said(NamedTuple):
    """The head of an answer, or of an acknowledgement."""

    kind: int
    marked: int  #: whether `version` and `own` are those before a marked request
    spare: int
    number: int  #: of the request; 0: it acknowledges
    done: int  #: requests of this member that have been done so far, of those without a number
    version: int  #: updates of the block
    own: int  #: those of them that this member asked for

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _SAID.pack(*self)

    @classmethod
    def unpack(cls, head: bytes) -> "Said":
        """Return what `pack` made bytes of."""
        return cls._make(_SAID.unpack(head))


class Sparse(NamedTuple):
    """Additions to elements of a leaf: one, or the rows of a CSR block."""

    positions: "np.ndarray[Any, Any]"  #: (n,) int32 or int64
    values: "np.ndarray[Any, Any]"  #: (n,)
    scale: Any  #: a number, or (rows,)
    starts: "np.ndarray[Any, Any] | None" = None  #: (rows + 1,) from 0 to n; None: one row


def pack_rows(adds: Sequence[Sparse]) -> tuple[bytes, int, bool]:
    """Return additions to one leaf as rows.

    Returns
    -------
    body : bytes
        Row starts, coefficients (float64), values, indices; each from a multiple of 8 on.
    rows : int
        How many.
    wide : bool
        Whether indices have 8 bytes.
    """
    lengths: list[int] = []
    scales: list[float] = []
    for add in adds:
        if add.starts is None:
            lengths.append(len(add.positions))
            scales.append(add.scale)
        else:
            lengths += np.diff(add.starts).tolist()
            scales += add.scale.tolist()
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    wide = any(add.positions.itemsize == 8 for add in adds)
    if len(adds) == 1:
        positions, values = adds[0].positions, adds[0].values
    else:
        positions = np.concatenate([add.positions for add in adds])
        values = np.concatenate([add.values for add in adds])
    gap = bytes(-values.nbytes % 8)
    positions = positions.astype(np.int64 if wide else np.int32, copy=False)
    factors = np.array(scales, np.float64).tobytes()
    parts = (starts.tobytes(), factors, values.tobytes(), gap, positions.tobytes())
    return b"".join(parts), len(lengths), wide


def unpack_rows(
    body: Any, rows: int, wide: bool, dtype: "np.dtype[Any]"
) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Return row starts, indices, values and coefficients, in `dtype`, of `pack_rows`."""
    starts = np.frombuffer(body, np.int64, rows + 1)
    at = starts.nbytes
    scales = np.frombuffer(body, np.float64, rows, at)
    at += scales.nbytes
    count = int(starts[-1])
    values = np.frombuffer(body, dtype, count, at)
    at += values.nbytes + -values.nbytes % 8
    positions = np.frombuffer(body, np.int64 if wide else np.int32, count, at)
    return starts, positions, values, scales.astype(dtype)
