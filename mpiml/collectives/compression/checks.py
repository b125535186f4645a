"""What compression takes, and how it refuses the rest."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.ops import FLOATS, dtype_name, numpy_dtype, op_name
from mpiml.errors import UsageError

__all__ = ["check_array", "check_finite", "check_op", "check_scale", "shown", "work_dtype"]

_BLOCK: Final = 1 << 16  # elements that are looked at while they are in the cache


def shown(name: str) -> str:
    """Return how a message calls an array."""
    return name or "the array"


def work_dtype(dtype: Any) -> "np.dtype[Any]":
    """Return the dtype codecs compute in: float64 for float64, else float32."""
    known = numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    return np.dtype(np.float64 if known == np.float64 else np.float32)


def check_op(op: Any) -> str:
    """Return the name of an operation; refuse those that are no sum.

    Raises
    ------
    UsageError
        `op` is neither ``"sum"`` nor ``"mean"`` nor ``MPI.SUM``.
    """
    known = op if isinstance(op, str) else op_name(op, "compress")
    if known not in ("sum", "mean"):
        raise UsageError(
            f"op: expected 'sum' or 'mean' with compress=, got {op!r}. Reduce it without compress=."
        )
    return known


def check_array(array: NDArray[Any], name: str) -> None:
    """Refuse arrays that are not of real floating-point numbers.

    Raises
    ------
    UsageError
        Whole numbers, bools, complex numbers; the message says what to do.
    """
    dtype = dtype_name(array)
    if dtype in FLOATS:
        return
    if dtype.startswith("complex"):
        real = "float64" if dtype == "complex128" else "float32"
        cure = f"Pass its parts as floats: x.view('{real}')."
    else:
        cure = "Leave it out of the tree and reduce it without compress=, or convert it to float32."
    raise UsageError(
        f"{shown(name)}: expected one of the dtypes {', '.join(sorted(FLOATS))} with compress=, "
        f"got {dtype}. {cure}"
    )


def check_finite(array: NDArray[Any], name: str) -> None:
    """Refuse NaN and infinity, which one codec would drop and another spread.

    Parameters
    ----------
    array : ndarray of float32 or float64, C-contiguous
        What is about to be encoded.
    name : str
        How the message calls it.

    Raises
    ------
    UsageError
        Says how many there are, and where the first is.
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        # minimum and maximum hand NaN on, and need no memory
        if not (np.isfinite(block.min()) and np.isfinite(block.max())):
            break
    else:
        return
    bad = np.flatnonzero(~np.isfinite(flat))
    first = tuple(int(i) for i in np.unravel_index(bad[0], array.shape))
    what = "NaN" if np.isnan(flat[bad]).any() else "infinity"
    raise UsageError(
        f"{what} in {shown(name)}: expected finite numbers, got {bad.size} of {flat.size} that "
        f"are not, the first at {first}. Look at the loss of this step, clip the gradient or "
        "leave the step out; nothing was sent, and the residuals are those of the step before."
    )


def check_scale(value: Any, what: str) -> None:
    """Refuse a scale that left the range of floating-point numbers.

    Raises
    ------
    UsageError
        `value`, or an element of it, is infinite or NaN.
    """
    if not np.all(np.isfinite(value)):
        raise UsageError(
            f"expected elements whose {what} is a finite number. Scale the gradient down, or "
            "clip it."
        )
