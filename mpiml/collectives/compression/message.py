"""The payloads of one call as one block of bytes.

Arrays begin at multiples of 8 bytes. Where dtypes and shapes follow from the array that was
encoded, nothing but the numbers is sent; else a line of text stands before them.
"""

import json
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.coding import Layout, Payload
from mpiml.collectives.ops import numpy_dtype

__all__ = ["read", "write"]

_Bytes = NDArray[np.uint8]
_ALIGNED: Final = 8  # bytes


def write(payloads: Sequence[Payload], layouts: Sequence[Layout | None]) -> _Bytes:
    """Return payloads as one block.

    Parameters
    ----------
    payloads : sequence of tuples of ndarray
        All of them C-contiguous.
    layouts : sequence
        What the reader knows of each: its layout, or None.
    """
    parts: list[_Bytes] = []
    for payload, layout in zip(payloads, layouts, strict=True):
        if layout is None:
            text = json.dumps([[part.dtype.name, part.shape] for part in payload]).encode()
            parts.append(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
        parts.extend([part.reshape(-1).view(np.uint8) for part in payload])
    block = np.empty(sum(_whole(part.size) for part in parts), np.uint8)
    at = 0
    for part in parts:
        block[at : at + part.size] = part
        block[at + part.size : at + _whole(part.size)] = (
            0  # the same bytes for the same numbers
        )
        at += _whole(part.size)
    return block


def read(block: _Bytes, layouts: Sequence[Layout | None]) -> list[Payload]:
    """Return the payloads that `write` wrote, as views of the block."""
    at = 0
    payloads = []
    for known in layouts:
        layout = known
        if layout is None:
            length = int.from_bytes(block[at : at + 8].tobytes(), "little")
            text = block[at + 8 : at + 8 + length].tobytes()
            layout = [(numpy_dtype(name), tuple(shape)) for name, shape in json.loads(text)]
            at += _whole(8 + length)
        parts = []
        for dtype, shape in layout:
            size = prod(shape) * np.dtype(dtype).itemsize
            part: NDArray[Any] = block[at : at + size].view(dtype).reshape(shape)
            parts.append(part)
            at += _whole(size)
        payloads.append(tuple(parts))
    return payloads


def _whole(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
