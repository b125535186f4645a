"""CUDA devices by CuPy: memory, kernels, streams, and memory shared between processes.

The only module of the collectives that calls CUDA. All work is begun on streams of our own; the
callers wait for it before they tell other members, so no event crosses processes.

Memory that other processes map is taken by cudaMalloc in whole 2 MiB: an IPC handle stands for
the driver's whole block, so a part of a pool would show the pool's other arrays, at an unknown
offset. Such memory is never given back to CUDA, whose behaviour is undefined while somebody has
it mapped; it serves the next bucket. Maps stay open for the same reason.
"""

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from mpiml.collectives.device.kernel import ENTRY, PACK, parts, source
from mpiml.collectives.device.protocol import Slab
from mpiml.collectives.device.stages import Event, Lane
from mpiml.collectives.ops import numpy_dtype
from mpiml.errors import UsageError

__all__ = ["CudaDevice", "CudaSlab", "cuda_device"]

_UNIT: Final = 2 << 20  # bytes of the driver's smallest block
_THREADS: Final = 256  # of a block of the kernel
_BLOCKS: Final = 16  # for each multiprocessor: enough to keep the memory busy
_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for all devices

_lock = threading.Lock()
_devices: dict[int, "CudaDevice"] = {}


def cuda_device(index: int) -> "CudaDevice":
    """Return the device of that number, one object for the process. Local: no MPI."""
    with _lock:
        device = _devices.get(index)
        if device is None:
            device = _devices[index] = CudaDevice(index)
        return device


class CudaSlab:
    """A block of device memory.

    Parameters
    ----------
    device : CudaDevice
        Where it lies.
    pointer, nbytes : int
        Address and size.
    """

    def __init__(self, device: "CudaDevice", pointer: int, nbytes: int) -> None:
        self.device = device
        self.pointer = pointer
        self.nbytes = nbytes

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a CuPy array in this memory; it keeps the slab."""
        cupy = self.device.cupy
        kind = numpy_dtype(dtype)
        memory = cupy.cuda.UnownedMemory(self.pointer, self.nbytes, self, self.device.index)
        try:
            return cupy.ndarray(shape, kind, cupy.cuda.MemoryPointer(memory, offset))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"mpiml.collectives: CuPy {cupy.__version__} has no {dtype}: {error}. CuPy 14 "
                "has bfloat16; with an older one pass the tree to allreduce(), which needs no "
                "CuPy array of it, or use float16."
            ) from None


class CudaDevice:
    """One CUDA device.

    Local: no MPI. Any thread may call; what one begins, one waits for.

    Parameters
    ----------
    index : int
        CUDA's number of it in this process.
    """

    def __init__(self, index: int) -> None:
        self.cupy = importlib.import_module("cupy")
        self.index = index
        runtime = self.cupy.cuda.runtime
        found = runtime.getDeviceProperties(index)
        self.identity = str(runtime.deviceGetPCIBusId(index)) + bytes(found["uuid"]).hex()
        name = found["name"]
        self.title = name.decode() if isinstance(name, bytes) else str(name)
        self._blocks = _BLOCKS * int(found["multiProcessorCount"])
        with self._here():
            self._stream = self.cupy.cuda.Stream(non_blocking=True)
        self._kernels: dict[tuple[str, str], Any] = {}
        self._free: list[tuple[int, int]] = []  # (size, address) of memory once exported
        self._maps: dict[bytes, int] = {}
        self._reached: set[int] = {index}
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def _here(self) -> Iterator[Any]:
        """Make this device the thread's current one."""
        with self.cupy.cuda.Device(self.index):
            yield self.cupy.cuda.runtime

    # -- memory --------------------------------------------------------------------------------

    def slab(self, nbytes: int, exported: bool) -> CudaSlab:
        """Take memory, not zeroed. `exported`: another process will map it."""
        size = -(-max(nbytes, 1) // _UNIT) * _UNIT
        with self._busy:
            fits = [block for block in self._free if size <= block[0] <= 2 * size]
            if exported and fits:
                size, pointer = min(fits)
                self._free.remove((size, pointer))
            else:
                with self._here() as runtime:
                    pointer = runtime.malloc(size)
        slab = CudaSlab(self, pointer, size)
        back = self._keep if exported else self._release
        weakref.finalize(slab, back, size, pointer).atexit = False
        return slab

    def _keep(self, size: int, pointer: int) -> None:
        # list.append is atomic; a lock could be held by the very thread that collects garbage
        self._free.append((size, pointer))

    def _release(self, size: int, pointer: int) -> None:
        with self._here() as runtime:
            runtime.free(pointer)  # waits for what uses it

    def handle(self, slab: Slab) -> bytes:
        """Return by what another process maps the slab: 64 bytes."""
        with self._here() as runtime:
            return bytes(runtime.ipcGetMemHandle(slab.pointer))

    def map(self, handle: bytes) -> int:
        """Map another process's slab; return its address here. Stays mapped."""
        with self._busy:
            pointer = self._maps.get(handle)
            if pointer is None:
                with self._here() as runtime:
                    pointer = self._maps[handle] = int(runtime.ipcOpenMemHandle(handle))
            return pointer

    def reach(self, index: int) -> None:
        """Make another device's memory, of this process, readable here; raise if it cannot."""
        with self._busy:
            if index in self._reached:
                return
            with self._here() as runtime:
                if not runtime.deviceCanAccessPeer(self.index, index):
                    raise RuntimeError(f"device {self.index} cannot read device {index}")
                try:
                    runtime.deviceEnablePeerAccess(index)
                except runtime.CUDARuntimeError as error:
                    if "PeerAccessAlreadyEnabled" not in str(error):
                        raise
            self._reached.add(index)

    def write(self, pointer: int, data: bytes) -> None:
        """Copy a few bytes to the device, and wait."""
        host = np.frombuffer(data, np.uint8)
        with self._here() as runtime:
            runtime.memcpy(pointer, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice)

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Copy a few bytes from it."""
        host = np.empty(nbytes, np.uint8)
        with self._here() as runtime:
            runtime.memcpy(host.ctypes.data, pointer, nbytes, runtime.memcpyDeviceToHost)
        return host.tobytes()

    def zero(self, pointer: int, nbytes: int) -> None:
        """Begin to fill memory with zeros."""
        with self._here() as runtime:
            runtime.memsetAsync(pointer, 0, nbytes, self._stream.ptr)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Begin to copy memory that this device reaches."""
        if nbytes:
            with self._here() as runtime:
                kind = runtime.memcpyDefault
                runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)

    # -- reductions ----------------------------------------------------------------------------

    def table(self, pointers: Sequence[int]) -> Any:
        """Return the members' addresses as `combine` wants them."""
        with self._here():
            table = self.cupy.asarray(np.array(pointers, np.uint64))
            self.cupy.cuda.get_current_stream().synchronize()
        return table

    def combine(
        self, members: Any, dtype: str, op: str, span: tuple[int, int], to: tuple[int, int]
    ) -> None:
        """Begin to combine bytes `span` of all members' memory; write them to members `to`.

        Both ends of the span are multiples of `PACK` bytes.
        """
        known = parts(dtype, op)
        assert known is not None  # the caller has asked
        low, high = span[0] // PACK, span[1] // PACK
        if high <= low:
            return
        blocks = min(-(-(high - low) // _THREADS), self._blocks)
        size = int(members.size)
        arguments = (
            members,
            np.int32(size),
            np.int32(to[0]),
            np.int32(to[1]),
            np.int64(low),
            np.int64(high - low),
            np.float64(size),
        )
        with self._here(), self._stream:
            self._kernel(known[0], op)((blocks,), (_THREADS,), arguments)

    def divide(self, array: Any, divisor: int) -> None:
        """Begin to divide a CuPy array, in place."""
        with self._here():
            array /= divisor

    def _kernel(self, dtype: str, op: str) -> Any:
        kernel = self._kernels.get((dtype, op))
        if kernel is None:
            kernel = self.cupy.RawKernel(source(dtype, op), ENTRY)
            self._kernels[dtype, op] = kernel
        return kernel

    def settle(self) -> None:
        """Wait for all that anybody in this process has begun on the device.

        Whole device: nobody knows on which streams of which library an array was written.
        """
        with self._here() as runtime:
            runtime.deviceSynchronize()

    def mark(self) -> Event:
        """Return the point where the calling thread is: on its current streams.

        What is begun on them later is not waited for, so a backward pass goes on meanwhile.
        """
        with self._here():
            events = [self.cupy.cuda.get_current_stream().record()]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.index))
            events.append(event)
        return _CudaEvent(events, self)

    def finish(self) -> None:
        """Wait for what this class has begun."""
        with self._here():
            self._stream.synchronize()

    # -- the host ------------------------------------------------------------------------------

    def lanes(self) -> tuple[Lane, Lane]:
        """Return one lane to the host and one to the device: streams of their own."""
        return _CudaLane(self), _CudaLane(self)

    def pin(self, memory: Any) -> Any:
        """Pin a NumPy array of bytes; it is so until the object returned is gone.

        Where the system refuses, copies still work: they are slower, and do not overlap.
        """
        return _Pinned(self, memory)


class _CudaLane:
    """A stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device._here():
            self._stream = device.cupy.cuda.Stream(non_blocking=True)

    def to_host(self, target: Any, source: int) -> None:
        """Begin a copy of device memory to a NumPy array of bytes."""
        with self._device._here() as runtime:
            runtime.memcpyAsync(
                target.ctypes.data,
                source,
                target.nbytes,
                runtime.memcpyDeviceToHost,
                self._stream.ptr,
            )

    def to_device(self, target: int, source: Any) -> None:
        """Begin a copy of a NumPy array of bytes to device memory."""
        with self._device._here() as runtime:
            runtime.memcpyAsync(
                target,
                source.ctypes.data,
                source.nbytes,
                runtime.memcpyHostToDevice,
                self._stream.ptr,
            )

    def after(self, event: Event) -> None:
        """Let what is begun from now on wait for an event of any lane."""
        assert isinstance(event, _CudaEvent)
        with self._device._here():
            for one in event.events:
                self._stream.wait_event(one)

    def mark(self) -> "_CudaEvent":
        """Return the point where the lane is now."""
        with self._device._here():
            return _CudaEvent([self._stream.record()], self._device)


class _CudaEvent:
    """A point in one stream, or in several."""

    __slots__ = ("_device", "events")

    def __init__(self, events: Sequence[Any], device: CudaDevice) -> None:
        self.events = events
        self._device = device

    def wait(self) -> None:
        """Block until all that was begun before it is done."""
        with self._device._here():
            for event in self.events:
                event.synchronize()


class _Pinned:
    """Host memory that CUDA has registered."""

    def __init__(self, device: CudaDevice, memory: Any) -> None:
        address = memory.ctypes.data
        runtime = device.cupy.cuda.runtime
        try:
            with device._here():
                runtime.hostRegister(address, memory.nbytes, _PORTABLE)
        except runtime.CUDARuntimeError:
            self.pinned = False
            return
        self.pinned = True
        # keeps the memory until it is unregistered
        weakref.finalize(self, _unpin, runtime, address, memory).atexit = False


def _unpin(runtime: Any, address: int, memory: Any) -> None:
    runtime.hostUnregister(address)
