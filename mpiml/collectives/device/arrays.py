"""Arrays on devices, of CuPy, torch and JAX, as addresses; and results as such arrays.

No library is imported here for an array that is not its own. CuPy does the work on the device
for all three; torch's and JAX's memory is used where it lies. JAX hands its arrays over by
DLPack.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from mpiml.collectives.device.cuda import cuda_device
from mpiml.collectives.device.protocol import Device
from mpiml.collectives.ops import dtype_name
from mpiml.errors import UsageError
from mpiml.libraries import family

__all__ = ["Lent", "device_of", "lend", "on_device", "target"]


class Lent(NamedTuple):
    """Contiguous device memory of an array.

    Attributes
    ----------
    pointer, nbytes
        Where it is. The address means nothing where there are no bytes.
    keep
        What holds the memory.
    made
        What it becomes when it has been written: an array of the library.
    """

    pointer: int
    nbytes: int
    keep: Any
    made: Callable[[], Any]


class _Library(Protocol):
    """What is done for an array of one library."""

    def here(self, x: Any) -> bool:
        """Tell whether it lies on a CUDA device."""

    def index(self, x: Any) -> int:
        """Return CUDA's number of the device."""

    def lend(self, x: Any) -> Lent:
        """Return its memory, or a contiguous copy's, to be read."""

    def empty(self, x: Any) -> Lent:
        """Return memory for a new array like it."""

    def target(self, x: Any, where: str) -> Lent:
        """Return its own memory, to be written."""


class _Cupy:
    def here(self, x: Any) -> bool:
        return True

    def index(self, x: Any) -> int:
        return int(x.device.id)

    def lend(self, x: Any) -> Lent:
        with x.device:
            flat = _cupy().ascontiguousarray(x)
        return self._lent(flat)

    def empty(self, x: Any) -> Lent:
        with x.device:
            return self._lent(_cupy().empty(x.shape, x.dtype))

    def target(self, x: Any, where: str) -> Lent:
        if not x.flags.c_contiguous:
            raise _not_contiguous(where)
        return self._lent(x)

    def _lent(self, x: Any) -> Lent:
        return Lent(int(x.data.ptr), int(x.nbytes), x, lambda: x)


class _Torch:
    def here(self, x: Any) -> bool:
        return bool(x.device.type == "cuda")

    def index(self, x: Any) -> int:
        return int(x.device.index)

    def lend(self, x: Any) -> Lent:
        return self._lent(x.detach().resolve_conj().resolve_neg().contiguous())

    def empty(self, x: Any) -> Lent:
        torch = importlib.import_module("torch")
        return self._lent(torch.empty(x.shape, dtype=x.dtype, device=x.device))

    def target(self, x: Any, where: str) -> Lent:
        if not x.is_contiguous() or x.is_conj() or x.is_neg():
            raise _not_contiguous(where)
        return self._lent(x)

    def _lent(self, x: Any) -> Lent:
        return Lent(int(x.data_ptr()), x.numel() * x.element_size(), x, lambda: x)


class _Jax:
    def here(self, x: Any) -> bool:
        devices = getattr(x, "devices", None)  # a value under trace has none
        return devices is not None and any(d.platform in ("gpu", "cuda") for d in devices())

    def index(self, x: Any) -> int:
        devices = x.devices()
        if len(devices) != 1:
            raise UsageError(
                f"mpiml.collectives: expected a JAX array on one device, got one on "
                f"{len(devices)}. Reduce its shards: [s.data for s in x.addressable_shards]."
            )
        (device,) = devices
        number = device.local_hardware_id
        return int(device.id if number is None else number)

    def lend(self, x: Any) -> Lent:
        x.block_until_ready()  # not all of its work need have been begun
        lent = _Cupy().lend(_cupy().from_dlpack(self._plain(x)))
        return lent._replace(keep=(x, lent.keep))

    def empty(self, x: Any) -> Lent:
        plain = {"bfloat16": "uint16", "bool": "uint8"}.get(dtype_name(x), dtype_name(x))
        with _cupy().cuda.Device(self.index(x)):
            memory = _cupy().empty(x.shape, plain)

        def made() -> Any:
            jax = importlib.import_module("jax")
            array = jax.dlpack.from_dlpack(memory)
            if dtype_name(x) == "bool":
                return array.astype(bool)
            if dtype_name(x) == "bfloat16":
                return jax.lax.bitcast_convert_type(array, jax.numpy.bfloat16)
            return array

        return _Cupy()._lent(memory)._replace(made=made)

    def target(self, x: Any, where: str) -> Lent:
        raise UsageError(
            f"{where}: out: JAX arrays cannot be written. Leave out= away: the result is new."
        )

    def _plain(self, x: Any) -> Any:
        """Return the array, or its bits, in a dtype that every DLPack knows."""
        jax = importlib.import_module("jax")
        if dtype_name(x) == "bool":
            return x.astype("uint8").block_until_ready()
        if dtype_name(x) == "bfloat16":
            bits = jax.lax.bitcast_convert_type(x, jax.numpy.uint16)
            return bits.block_until_ready()
        return x


_LIBRARIES: dict[str, _Library] = {"cupy": _Cupy(), "torch": _Torch(), "jax": _Jax()}


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise UsageError(
            f"mpiml.collectives: arrays on a CUDA device need CuPy, which cannot be loaded: "
            f"{error}. Run pip install cupy-cuda12x (or 13x, as nvidia-smi shows the driver's "
            "CUDA), or bring the arrays to host memory."
        ) from None


def _not_contiguous(where: str) -> UsageError:
    return UsageError(
        f"{where}: out: expected arrays that are contiguous in C order, got one that is not. "
        "Leave out= away, or pass a contiguous array."
    )


def on_device(x: Any) -> bool:
    """Tell whether an array lies on a CUDA device. Local: no MPI, imports nothing."""
    kind = family(type(x))
    return kind is not None and _LIBRARIES[kind].here(x)


def device_of(leaves: Sequence[Any], paths: Sequence[str], where: str) -> Device:
    """Return the device of all these arrays.

    Local: no MPI.

    Raises
    ------
    UsageError
        They lie on several; or CuPy is not there.
    """
    found: dict[int, str] = {}
    for leaf, path in zip(leaves, paths, strict=True):
        found.setdefault(_library(leaf).index(leaf), path)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise UsageError(
            f"{where}: expected arrays on one device, got {first or 'one'} on device {one} and "
            f"{second or 'one'} on device {other}. Move them to one, or make one call for each."
        )
    (index,) = found
    _cupy()
    return cuda_device(index)


def lend(x: Any) -> Lent:
    """Return the memory of an array, to be read when its device has settled. Local: no MPI."""
    return _library(x).lend(x)


def target(x: Any, out: Any, where: str) -> Lent:
    """Return memory for the result of an operation on `x`: of `out`, or of a new array.

    Local: no MPI.

    Raises
    ------
    UsageError
        `out` cannot be written, or is another kind of array than `x`.
    """
    if out is None:
        return _library(x).empty(x)
    if (
        family(type(out)) != family(type(x))
        or tuple(out.shape) != tuple(x.shape)
        or dtype_name(out) != dtype_name(x)
        or not on_device(out)
        or _library(out).index(out) != _library(x).index(x)
    ):
        raise UsageError(
            f"{where}: out: expected an array like x, {tuple(x.shape)} {dtype_name(x)} on the "
            f"same device, got {tuple(out.shape)} {dtype_name(out)}. Leave out= away to have one "
            "made."
        )
    return _library(out).target(out, where)


def _library(x: Any) -> _Library:
    kind = family(type(x))
    assert kind is not None  # `on_device` has said so
    return _LIBRARIES[kind]
