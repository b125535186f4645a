"""Three values, chosen at random so that the mean is right."""

from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.bits import pack, packed_size, unpack
from mpiml.collectives.compression.blocked import BLOCK, BlockedCodec
from mpiml.collectives.compression.codec import check_seed
from mpiml.collectives.compression.coding import Layout, Payload
from mpiml.collectives.compression.draws import generator, uniform
from mpiml.errors import UsageError

__all__ = ["TernGrad"]


class TernGrad(BlockedCodec):
    """Send -s, 0 or s for each element, in 2 bits, right on average.

    s is the largest magnitude of the array; an element x becomes ``s * sign(x)`` with the
    probability ``abs(x) / s``, else 0. Elements beyond `clip` standard deviations are cut to
    that first, since one large s makes all others noise. Array by array.

    Parameters
    ----------
    clip : float or None
        Standard deviations, taken about zero so that equal elements are no outliers; None:
        no clipping, which is what is unbiased in the strict sense.
    seed : int
        Of the random numbers.

    Raises
    ------
    UsageError
        `clip` is not positive.

    References
    ----------
    W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary Gradients to
    Reduce Communication in Distributed Deep Learning", NIPS 2017.
    """

    biased = False
    draws: ClassVar[Literal["own", "shared"] | None] = "own"
    _settings: ClassVar[tuple[str, ...]] = ("clip", "seed")

    def __init__(self, clip: float | None = 2.5, *, seed: int = 0) -> None:
        if clip is not None and not clip > 0:
            raise UsageError(
                f"TernGrad: clip: expected None or a positive number, got {clip!r}"
            )
        self.clip = None if clip is None else float(clip)
        self.seed = check_seed(seed, "TernGrad")

    def encode(self, array: NDArray[Any], rng: np.random.Generator | None = None) -> Payload:
        """Return s, and 0, 1 or 2 for -s, 0 and s, packed."""
        rng = generator(self.seed, "TernGrad", "", 0, 0) if rng is None else rng
        flat = array.reshape(-1)
        scale = self._scale(flat)
        with np.errstate(divide="ignore", over="ignore"):
            factor = np.nan_to_num(np.divide(1, scale, dtype=flat.dtype), posinf=0)
        codes = np.empty(flat.size, np.uint8)
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK]
            part = np.abs(block)
            part *= factor
            sent = (uniform(rng, block.size) < part).view(np.uint8)  # from 1 up it is certain
            negative = (block < 0).view(np.uint8)
            codes[start : start + BLOCK] = sent + 1 - ((sent & negative) << 1)
        return scale, pack(codes, 2)

    def _piece(self, payload: Payload, start: int, stop: int, dtype: Any) -> NDArray[Any]:
        scale, packed = payload
        flat: NDArray[Any] = unpack(packed[start // 4 :], 2, stop - start).astype(dtype)
        flat -= 1
        flat *= scale
        return flat

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""
        return [(dtype, ()), (np.dtype(np.uint8), (packed_size(prod(shape), 2),))]

    def _scale(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Return s: the largest magnitude, or the limit if that is less."""
        if not flat.size:
            return np.zeros((), flat.dtype)
        most = np.maximum(flat.max(), -flat.min())
        if self.clip is not None:
            with np.errstate(over="ignore"):
                square = np.einsum("i,i->", flat, flat, dtype=np.float64) / flat.size
                most = np.minimum(most, self.clip * np.sqrt(square))
        return np.asarray(most, flat.dtype)
