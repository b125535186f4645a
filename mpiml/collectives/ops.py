"""Names of operations and dtypes, and the numbers the native kernels know them by.

A dtype is known by its NumPy name in every library; ``bfloat16`` is NumPy's where the package
ml_dtypes is installed. ``bool`` is reduced as the bytes 0 and 1 that it is in memory.
"""

import sys
from typing import Any, Final

import numpy as np

from mpiml.errors import UsageError

__all__ = ["dtype_code", "dtype_name", "native_order", "numpy_dtype", "op_code", "op_name"]

#: name of a dtype -> mpiml::Dtype
DTYPES: Final = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
    "uint16": 9,
    "uint32": 10,
    "uint64": 11,
    "complex64": 12,
    "complex128": 13,
    "bool": 8,
}
#: name of an operation -> mpiml::Op
OPS: Final = {"sum": 0, "mean": 1, "min": 2, "max": 3, "prod": 4}
FLOATS: Final = frozenset(("float16", "bfloat16", "float32", "float64"))
COMPLEX: Final = frozenset(("complex64", "complex128"))

_MPI_NAMES: Final = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}


def dtype_name(x: Any) -> str:
    """Return the NumPy name of an array's dtype: ``"float32"``, of ``torch.float32`` too.

    Local: no MPI.
    """
    dtype = x.dtype
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def native_order(x: Any) -> bool:
    """Tell whether the bytes of an array's numbers stand in this machine's order."""
    return getattr(x.dtype, "isnative", True) is not False


def dtype_code(name: str, where: str) -> int:
    """Return the kernels' number of a dtype.

    Local: no MPI.

    Parameters
    ----------
    name : str
        What `dtype_name` returns.
    where : str
        Opens the message of an error: the call, and the leaf.

    Raises
    ------
    UsageError
        No kernel reduces this dtype.
    """
    code = DTYPES.get(name)
    if code is None:
        raise UsageError(
            f"{where}: expected one of the dtypes {', '.join(DTYPES)}, got {name}. Convert the "
            f"array first, for instance x.astype('float32')."
        )
    return code


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """Return NumPy's dtype of that name.

    Local: no MPI.

    Raises
    ------
    UsageError
        It is bfloat16, and ml_dtypes is not installed.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError(
            "mpiml: NumPy has no bfloat16 of its own, and the package ml_dtypes, which brings "
            "it, is not installed. Run pip install ml_dtypes, or use float16 or float32."
        ) from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def op_name(op: Any, where: str) -> str:
    """Return the name of an operation: of a name itself, or of one of mpi4py's.

    Local: no MPI.

    Parameters
    ----------
    op : str or mpi4py.MPI.Op
        ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"prod"``, or ``MPI.SUM``, ``MPI.MIN``,
        ``MPI.MAX``, ``MPI.PROD``.
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        It is none of these.
    """
    if isinstance(op, str):
        if op in OPS:
            return op
    else:  # who has one of mpi4py's operations has loaded mpi4py
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and isinstance(op, mpi.Op):
            for name, theirs in _MPI_NAMES.items():
                if op == getattr(mpi, theirs):
                    return name
    raise UsageError(
        f"{where}: op: expected {', '.join(map(repr, OPS))} or mpi4py's MPI.SUM, MPI.MIN, "
        f"MPI.MAX, MPI.PROD, got {op!r}"
    )


def op_code(op: str, dtype: str, where: str) -> int:
    """Return the kernels' number of an operation, if it means something for this dtype.

    Local: no MPI.

    Parameters
    ----------
    op : str
        What `op_name` returns.
    dtype : str
        What `dtype_name` returns.
    where : str
        Opens the message of an error: the call, and the leaf.

    Raises
    ------
    UsageError
        Mean of whole numbers, sum of bools, order of complex numbers.
    """
    cure = ""
    if dtype == "bool" and op in ("sum", "mean"):
        cure = "Count with x.astype('int64') and 'sum', or use 'max' (any) or 'min' (all)."
    elif op == "mean" and dtype not in FLOATS and dtype not in COMPLEX:
        cure = "Take 'sum' and divide as you need it, or convert with x.astype('float64')."
    elif op in ("min", "max") and dtype in COMPLEX:
        cure = "Complex numbers have no order; reduce abs(x), or x.real and x.imag."
    if cure:
        raise UsageError(f"{where}: op {op!r} is not defined for {dtype}. {cure}")
    return OPS[op]
