"""A few levels between zero and a norm, chosen at random so that the mean is right."""

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.bits import pack, packed_size, unpack
from mpiml.collectives.compression.blocked import BLOCK, BlockedCodec
from mpiml.collectives.compression.checks import check_scale
from mpiml.collectives.compression.codec import check_seed
from mpiml.collectives.compression.coding import Layout, Payload
from mpiml.collectives.compression.draws import generator, uniform
from mpiml.errors import UsageError

__all__ = ["QSGD"]


class QSGD(BlockedCodec):
    """Send sign and level of each element: ``norm * sign * level / s``, right on average.

    With ``r = s * abs(x) / norm`` the level is the whole number below r or the one above,
    with such probabilities that the mean is r. Levels are packed in equally many bits; the
    paper's Elias code is shorter on average, but no size could be declared.

    Parameters
    ----------
    levels : int, optional
        s, 1 to 127. An element takes as many bits as the numbers up to 2s need.
    bits : int, optional
        2 to 8, instead: s is ``2**(bits-1) - 1``. 4 if neither is given.
    bucket : int or None
        Elements that share a norm; None: all of the array. Smaller means less noise.
    norm : str
        ``"max"``, the largest magnitude, so that elements use all levels up to s; or ``"l2"``,
        as the paper defines it, of which they use the lowest few: more noise in the same bytes.
    seed : int
        Of the random numbers.

    Raises
    ------
    UsageError
        Both of `levels` and `bits` are given, or something out of its range.

    References
    ----------
    D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD
    via Gradient Quantization and Encoding", NIPS 2017.
    """

    biased = False
    draws: ClassVar[Literal["own", "shared"] | None] = "own"
    _settings: ClassVar[tuple[str, ...]] = ("levels", "bucket", "norm", "seed")

    def __init__(
        self,
        levels: int | None = None,
        *,
        bits: int | None = None,
        bucket: int | None = 512,
        norm: str = "max",
        seed: int = 0,
    ) -> None:
        if levels is not None and bits is not None:
            raise UsageError("QSGD: expected levels= or bits=, got both")
        if levels is None:
            bits = 4 if bits is None else bits
            if bits not in range(2, 9):
                raise UsageError(
                    f"QSGD: bits: expected a whole number from 2 to 8, got {bits!r}"
                )
            levels = 2 ** (bits - 1) - 1
        if levels not in range(1, 128):
            raise UsageError(
                f"QSGD: levels: expected a whole number from 1 to 127, got {levels!r}"
            )
        if bucket is not None and (int(bucket) != bucket or bucket < 1):
            raise UsageError(
                f"QSGD: bucket: expected None or a number from 1 up, got {bucket!r}"
            )
        if norm not in ("l2", "max"):
            raise UsageError(f"QSGD: norm: expected 'l2' or 'max', got {norm!r}")
        self.levels = int(levels)
        self.bits = (2 * self.levels).bit_length()
        self.bucket = None if bucket is None else int(bucket)
        self.norm = norm
        self.seed = check_seed(seed, "QSGD")

    def encode(self, array: NDArray[Any], rng: np.random.Generator | None = None) -> Payload:
        """Return the norm of each bucket, and levels from -s to s, packed."""
        rng = generator(self.seed, "QSGD", "", 0, 0) if rng is None else rng
        rows = self._rows(array.reshape(-1))  # (n,) -> (buckets, bucket)
        norms = self._norms(rows)
        check_scale(norms, f"{self.norm} norm")
        with np.errstate(divide="ignore", over="ignore"):
            scale = np.divide(self.levels, norms)
        scale[~np.isfinite(scale)] = 0  # a norm of zero, or as good as zero
        codes = np.empty(rows.shape, np.uint8)
        height = max(1, BLOCK // rows.shape[1]) if rows.size else 1
        for start in range(0, rows.shape[0], height):
            block = slice(start, start + height)
            codes[block] = self._levels(rows[block], scale[block, None], rng)
        return norms, pack(codes.reshape(-1)[: array.size], self.bits)

    def _piece(self, payload: Payload, start: int, stop: int, dtype: Any) -> NDArray[Any]:
        norms, packed = payload
        if self.bucket is not None:
            norms = norms[start // self.bucket : -(-stop // self.bucket)]
        codes = unpack(packed[start * self.bits // 8 :], self.bits, stop - start)
        rows: NDArray[Any] = self._rows(codes).astype(dtype)
        rows -= self.levels
        rows *= (norms / np.asarray(self.levels, dtype))[:, None]
        flat: NDArray[Any] = rows.reshape(-1)[: stop - start]
        return flat

    def _step(self, shape: Sequence[int]) -> int:
        """Return the elements of a piece: of 8 buckets, or of a multiple of 8."""
        if self.bucket is None:
            return BLOCK
        return 8 * self.bucket * max(1, BLOCK // (8 * self.bucket))

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""
        size = prod(shape)
        buckets = -(-size // self._width(size))
        return [(dtype, (buckets,)), (np.dtype(np.uint8), (packed_size(size, self.bits),))]

    def _levels(
        self, rows: NDArray[Any], scale: NDArray[Any], rng: np.random.Generator
    ) -> NDArray[Any]:
        """Return levels from 0 to 2s, s being zero."""
        level = np.abs(rows)
        level *= scale
        np.minimum(level, self.levels, out=level)  # the norm was rounded too
        low: NDArray[Any] = np.floor(level)
        level -= low
        low += uniform(rng, rows.size).reshape(rows.shape) < level
        np.copysign(low, rows, out=low)
        low += self.levels
        return low

    def _width(self, size: int) -> int:
        return max(1, size if self.bucket is None else min(self.bucket, size))

    def _rows(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Return the array as one row for each bucket, the last one filled up with zeros."""
        width = self._width(flat.size)
        if flat.size % width:
            filled = np.zeros(-(-flat.size // width) * width, flat.dtype)
            filled[: flat.size] = flat
            flat = filled
        return flat.reshape(-1, width)

    def _norms(self, rows: NDArray[Any]) -> NDArray[Any]:
        if self.norm == "max":
            norms: NDArray[Any] = np.maximum(rows.max(axis=1), -rows.min(axis=1))
            return norms
        with np.errstate(over="ignore"):
            squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
            norms = np.sqrt(squares).astype(rows.dtype)
        return norms
