"""The one module that calls CUDA, on a CuPy made of host memory with CuPy's signatures."""

import gc
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mpiml.collectives.device import cuda
from mpiml.collectives.device.stages import Staging, run_stages
from tests.fake_cupy import make_cupy


@pytest.fixture(params=[0, 1])
def cupy(request, monkeypatch):
    made = make_cupy(request.param, devices=2)
    monkeypatch.setitem(sys.modules, "cupy", made)
    made.index = request.param
    return made


@pytest.fixture
def device(cupy):
    return cuda.CudaDevice(cupy.index)


def test_a_device_is_one_object_for_the_process(cupy, monkeypatch):
    monkeypatch.setattr(cuda, "_devices", {})
    assert cuda.cuda_device(cupy.index) is cuda.cuda_device(cupy.index)
    assert cuda.cuda_device(cupy.index).title == "Fake"


def test_memory_comes_in_whole_blocks_and_goes_back(cupy, device):
    runtime = cupy.cuda.runtime
    slab = device.slab(3 << 20, exported=False)
    assert slab.nbytes == 4 << 20
    pointer = slab.pointer
    view = slab.array(128, (2, 3), "float32")
    del slab
    gc.collect()
    assert runtime.freed == []  # the view keeps it
    view[...] = 1
    del view
    gc.collect()
    assert runtime.freed == [pointer]
    assert device.slab(0, exported=False).nbytes == 2 << 20


def test_memory_that_others_may_have_mapped_is_never_freed(cupy, device):
    first = device.slab(6 << 20, exported=True)
    assert len(device.handle(first)) == 64
    pointer = first.pointer
    del first
    gc.collect()
    small = device.slab(1 << 20, exported=True)  # would waste more than half of it
    assert small.pointer != pointer
    plain = device.slab(6 << 20, exported=False)
    assert plain.pointer != pointer
    again = device.slab(3 << 20, exported=True)
    assert (again.pointer, again.nbytes) == (pointer, 6 << 20)
    assert cupy.cuda.runtime.freed == []


def test_a_handle_is_opened_once(cupy, device, monkeypatch):
    slab = device.slab(64, exported=True)
    handle = device.handle(slab)
    assert device.map(handle) == slab.pointer
    monkeypatch.setattr(cupy.cuda.runtime, "ipcOpenMemHandle", None)
    assert device.map(handle) == slab.pointer


def test_devices_of_one_process_reach_each_other_where_they_can(cupy, device):
    other = 1 - cupy.index
    device.reach(cupy.index)
    assert cupy.cuda.runtime.peers == []
    device.reach(other)
    device.reach(other)
    assert cupy.cuda.runtime.peers == [other]
    device._reached.clear()  # another library has done it before
    device.reach(other)
    with pytest.raises(RuntimeError, match="cannot read device 7"):
        device.reach(7)


def test_copies_happen_when_waited_for(device):
    a, b = device.slab(4096, exported=False), device.slab(4096, exported=False)
    device.write(a.pointer, bytes(range(100)))
    device.write(b.pointer, bytes(100))
    device.copy(b.pointer, a.pointer, 100)
    device.copy(b.pointer, a.pointer, 0)
    device.zero(a.pointer, 50)
    assert device.read(b.pointer, 100) == bytes(100)  # begun only
    device.finish()
    assert device.read(b.pointer, 100) == bytes(range(100))
    assert device.read(a.pointer, 60) == bytes(50) + bytes(range(50, 60))


def test_a_mark_waits_for_what_came_before_on_the_current_streams(cupy, device, monkeypatch):
    waited = []

    class Event:
        def record(self, stream):
            waited.append(("recorded on", stream))

        def synchronize(self):
            waited.append("torch")

    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: True, Event=Event, current_stream=lambda index: index
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    stream = cupy.cuda.get_current_stream()
    stream.begin(lambda: waited.append("before"))
    mark = device.mark()
    stream.begin(lambda: waited.append("after"))
    mark.wait()
    assert waited == [("recorded on", cupy.index), "before", "torch"]
    stream.synchronize()


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_span_is_combined_for_the_named_members(device, dtype):
    slabs = [device.slab(1024, exported=False) for _ in range(3)]
    views = [slab.array(0, (64,), dtype) for slab in slabs]
    for number, view in enumerate(views):
        view[...] = number + 1
    itemsize = views[0].dtype.itemsize
    table = device.table([slab.pointer for slab in slabs])
    device.combine(table, dtype, "mean", (16 * itemsize, 48 * itemsize), (1, 3))
    device.combine(table, dtype, "mean", (64, 64), (0, 3))  # nothing
    device.settle()
    assert np.all(views[0] == 1)
    for number in (1, 2):
        assert np.all(views[number][16:48] == 2)
        assert np.all(views[number][:16] == number + 1)
        assert np.all(views[number][48:] == number + 1)


@pytest.mark.parametrize("refused", [False, True])
def test_a_span_goes_through_pinned_memory(cupy, device, refused):
    runtime = cupy.cuda.runtime
    runtime.refuse_pins = refused
    nbytes, size = 10 * 4096 + 64, 4096
    slab = device.slab(nbytes, exported=False)
    array = slab.array(0, (nbytes,), "uint8")
    array[...] = np.arange(nbytes) % 251
    slots = [np.zeros(size, np.uint8) for _ in range(3)]
    pins = [device.pin(slot) for slot in slots]
    assert [pin.pinned for pin in pins] == [not refused] * 3
    assert len(runtime.registered) == (0 if refused else 3)

    def combine(slot, n):
        slots[slot][:n] += 1

    staging = Staging(*device.lanes(), slab.pointer, nbytes, slots, size, combine)
    run_stages(staging, 11)
    assert np.array_equal(array, np.arange(nbytes) % 251 + 1)
    del pins
    gc.collect()
    assert runtime.registered == {}


def test_another_thread_need_not_have_chosen_the_device(cupy, device):
    slab = device.slab(64, exported=False)
    failures = []

    def elsewhere():
        try:
            device.write(slab.pointer, b"here")
            device.settle()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert not failures
    assert device.read(slab.pointer, 4) == b"here"
