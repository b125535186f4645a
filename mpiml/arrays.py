"""Arrays of NumPy, CuPy, PyTorch and JAX as plain memory, and back.

With `mpiml.collectives.device.arrays` the only module that touches cupy, torch and jax. None of
them is ever imported for a value that does not come from it (see `mpiml.libraries`). This module imports NumPy, so it is itself
imported when the first array can be there.

What arrives: a NumPy array with its dtype, shape and order (C or Fortran). A CuPy array on
the current device (staged through host memory). A torch tensor that is contiguous, cut
from the autograd graph, with its `requires_grad` flag, on the CPU or the current CUDA
device. A JAX array on the default device. Sparse, quantised and meta tensors, and JAX's
random keys, travel by their own pickle.
"""

import importlib
from types import ModuleType
from typing import Any

import numpy as np

from mpiml.errors import UsageError
from mpiml.libraries import family, foreign_loaded
from mpiml.payload_memory import INLINE

__all__ = [
    "INLINE",
    "SCALARS",
    "as_buffer",
    "code_of",
    "family",
    "foreign_loaded",
    "is_plain",
    "namespace",
    "order_of",
    "rebuild",
    "restore",
    "spec_of",
    "to_host",
]

# A builtin dtype is a singleton: its id finds its character faster than any hash of it, and
# a dtype that only looks equal (other byte order, metadata) is not found.
_DTYPES = {code: np.dtype(code) for code in "?bhilqBHILQefdgFDG"}
_CODES = {id(dtype): code for code, dtype in _DTYPES.items()}
# NumPy's scalars by their type; pickle needs ten times as long for one.
SCALARS = {dtype.type: code for code, dtype in _DTYPES.items()}

_NAMESPACES = {"torch": "torch", "jax": "jax.numpy", "cupy": "cupy"}


def namespace(x: Any) -> ModuleType:
    """Return the module whose functions work on `x`: numpy, cupy, torch or jax.numpy."""
    kind = family(type(x))
    return np if kind is None else importlib.import_module(_NAMESPACES[kind])


def code_of(dtype: "np.dtype[Any]") -> str | None:
    """Return the character of a builtin dtype in native order, else None."""
    return _CODES.get(id(dtype))


def is_plain(array: "np.ndarray[Any, Any]") -> bool:
    """Tell whether the memory of `array` is its value: no objects, no strings kept elsewhere."""
    dtype = array.dtype
    return dtype.kind in "?biufcmMSUV" and not dtype.hasobject and dtype.itemsize > 0


def order_of(array: "np.ndarray[Any, Any]") -> str:
    """Return "F" if the memory is Fortran-contiguous only, "C" if C, "" if neither."""
    flags = array.flags
    return "C" if flags.c_contiguous else "F" if flags.f_contiguous else ""


def as_buffer(x: Any) -> memoryview:
    """Return the memory of `x` as one-dimensional bytes, in C order or, if it is so, in Fortran's.

    Contiguous host memory is not copied, so a change of `x` shows; anything else is.

    Parameters
    ----------
    x
        An array of any library here, of any dtype but object, any shape, order and strides;
        or any object with a contiguous buffer (bytes, bytearray, memoryview).

    Returns
    -------
    memoryview
        Format "B", length the number of bytes; read-only if `x` is.
    """
    if not isinstance(x, np.ndarray):
        if family(type(x)) is None:
            return memoryview(x).cast("B") if memoryview(x).nbytes else memoryview(b"")
        exported = to_host(x)
        if exported is None:
            raise UsageError(f"expected an array in dense memory, got {x!r}")
        x = exported[0]
    if order_of(x) != "C":
        x = x.T if order_of(x) == "F" else np.ascontiguousarray(x)
    # The detour by uint8: datetime64 and some others have no buffer of their own.
    return memoryview(x.reshape(-1).view(np.uint8)) if x.size else memoryview(b"")


def spec_of(value: Any) -> tuple[Any, ...] | None:
    """Return the arguments of `rebuild` for a scalar or a small array in C order, else None."""
    code = SCALARS.get(type(value))
    if code is not None:
        return value.tobytes(), code, None
    code = _CODES.get(id(value.dtype))
    if code is None or value.nbytes >= INLINE or not value.flags.c_contiguous:
        return None
    return bytearray(value.data), code, value.shape


def rebuild(
    buffer: Any,
    dtype: "str | np.dtype[Any]",
    shape: tuple[int, ...] | None,
    order: Any = "C",
) -> Any:
    """Wrap a received buffer as a writable array; copies only where the buffer is read-only.

    `dtype` may be the character of a builtin one. Without a shape it is a NumPy scalar.
    """
    if type(dtype) is str:
        dtype = _DTYPES[dtype]
    if shape is None:
        return np.ndarray((), dtype, buffer)[()]
    array = np.ndarray(shape, dtype, buffer, 0, None, order)
    return array if array.flags.writeable else array.copy("K")


def to_host(x: Any) -> tuple["np.ndarray[Any, Any]", tuple[Any, ...], bool] | None:
    """Bring a foreign array to host memory.

    Parameters
    ----------
    x
        An array whose class `family` knows.

    Returns
    -------
    tuple or None
        The NumPy array, what `restore` needs besides, and whether nothing else can change
        that memory. None: this one has to travel by its own pickle.
    """
    kind = family(type(x))
    if kind == "torch":
        return _torch_to_host(x)
    if kind == "cupy":
        return namespace(x).asnumpy(x, order="A"), (), True
    if not isinstance(x.dtype, np.dtype):  # a random key of JAX
        return None
    return np.asarray(x), (), True  # JAX arrays never change


def restore(kind: str, host: "np.ndarray[Any, Any]", more: tuple[Any, ...]) -> Any:
    """Make the array of a library out of what `to_host` returned."""
    module = importlib.import_module(_NAMESPACES[kind])
    if kind != "torch":
        return module.asarray(host)
    dtype, shape, device, requires_grad = more
    tensor = module.from_numpy(host).view(getattr(module, dtype)).reshape(shape)
    if device != "cpu":
        tensor = tensor.to(device)
    return tensor.requires_grad_(True) if requires_grad else tensor


def _torch_to_host(x: Any) -> tuple["np.ndarray[Any, Any]", tuple[Any, ...], bool] | None:
    torch = namespace(x)
    device = x.device.type
    if x.layout is not torch.strided or x.is_quantized or device not in ("cpu", "cuda"):
        return None
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 1:  # it is contiguous whatever its stride says, and stays as it is
        flat = flat.as_strided((1,), (1,))
    # As bytes, since NumPy has no bfloat16 and none of the 8-bit floats.
    host = flat.view(torch.uint8).cpu().numpy()
    # By name: a torch.dtype pickles, but only after a search of all modules.
    name = str(x.dtype).removeprefix("torch.")
    return host, (name, tuple(x.shape), device, x.requires_grad), device != "cpu"
