"""One bit for each element, and two values for each column."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.bits import packed_size, unpack
from mpiml.collectives.compression.blocked import BLOCK, BlockedCodec
from mpiml.collectives.compression.checks import check_scale
from mpiml.collectives.compression.coding import Layout, Payload

__all__ = ["OneBit"]


class OneBit(BlockedCodec):
    """1-bit SGD: send signs, and for each column the mean of either sign.

    Biased, so the rest is kept and added to the next step's array. An array of two and more
    dimensions is a matrix of ``shape[0]`` rows; one with fewer dimensions is a single column.
    Zero counts as positive.

    References
    ----------
    F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its
    Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
    """

    biased = True

    def encode(self, array: NDArray[Any]) -> Payload:
        """Return the means of the negative and the other elements, and one bit for each."""
        matrix = array.reshape(_matrix(array.shape))
        positive = matrix >= 0
        count = positive.sum(axis=0, dtype=np.int64)
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            upper = np.maximum(matrix, 0).sum(axis=0, dtype=np.float64)
            lower = np.minimum(matrix, 0).sum(axis=0, dtype=np.float64)
            check_scale(upper - lower, "sum of magnitudes")
        means = np.empty((2, matrix.shape[1]), array.dtype)
        means[0] = lower / np.maximum(matrix.shape[0] - count, 1)
        means[1] = upper / np.maximum(count, 1)
        return means, np.packbits(positive, bitorder="little")

    def _piece(self, payload: Payload, start: int, stop: int, dtype: Any) -> NDArray[Any]:
        means, packed = payload
        positive = unpack(packed[start // 8 :], 1, stop - start).reshape(-1, means.shape[1])
        # numpy.where takes ten times as long where signs change at random
        rows: NDArray[Any] = np.multiply(positive, means[1], dtype=dtype)
        rows += np.multiply(positive ^ 1, means[0], dtype=dtype)
        return rows.reshape(-1)

    def _step(self, shape: Sequence[int]) -> int:
        """Return the elements of a piece: of a number of rows that is a multiple of 8."""
        columns = 8 * max(1, _matrix(shape)[1])
        return columns * max(1, BLOCK // columns)

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""
        _, columns = _matrix(shape)
        bits = (np.dtype(np.uint8), (packed_size(prod(shape), 1),))
        return [(dtype, (2, columns)), bits]


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of an array as a matrix."""
    if len(shape) < 2:
        return prod(shape), 1
    return shape[0], prod(shape[1:])
