"""Half the bytes by half the precision: sums of bfloat16 or float16."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpiml._native import convert
from mpiml.collectives.compression.codec import Codec
from mpiml.collectives.compression.coding import Layout, Payload
from mpiml.collectives.ops import DTYPES, numpy_dtype
from mpiml.errors import UsageError

__all__ = ["Cast"]


class Cast(Codec):
    """Send each element as bfloat16 or float16, rounded to the nearest, ties to even.

    Payloads are summed. NaN and infinity pass, as in an allreduce without compression, and a
    float16 beyond 65504, in an array or in the sum, becomes infinite.

    Parameters
    ----------
    dtype : str
        ``"bfloat16"``: the range of float32, 8 bits of precision. ``"float16"``: 11 bits of
        precision, between 6e-8 and 65504.

    Raises
    ------
    UsageError
        Another dtype, or bfloat16 without the package ml_dtypes.
    """

    biased = False
    reducible = True
    finite = False
    _settings: ClassVar[tuple[str, ...]] = ("dtype",)

    def __init__(self, dtype: str = "bfloat16") -> None:
        if dtype not in ("bfloat16", "float16"):
            raise UsageError(f"Cast: dtype: expected 'bfloat16' or 'float16', got {dtype!r}")
        self.dtype = dtype
        self._to = numpy_dtype(dtype)

    def encode(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array in the smaller dtype."""
        return _converted(array, self._to)

    def decode(self, payload: NDArray[Any], shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """Return the array, or the sum of arrays, in `dtype`."""
        return _converted(payload, np.dtype(dtype)).reshape(shape)

    def combine(self, payloads: Sequence[Payload], total: NDArray[Any], members: int) -> None:
        """Fill `total` with what one payload stands for, of which all are the sum."""
        ((payload,),) = payloads
        _convert(total, payload)

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""
        return [(self._to, shape)]


def _converted(array: NDArray[Any], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Return an array in another dtype."""
    made = np.empty(array.shape, dtype)
    _convert(made, np.asarray(array, order="C"))
    return made


def _convert(to: NDArray[Any], array: NDArray[Any]) -> None:
    """Copy C-contiguous arrays of two dtypes; by the faster of the two ways that are here."""
    if "float16" in (array.dtype.name, to.dtype.name):
        bytes_of: list[Any] = [x.reshape(-1).view(np.uint8) for x in (to, array)]
        convert(DTYPES[to.dtype.name], bytes_of[0], DTYPES[array.dtype.name], bytes_of[1])
        return
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(to, array.reshape(to.shape), casting="same_kind")
