"""As much of CuPy as `mpiml.collectives.device.cuda` calls, on host memory, with its signatures.

Work on a stream is done when somebody waits for that stream. The current device must have been
set by the thread that calls, as CUDA wants it for anything but device 0.
"""

import ctypes
import threading

import numpy as np

from mpiml._native import reduce
from mpiml.collectives.ops import DTYPES, OPS

__all__ = ["make_cupy"]


def at(pointer, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


class CUDARuntimeError(RuntimeError):
    pass


class Device:
    current = threading.local()

    def __init__(self, index):
        self.id = index

    def __enter__(self):
        self.before = getattr(self.current, "id", 0)
        self.current.id = self.id
        return self

    def __exit__(self, *_):
        self.current.id = self.before


class Event:
    def __init__(self, stream):
        self.stream, self.count = stream, stream.begun

    def synchronize(self):
        self.stream.until(self.count)


STREAMS = {}


class Stream:
    current = None

    def __init__(self, null=False, non_blocking=False, ptds=False):
        self.ptr = 1000 + len(STREAMS)
        STREAMS[self.ptr] = self
        self.work, self.done, self.begun = [], 0, 0

    def begin(self, work):
        self.work.append(work)
        self.begun += 1

    def until(self, count):
        while self.done < count:
            self.work.pop(0)()
            self.done += 1

    def synchronize(self):
        self.until(self.begun)

    def record(self, event=None):
        return Event(self)

    def wait_event(self, event):
        self.begin(event.synchronize)

    def __enter__(self):
        Stream.current = self

    def __exit__(self, *_):
        Stream.current = None


class Runtime:
    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDefault = 1, 2, 4

    def __init__(self, devices, need):
        self.devices, self.need = devices, need
        self.blocks, self.freed, self.registered, self.peers = {}, [], {}, []
        self.refuse_pins = False

    def _here(self):
        assert getattr(Device.current, "id", 0) == self.need, "another device is current"

    def getDeviceProperties(self, device):
        return {"name": b"Fake", "uuid": bytes([device] * 16), "multiProcessorCount": 2}

    def deviceGetPCIBusId(self, device):
        return f"0000:0{device}:00.0"

    def malloc(self, size):
        self._here()
        block = np.full(size + 256, 0xA5, np.uint8)
        pointer = -(-block.ctypes.data // 256) * 256
        self.blocks[pointer] = block
        return pointer

    def free(self, pointer):
        self._here()
        self.freed.append(pointer)
        del self.blocks[pointer]

    def ipcGetMemHandle(self, pointer):
        assert pointer in self.blocks
        return pointer.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle):
        self._here()
        assert len(handle) == 64
        return int.from_bytes(handle, "little")

    def memcpy(self, dst, src, size, kind):
        self._here()
        ctypes.memmove(dst, src, size)

    def memcpyAsync(self, dst, src, size, kind, stream):
        self._here()
        STREAMS[stream].begin(lambda: ctypes.memmove(dst, src, size))

    def memsetAsync(self, pointer, value, size, stream):
        STREAMS[stream].begin(lambda: ctypes.memset(pointer, value, size))

    def deviceSynchronize(self):
        self._here()
        for stream in list(STREAMS.values()):
            stream.synchronize()

    def hostRegister(self, pointer, size, flags):
        if self.refuse_pins:
            raise CUDARuntimeError("cudaErrorNotSupported: operation not supported")
        assert flags == 1
        self.registered[pointer] = size

    def hostUnregister(self, pointer):
        del self.registered[pointer]

    def deviceCanAccessPeer(self, device, peer):
        return int(peer < self.devices)

    def deviceEnablePeerAccess(self, peer):
        self._here()
        if peer in self.peers:
            raise CUDARuntimeError("cudaErrorPeerAccessAlreadyEnabled: already enabled")
        self.peers.append(peer)


class UnownedMemory:
    def __init__(self, pointer, size, owner, device_id=-1):
        self.pointer, self.size, self.owner = pointer, size, owner


class MemoryPointer:
    def __init__(self, memory, offset):
        self.memory, self.offset = memory, offset


class Kernel:
    """Runs the kernel's definition; checks that the launch covers the work with right types."""

    def __init__(self, code, name):
        assert name == "mpiml_reduce"
        assert name in code
        words = code.split("\n")
        self.dtype = next(d for d in DTYPES if self._matches(code, d))
        self.op = next(o for o in OPS if self._source(self.dtype, o) == code)
        self.lines = len(words)

    def _matches(self, code, dtype):
        return any(self._source(dtype, op) == code for op in OPS)

    def _source(self, dtype, op):
        from mpiml.collectives.device.kernel import parts, source

        return source(dtype, op) if parts(dtype, op) == (dtype, 1) else None

    def __call__(self, grid, block, arguments):
        members, size, low, high, first, packs, divisor = arguments
        assert 0 < grid[0] <= 32
        assert block == (256,)
        types = [np.int32, np.int32, np.int32, np.int64, np.int64, np.float64]
        assert [type(a) for a in arguments[1:]] == types
        pointers = members.tolist()

        def work():
            every = [at(p + 16 * int(first), 16 * int(packs)) for p in pointers[: int(size)]]
            targets = every[int(low) : int(high)]
            reduce(DTYPES[self.dtype], OPS[self.op], every, targets, float(divisor))

        Stream.current.begin(work)


def make_cupy(index=0, devices=1):
    """Return a module-like object whose one device is `index` of so many."""

    class Ndarray(np.ndarray):
        def __new__(cls, shape, dtype, pointer):
            memory = pointer.memory
            raw = at(memory.pointer + pointer.offset, memory.size - pointer.offset)
            view = np.ndarray(shape, dtype, raw).view(cls)
            view.memory = memory
            return view

    class Cuda:
        pass

    class Cupy:
        __version__ = "14.0"

    null = Stream(null=True)
    Cuda.Device, Cuda.Stream = Device, Stream
    Cuda.runtime = Runtime(devices, index)
    Cuda.UnownedMemory, Cuda.MemoryPointer = UnownedMemory, MemoryPointer
    Cuda.get_current_stream = staticmethod(lambda: null)
    Cupy.cuda, Cupy.ndarray, Cupy.RawKernel = Cuda, Ndarray, Kernel
    Cupy.asarray = staticmethod(np.asarray)
    return Cupy
