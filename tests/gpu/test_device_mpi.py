"""Ranks that share a device: memory mapped between processes, staging, MPI's own."""

import ml_dtypes  # noqa: F401 - brings bfloat16
import numpy as np
import pytest

from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.device.channel import open_device
from mpiml.collectives.device.cuda import cuda_device
from mpiml.collectives.device.direct import agree_direct, ask_library
from mpiml.collectives.labels import Label
from mpiml.collectives.regions import Leaf, Regions

pytestmark = [pytest.mark.gpu, pytest.mark.mpi(min_size=2)]

LEAVES = [
    Leaf("['a']", (513, 1025), "float32"),
    Leaf("['b']", (77,), "float16"),
    Leaf("['c']", (3_000_000,), "float32"),
    Leaf("['d']", (5,), "complex64"),
]


@pytest.fixture
def comm(cupy):
    from mpi4py import MPI

    count = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(MPI.COMM_WORLD.rank % count).use()
    yield MPI.COMM_WORLD
    cupy.cuda.Device(0).use()


def value(leaf, member):
    rng = np.random.default_rng([member, *leaf.shape])
    return (10 * rng.standard_normal(leaf.shape)).astype(leaf.dtype_name)


def host_sums(comm, op):
    """Return what a bucket in host memory makes of the same numbers."""
    with Bucket(comm, [np.zeros(x.shape, x.dtype_name) for x in LEAVES]) as bucket:
        for view, leaf in zip(bucket.tree, LEAVES, strict=True):
            view[...] = value(leaf, comm.rank)
        bucket.allreduce(op)
        return [np.array(view) for view in bucket.tree]


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_both_ways_give_the_bits_of_host_memory(comm, cupy, way, op):
    from mpiml.collectives.members import team_of

    expected = host_sums(comm, op)
    regions, label = Regions(LEAVES), Label("Bucket.allreduce", op)
    device = cuda_device(cupy.cuda.Device().id)
    memory, channel = open_device(
        team_of(comm, "test"), regions, device, True, Label("Bucket"), (way,)
    )
    # with several devices that cannot read each other there is the other way only
    assert channel.way.startswith(way) or cupy.cuda.runtime.getDeviceCount() > 1, channel.way
    views = memory.views(regions)
    for _ in range(3):
        for view, leaf in zip(views, LEAVES, strict=True):
            view[...] = cupy.asarray(value(leaf, comm.rank))
        channel.allreduce(op, label)
        for view, sums in zip(views, expected, strict=True):
            assert view.get().tobytes() == sums.tobytes()
    root = comm.size - 1
    for view, leaf in zip(views, LEAVES, strict=True):
        view[...] = cupy.asarray(value(leaf, comm.rank))
    channel.broadcast(root, Label("Bucket.broadcast"))
    for view, leaf in zip(views, LEAVES, strict=True):
        assert view.get().tobytes() == value(leaf, root).tobytes()
    for view, leaf in zip(views, LEAVES, strict=True):
        view[...] = cupy.asarray(value(leaf, comm.rank))
    channel.reduce_scatter(op, Label("Bucket.reduce_scatter", op))
    channel.allgather(Label("Bucket.allgather"))
    for view, sums in zip(views, expected, strict=True):
        assert view.get().tobytes() == sums.tobytes()
    channel.close()


def test_a_bucket_of_cupy_arrays(comm, cupy):
    with Bucket(comm, {"w": cupy.zeros((100, 100), "f4"), "n": cupy.zeros((), "i8")}) as bucket:
        assert isinstance(bucket["w"], cupy.ndarray)
        assert float(abs(bucket["w"]).sum()) == 0
        for step in range(20):
            bucket["w"][...] = comm.rank + step
            bucket["n"][...] = 1
            bucket.iallreduce("sum").wait(60) if step % 2 else bucket.allreduce("sum")
            total = comm.size * step + comm.size * (comm.size - 1) // 2
            assert bool((bucket["w"] == total).all())
            assert int(bucket["n"]) == comm.size
        kept = bucket["w"]
    assert bool((kept == total).all())


def test_many_buckets_take_the_same_memory(comm, cupy):
    def once():
        with Bucket(comm, cupy.zeros(8 << 20, "f4")) as bucket:
            bucket.tree[...] = 1
            bucket.allreduce()
            assert bool((bucket.tree == comm.size).all())

    once()
    comm.Barrier()
    free = cupy.cuda.runtime.memGetInfo()[0]
    comm.Barrier()
    for _ in range(10):
        once()
    cupy.get_default_memory_pool().free_all_blocks()
    comm.Barrier()
    assert free - cupy.cuda.runtime.memGetInfo()[0] < (128 << 20) * comm.size


def test_long_arrays_go_in_pieces(comm, cupy, monkeypatch):
    monkeypatch.setattr("mpiml.collectives.device.channel.PIECE", 3 << 20)
    x = cupy.arange(2_000_000, dtype="f4") + comm.rank
    got = allreduce([x, x[:5]], comm=comm)
    host = allreduce([x.get(), x.get()[:5]], comm=comm)
    assert [g.get().tobytes() for g in got] == [h.tobytes() for h in host]


def test_tensors_of_torch(comm):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no device")
    x = torch.arange(100_000, device=f"cuda:{comm.rank % torch.cuda.device_count()}")
    x = (x + comm.rank).to(torch.bfloat16)
    assert torch.equal(allreduce(x, comm=comm).cpu(), allreduce(x.cpu(), comm=comm))


def test_gradients_of_torch_are_reduced_while_backward_runs(comm):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no device")
    device = f"cuda:{comm.rank % torch.cuda.device_count()}"
    gradients(comm, torch, device)


def gradients(comm, torch, device):
    def net():
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]
        return torch.nn.Sequential(*layers).to(device)

    from mpiml.torch import GradientSync

    torch.manual_seed(comm.rank)  # the members begin with member 0's parameters
    model, plain = net(), net()
    GradientSync(model, comm, bucket_bytes=1 << 19, first_bucket_bytes=1 << 18)
    plain.load_state_dict(model.state_dict())
    for step in range(3):
        x = torch.full((32, 256), comm.rank + step + 1.0, device=device)
        for each in (plain, model):
            each.zero_grad()
            each(x).square().mean().backward()
        for param, mine in zip(model.parameters(), plain.parameters(), strict=True):
            every = comm.allgather(mine.grad.cpu())
            mean = sum(every[1:], start=every[0]) / comm.size
            assert torch.allclose(param.grad.cpu(), mean, rtol=1e-4, atol=1e-6)


def test_an_operation_begun_waits_for_the_streams_of_its_thread(comm, cupy):
    with Bucket(comm, cupy.zeros(1 << 22, "f4")) as bucket:
        busy = cupy.ones((2048, 2048), "f4")
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(20):
                busy = busy @ busy * 0  # the stream has something to do
            bucket.tree[...] = busy.sum() + 1 + comm.rank
            request = bucket.iallreduce()
        request.wait(60)
        assert bool((bucket.tree == comm.size * (comm.size + 1) // 2).all())


def test_what_mpi_says_is_what_all_ranks_do(comm):
    from mpiml.collectives.members import team_of

    found = agree_direct(team_of(comm, "test"), Label("test"))
    assert len(set(comm.allgather(tuple(found)))) == 1
    if not ask_library().allowed:
        assert not found.allowed
