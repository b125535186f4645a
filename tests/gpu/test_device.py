"""One process: kernels, memory, copies and roles in threads on a real device."""

import itertools
import threading

import ml_dtypes  # noqa: F401 - brings bfloat16
import numpy as np
import pytest

import mpiml
from mpiml._native import reduce
from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.device import kernel
from mpiml.collectives.device.cuda import cuda_device
from mpiml.collectives.device.stages import Staging, run_stages
from mpiml.collectives.ops import DTYPES, OPS, numpy_dtype

pytestmark = pytest.mark.gpu

FLOATS = ("float16", "bfloat16", "float32", "float64")
PAIRS = [
    (dtype, op)
    for dtype, op in itertools.product(DTYPES, OPS)
    if kernel.parts(dtype, op) == (dtype, 1)
    and (op != "mean" or dtype in FLOATS)
    and (dtype != "bool" or op in ("min", "max", "prod"))
]


def patterns(dtype, member, nbytes):
    """Bytes of which any pattern is a number of that dtype: denormals, infinities, NaN."""
    high = 2 if dtype == "bool" else 256
    return np.random.default_rng(member).integers(0, high, nbytes, dtype=np.uint8)


def as_bits(raw, dtype):
    """Return the bits of all that is no NaN, and where NaN are."""
    array = raw.view(numpy_dtype(dtype))
    with np.errstate(all="ignore"):
        nan = np.isnan(array) if dtype in FLOATS else np.zeros(array.shape, bool)
    return np.where(nan, 0, raw.view(f"u{array.dtype.itemsize}")), nan


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_device_and_host_give_the_same_bits(dtype, op):
    device, n, nbytes = cuda_device(0), 3, 64 * 1001
    slabs = [device.slab(nbytes, exported=False) for _ in range(n)]
    host = [patterns(dtype, member, nbytes) for member in range(n)]
    for slab, raw in zip(slabs, host, strict=True):
        device.write(slab.pointer, raw.tobytes())
    table = device.table([slab.pointer for slab in slabs])
    device.combine(table, dtype, op, (64, nbytes - 64), (0, n))
    device.finish()
    inner = [raw[64:-64] for raw in host]
    reduce(DTYPES[dtype], OPS[op], inner, inner, float(n))
    for slab, raw in zip(slabs, host, strict=True):
        got = np.frombuffer(device.read(slab.pointer, nbytes), np.uint8)
        for a, b in zip(as_bits(got, dtype), as_bits(raw, dtype), strict=True):
            assert np.array_equal(a, b)


def test_only_the_named_member_is_written():
    device = cuda_device(0)
    slabs = [device.slab(256, exported=False) for _ in range(2)]
    for slab in slabs:
        device.write(slab.pointer, np.ones(64, np.float32).tobytes())
    device.combine(device.table([s.pointer for s in slabs]), "float32", "sum", (0, 128), (1, 2))
    device.finish()
    first, second = [np.frombuffer(device.read(s.pointer, 256), "f4") for s in slabs]
    assert np.all(first == 1)
    assert np.all(second[:32] == 2)
    assert np.all(second[32:] == 1)


def test_memory_that_was_exported_serves_again_and_other_memory_is_freed(cupy):
    device = cuda_device(0)
    slab = device.slab(5 << 20, exported=True)
    pointer, size = slab.pointer, slab.nbytes
    assert size == 6 << 20
    view = slab.array(64, (3, 4), "float32")
    view[...] = 7
    del slab
    assert float(view.sum()) == 84  # the view keeps it
    other = device.slab(5 << 20, exported=True)
    assert other.pointer != pointer
    del view
    again = device.slab(4 << 20, exported=True)
    assert again.pointer == pointer
    cupy.cuda.runtime.deviceSynchronize()
    free = cupy.cuda.runtime.memGetInfo()[0]
    plain = device.slab(512 << 20, exported=False)
    assert cupy.cuda.runtime.memGetInfo()[0] < free
    del plain
    assert abs(cupy.cuda.runtime.memGetInfo()[0] - free) < 64 << 20


@pytest.mark.parametrize("nbytes", [0, 64, 1 << 20, (33 << 20) + 64])
def test_bytes_go_to_the_host_and_back(cupy, nbytes):
    device = cuda_device(0)
    slab = device.slab(nbytes, exported=False)
    array = slab.array(0, (nbytes,), "uint8")
    before = cupy.random.randint(0, 200, nbytes, dtype=cupy.uint8)
    array[...] = before
    size = 4 << 20
    slots = [np.zeros(size, np.uint8) for _ in range(3)]
    pins = [device.pin(slot) for slot in slots]

    def combine(slot, n):
        slots[slot][:n] += 1

    device.settle()
    staging = Staging(*device.lanes(), slab.pointer, nbytes, slots, size, combine)
    run_stages(staging, -(-nbytes // size))
    assert bool((array == before + 1).all())
    assert all(pin.pinned for pin in pins)


def test_zero_and_copy_and_a_second_thread(cupy):
    device = cuda_device(0)
    slab, other = (device.slab(4096, exported=False) for _ in range(2))
    device.write(slab.pointer, bytes(range(256)) * 16)
    seen = []

    def elsewhere():  # the current device belongs to the thread
        device.copy(other.pointer, slab.pointer, 4096)
        device.zero(slab.pointer + 8, 8)
        device.finish()
        seen.append(device.read(slab.pointer, 24))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(30)
    assert seen == [bytes([*range(8), *[0] * 8, *range(16, 24)])]
    assert device.read(other.pointer, 256) == bytes(range(256))


# -- roles in threads of this process ----------------------------------------------------------


def in_role(body, replicas=3):
    program = mpiml.Program("device")
    program.add_node(mpiml.PyNode(body), label="learner", replicas=replicas)
    return mpiml.launch(program)["learner"]


def normal(member, count=100_003):
    return np.random.default_rng(member).standard_normal(count).astype(np.float32)


def buckets():
    import cupy

    index = mpiml.context().index
    found = []
    for xp in (np, cupy):
        like = {"w": xp.zeros(100_003, "f4"), "h": xp.zeros((7, 3), "f2")}
        with Bucket(like=like) as bucket:
            assert type(bucket["w"]) is xp.ndarray
            assert bucket.statistics()["way"].startswith("device") is (xp is cupy)
            bucket["w"][...] = xp.asarray(normal(index))
            bucket["h"][...] = index + 1
            bucket.iallreduce("mean").wait(60)
            w, h = (bucket[key] if xp is np else bucket[key].get() for key in "wh")
            found.append((w.tobytes(), h.tobytes()))
    assert found[0] == found[1]
    return found[0]


def test_buckets_in_host_and_device_memory_give_the_same_bits():
    results = in_role(buckets)
    assert results[0] == results[1] == results[2]


def loose():
    import cupy

    index = mpiml.context().index
    x = cupy.asarray(normal(index))
    assert allreduce(x).get().tobytes() == allreduce(x.get()).tobytes()
    out = cupy.zeros_like(x)
    assert allreduce({"a": x, "b": np.ones(3)}, out={"a": out, "b": np.zeros(3)})["a"] is out
    assert out.get().tobytes() == allreduce(x.get()).tobytes()
    strided = allreduce(x[::2])
    assert strided.get().tobytes() == allreduce(x.get()[::2].copy()).tobytes()
    assert int(allreduce(cupy.array(index + 1))) == 6


def test_arrays_outside_of_a_bucket():
    in_role(loose)


def torch_tensors():
    import torch

    index = mpiml.context().index
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = torch.arange(1000, device="cuda").to(dtype) + index
        got = allreduce(x)
        assert (got.device, got.dtype) == (x.device, dtype)
        assert torch.equal(got.cpu(), allreduce(x.cpu()))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # work of another stream is waited for
        y = torch.ones(1 << 24, device="cuda")
        for _ in range(20):
            y = y * 1.0
        got = allreduce(y * (index + 1))
    assert float(got.sum()) == 6 * (1 << 24)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no device")
    in_role(torch_tensors)


def jax_arrays():
    import jax
    import jax.numpy as jnp

    index = mpiml.context().index
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
        x = (jnp.arange(300) + index).astype(dtype)
        got = allreduce(x)
        assert (got.devices(), got.dtype) == (x.devices(), x.dtype)
        host = allreduce(np.asarray(x))
        assert np.array_equal(np.asarray(got), host)
    assert bool(allreduce(jnp.array([index == 1]), "max")[0])
    assert jax.default_backend() == "gpu"


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX sees no device")
    in_role(jax_arrays)
