"""How the careful pickler takes arrays and NumPy scalars apart; imported with the first array."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiml.arrays import (
    SCALARS,
    as_buffer,
    code_of,
    is_plain,
    order_of,
    rebuild,
    restore,
    spec_of,
    to_host,
)
from mpiml.libraries import family
from mpiml.payload_memory import INLINE, SLOT, take

__all__ = ["REDUCE", "reduce_foreign"]


def _reduce_array(sink: Any, array: "np.ndarray[Any, Any]") -> Any:
    spec = spec_of(array)
    if spec is not None:
        return rebuild, spec
    if not is_plain(array):
        return NotImplemented
    dtype = code_of(array.dtype) or array.dtype
    order = order_of(array)
    if array.nbytes < INLINE:
        data = bytearray(array.tobytes("A"))
        if order == "F":
            return rebuild, (data, dtype, array.shape, "F")
        return rebuild, (data, dtype, array.shape)
    if order:
        sink.add(as_buffer(array), id(array) in sink.owned)
    else:  # straight into memory of our own: one copy, not two
        block = memoryview(take(array.nbytes))
        np.ndarray(array.shape, array.dtype, block)[...] = array
        sink.buffers.append(block)
    return rebuild, (SLOT, dtype, array.shape, order or "C")


def _reduce_scalar(sink: Any, scalar: "np.generic") -> Any:
    return rebuild, spec_of(scalar)


def reduce_foreign(sink: Any, array: Any) -> Any:
    """Reduce an array of CuPy, PyTorch or JAX; NotImplemented for anything else."""
    kind = family(type(array))
    exported = None if kind is None else to_host(array)
    if exported is None:
        return NotImplemented
    host, more, fresh = exported
    if fresh:  # the pickler keeps it alive, so the id stays its own
        sink.owned = sink.owned | {id(host)}
    return restore, (kind, host, more)


REDUCE: dict[type, Callable[[Any, Any], Any]] = {
    np.ndarray: _reduce_array,
    **dict.fromkeys(SCALARS, _reduce_scalar),
}
