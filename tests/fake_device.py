"""A device made of host memory: pointers are addresses, lanes run when they must or may.

Memory lies in files of /dev/shm, so that another process can map it by the handle, as CUDA's
IPC does. A lane does nothing until somebody waits, or until `nudge` says so: whoever reads
a buffer without having waited reads the old one, as on a real device.
"""

import ctypes
import mmap
import os
import secrets
import threading

import numpy as np

from mpiml._native import reduce
from mpiml.collectives.device.arrays import Lent
from mpiml.collectives.device.kernel import PACK, parts
from mpiml.collectives.ops import DTYPES, OPS, numpy_dtype

__all__ = ["FakeArray", "FakeDevice", "FakeLane", "FakeLibrary", "install", "memory_at"]


def memory_at(pointer, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


class FakeEvent:
    def __init__(self, lane, count):
        self.lane = lane
        self.count = count

    def wait(self):
        while self.lane.done < self.count:
            self.lane.step()


class FakeLane:
    """Work in order; `nudge` (a function) decides, before each call, how much gets done."""

    def __init__(self, nudge=None):
        self.work = []
        self.done = 0
        self.begun = 0
        self.nudge = nudge or (lambda: None)

    def _begin(self, work):
        self.work.append(work)
        self.begun += 1
        self.nudge()

    def step(self):
        work = self.work.pop(0)
        work()
        self.done += 1

    def to_host(self, target, source):
        assert target.dtype == np.uint8
        self._begin(lambda: target.__setitem__(slice(None), memory_at(source, len(target))))

    def to_device(self, target, source):
        assert source.dtype == np.uint8
        self._begin(lambda: memory_at(target, len(source)).__setitem__(slice(None), source))

    def after(self, event):
        self._begin(event.wait)

    def mark(self):
        return FakeEvent(self, self.begun)


class FakeArray(np.ndarray):
    """An array that claims to lie on device `index`."""

    index = 0

    def get(self, out=None):
        if out is None:
            return np.array(self)
        out[...] = self
        return out

    def set(self, host):
        self[...] = host


class FakeSlab:
    def __init__(self, nbytes):
        self.nbytes = -(-nbytes // 4096) * 4096 or 4096
        self.path = f"/dev/shm/fake-device-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, self.nbytes)
        self.memory = mmap.mmap(fd, self.nbytes)
        os.close(fd)
        self.pointer = np.frombuffer(self.memory, np.uint8).ctypes.data
        memory_at(self.pointer, self.nbytes)[:] = 0xA5  # nobody may rely on zeros

    def __del__(self):
        os.unlink(self.path)

    def array(self, offset, shape, dtype):
        view = np.ndarray(shape, numpy_dtype(dtype), self.memory, offset).view(FakeArray)
        view.keep = self
        return view


class FakeDevice:
    """Does at once what a device does later; `fails` names methods that shall raise."""

    def __init__(self, index=0, fails=()):
        self.index = index
        self.identity = f"fake {index}"
        self.title = f"a fake device {index}"
        self.fails = set(fails)
        self.calls = []
        self.maps = {}
        self.pinned = []
        self.lock = threading.Lock()

    def _called(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise OSError(f"no {name} today")

    def slab(self, nbytes, exported):
        self._called("slab")
        return FakeSlab(nbytes)

    def handle(self, slab):
        self._called("handle")
        return slab.path.encode()

    def map(self, handle):
        self._called("map")
        with self.lock:
            if handle not in self.maps:
                fd = os.open(handle.decode(), os.O_RDWR)
                self.maps[handle] = mmap.mmap(fd, os.fstat(fd).st_size)
                os.close(fd)
            return np.frombuffer(self.maps[handle], np.uint8).ctypes.data

    def reach(self, index):
        self._called("reach")

    def write(self, pointer, data):
        self._called("write")
        memory_at(pointer, len(data))[:] = np.frombuffer(data, np.uint8)

    def read(self, pointer, nbytes):
        self._called("read")
        return memory_at(pointer, nbytes).tobytes()

    def zero(self, pointer, nbytes):
        memory_at(pointer, nbytes)[:] = 0

    def copy(self, target, source, nbytes):
        self._called("copy")
        memory_at(target, nbytes)[:] = memory_at(source, nbytes)

    def divide(self, array, divisor):
        array /= divisor

    def table(self, pointers):
        return tuple(pointers)

    def combine(self, members, dtype, op, span, to):
        self._called("combine")
        assert span[0] % PACK == span[1] % PACK == 0
        kind, _ = parts(dtype, op)
        low, nbytes = span[0], span[1] - span[0]
        if nbytes:
            every = [memory_at(at + low, nbytes) for at in members]
            targets = every[to[0] : to[1]]
            reduce(DTYPES[kind], OPS[op], every, targets, float(len(members)))

    def settle(self):
        self._called("settle")

    def mark(self):
        self._called("mark")
        return FakeMark(self)

    def finish(self):
        self._called("finish")

    def lanes(self):
        self._called("lanes")
        return FakeLane(), FakeLane()

    def pin(self, memory):
        self.pinned.append(memory.nbytes)
        return memory


class FakeMark:
    def __init__(self, device):
        self.device = device

    def wait(self):
        self.device._called("marked")


class FakeLibrary:
    """What `mpiml.collectives.device.arrays` knows of a library, for `FakeArray`."""

    def here(self, x):
        return True

    def index(self, x):
        return x.index

    def lend(self, x):
        return self._lent(np.ascontiguousarray(x).view(FakeArray))

    def empty(self, x):
        return self._lent(np.empty(x.shape, x.dtype).view(FakeArray))

    def target(self, x, where):
        return self._lent(x)

    def _lent(self, x):
        return Lent(x.ctypes.data, x.nbytes, x, lambda: x)


def install(monkeypatch):
    """Let mpiml take every `FakeArray` for one of a library with devices."""
    import mpiml.collectives.device.arrays as arrays

    devices = {}
    known = arrays.family
    monkeypatch.setattr(
        arrays, "family", lambda cls: "fake" if cls is FakeArray else known(cls)
    )
    monkeypatch.setitem(arrays._LIBRARIES, "fake", FakeLibrary())
    monkeypatch.setattr(arrays, "_cupy", lambda: np)
    monkeypatch.setattr(
        arrays, "cuda_device", lambda index: devices.setdefault(index, FakeDevice(index))
    )
    return devices
