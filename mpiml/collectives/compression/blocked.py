"""Codecs whose payload can be decoded piece by piece, each while it is in the cache.

An array of gradients is larger than the cache, and memory that is taken for a moment costs more
than the arithmetic. So pieces are added to where they belong, and the whole is never there.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.codec import Codec
from mpiml.collectives.compression.coding import Payload

__all__ = ["BLOCK", "BlockedCodec"]

#: elements of a piece, or a few more or fewer; a multiple of 8, so that packed ones begin
#: with a byte
BLOCK: Final = 1 << 15


class BlockedCodec(Codec):
    """A codec whose `decode` makes flat pieces, one after the other."""

    @abstractmethod
    def _piece(self, payload: Payload, start: int, stop: int, dtype: Any) -> NDArray[Any]:
        """Return new elements `start` to `stop` of the flat array."""

    def _step(self, shape: Sequence[int]) -> int:
        """Return the elements of a piece, a multiple of 8; the last may have fewer."""
        return BLOCK

    def _pieces(self, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
        size, step = prod(shape), self._step(shape)
        for start in range(0, size, step):
            yield start, min(start + step, size)

    def decode(self, payload: Payload, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """Return what a payload stands for, in that shape and dtype."""
        flat = np.empty(prod(shape), dtype)
        for start, stop in self._pieces(shape):
            flat[start:stop] = self._piece(payload, start, stop, dtype)
        return flat.reshape(shape)

    def combine(self, payloads: Sequence[Payload], total: NDArray[Any], members: int) -> None:
        """Fill `total` with the sum of what the payloads stand for, added in their order."""
        flat = total.reshape(-1)
        for start, stop in self._pieces(total.shape):
            piece = self._piece(payloads[0], start, stop, total.dtype)
            for payload in payloads[1:]:
                piece += self._piece(payload, start, stop, total.dtype)
            flat[start:stop] = piece

    def subtract(self, array: NDArray[Any], payload: Payload) -> None:
        """Take what a payload stands for from `array`, in place."""
        flat = array.reshape(-1)
        for start, stop in self._pieces(array.shape):
            flat[start:stop] -= self._piece(payload, start, stop, array.dtype)
