"""Members with arrays on devices: every way, every operation, on a device made of host memory."""

import threading

import ml_dtypes  # noqa: F401 - brings bfloat16
import numpy as np
import pytest

from mpiml.collectives.device import group
from mpiml.collectives.device.channel import DeviceMemory, open_device, reduce_arrays
from mpiml.collectives.device.direct import Direct
from mpiml.collectives.device.group import DeviceGroup, Span
from mpiml.collectives.labels import Label
from mpiml.collectives.ops import numpy_dtype
from mpiml.collectives.regions import Leaf, Regions
from mpiml.collectives.room import Room
from mpiml.collectives.team import Team
from mpiml.errors import MpimlError, UsageError
from tests.fake_device import FakeArray, FakeDevice, install

LABEL = Label("Bucket")
LEAVES = [
    Leaf("['a']", (5, 3), "float32"),
    Leaf("['b']", (1001,), "bfloat16"),
    Leaf("['c']", (), "int32"),
    Leaf("['d']", (7,), "complex64"),
    Leaf("['e']", (300_000,), "float32"),
]


def in_threads(n, body):
    """Run ``body(team)`` on n threads, the members of one process; return what each returns."""
    room = Room(n)
    names = [f"member {i}" for i in range(n)]
    results, errors = [None] * n, []

    def run(i):
        try:
            results[i] = body(Team(i, [0] * n, [0] * n, None, room, names, spin_us=0))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def on_ranks(body):
    """Run ``body(team)`` with the ranks of COMM_WORLD as members."""
    from mpi4py import MPI

    from mpiml.collectives.members import team_of

    return body(team_of(MPI.COMM_WORLD, "test"))


def play(mode, body, n=3):
    return in_threads(n, body) if mode == "threads" else [on_ranks(body)]


both = pytest.mark.parametrize(
    "mode", ["threads", pytest.param("mpi", marks=pytest.mark.mpi(min_size=2))]
)
ways = pytest.mark.parametrize("way", ["device", "host"])


def value(leaf, member):
    rng = np.random.default_rng([member, len(leaf.path), *leaf.shape])
    if leaf.dtype_name == "complex64":
        drawn = rng.normal(size=leaf.shape) + 1j * rng.normal(size=leaf.shape)
    else:
        drawn = 100 * rng.normal(size=leaf.shape)
    return np.asarray(drawn).astype(numpy_dtype(leaf.dtype_name))


def expected(leaf, n, op="sum"):
    """Return the result by definition: members in order, 16-bit floats in float32."""
    narrow = leaf.dtype_name == "bfloat16"
    wide = np.float32 if narrow else numpy_dtype(leaf.dtype_name)
    total = value(leaf, 0).astype(wide)
    for member in range(1, n):
        total = total + value(leaf, member).astype(wide)
    if op == "mean":
        total = total / np.float32(n)
    return total.astype(numpy_dtype(leaf.dtype_name))


def fill(views, team):
    for view, leaf in zip(views, LEAVES, strict=True):
        view[...] = value(leaf, team.index)


def check(views, n, op="sum"):
    for view, leaf in zip(views, LEAVES, strict=True):
        assert np.asarray(view).tobytes() == expected(leaf, n, op).tobytes(), leaf.path


@both
@ways
def test_sums_have_the_bits_of_the_definition(mode, way):
    def body(team):
        regions = Regions(LEAVES)
        device = FakeDevice()
        memory, channel = open_device(team, regions, device, True, LABEL, (way,))
        views = memory.views(regions)
        assert all(not view.any() for view in views)
        assert channel.way.startswith(way)
        label = Label("Bucket.allreduce", "sum")
        for _ in range(3):  # again, in memory that has been used
            fill(views, team)
            channel.allreduce("sum", label)
            check(views, team.size)
        assert ("combine" in device.calls) is (way == "device")
        channel.close()
        assert views[0].any()  # the memory stays

    play(mode, body)


@both
@ways
def test_scatter_and_gather_and_broadcast(mode, way):
    def body(team):
        regions = Regions(LEAVES)
        memory, channel = open_device(team, regions, FakeDevice(), True, LABEL, (way,))
        views = memory.views(regions)
        fill(views, team)
        channel.reduce_scatter("sum", Label("Bucket.reduce_scatter", "sum"))
        channel.allgather(Label("Bucket.allgather"))
        check(views, team.size)
        fill(views, team)
        root = team.size - 1
        channel.broadcast(root, Label("Bucket.broadcast", more=f"root={root}"))
        for view, leaf in zip(views, LEAVES, strict=True):
            assert np.array_equal(view, value(leaf, root))
        channel.close()

    play(mode, body)


@both
@ways
@pytest.mark.parametrize("op", ["mean", "min", "max", "prod"])
def test_operations(mode, way, op):
    def body(team):
        group = DeviceGroup(team, FakeDevice(), 1 << 20, LABEL, ways=(way,))
        view = group.slab.array(0, (4096,), "float32")
        every = [np.random.default_rng(m).normal(size=4096).astype("f4") for m in range(5)]
        view[:] = every[team.index]
        group.reduce([Span("float32", 0, 4096)], op, Label("x", op))
        function = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(op, np.add)
        total = every[0]
        for member in range(1, team.size):
            total = function(total, every[member])
        if op == "mean":
            total = total / np.float32(team.size)
        assert np.array_equal(view, total)
        group.close()

    play(mode, body)


def test_products_of_complex_numbers_go_through_host_memory():
    def body(team):
        group = DeviceGroup(team, FakeDevice(), 1 << 12, LABEL)
        assert group.way("complex64", "sum") == "device"
        view = group.slab.array(0, (64,), "complex64")
        view[:] = 1 + 2j
        group.reduce([Span("complex64", 0, 64)], "prod", Label("x", "prod"))
        assert np.all(view == (1 + 2j) ** 2)
        group.close()

    in_threads(2, body)


@both
@pytest.mark.parametrize("broken", ["handle", "map", "read", "write", "reach"])
def test_a_map_that_fails_on_one_member_is_given_up_by_all(mode, broken):
    def body(team):
        fails = [broken] if team.index == 1 else []
        group = DeviceGroup(team, FakeDevice(fails=fails), 1 << 12, LABEL)
        used = {"handle": mode == "mpi", "map": mode == "mpi", "reach": True}
        if used.get(broken, True):
            assert group.way("float32", "sum") == "host"
            assert f"no {broken} today" in group.why
        view = group.slab.array(0, (16,), "float32")
        view[:] = 1 + team.index
        group.reduce([Span("float32", 0, 16)], "sum", Label("x", "sum"))
        assert np.all(view == team.size * (team.size + 1) / 2)
        group.close()

    play(mode, body)


@both
@pytest.mark.parametrize("broken", ["combine", "settle", "finish", "copy"])
def test_a_device_that_fails_on_one_member_is_an_error_on_all(mode, broken):
    def body(team):
        device = FakeDevice()
        group = DeviceGroup(team, device, 1 << 12, LABEL)
        device.fails |= {broken} if team.index == 1 else set()
        spans = [Span("float32", 0, 64)]
        label = Label("x", "sum")
        with pytest.raises(MpimlError, match=f"no {broken} today"):
            group.reduce(spans, "sum", label) if broken != "copy" else group.broadcast(
                spans, 0, label
            )
        device.fails.clear()
        view = group.slab.array(0, (64,), "float32")
        view[:] = 1
        group.reduce(spans, "sum", Label("y", "sum"))  # they are still in step
        assert np.all(view == team.size)
        group.close()

    play(mode, body)


@both
def test_no_memory_on_one_device_is_an_error_on_all(mode):
    def body(team):
        device = FakeDevice(fails=["slab"] if team.index == 1 else [])
        with pytest.raises(MpimlError, match="no 4,096 bytes on a fake device 0: OSError"):
            DeviceGroup(team, device, 4096, LABEL)

    play(mode, body)


@both
@ways
def test_members_that_differ_get_the_same_error(mode, way):
    def body(team):
        group = DeviceGroup(team, FakeDevice(), 1 << 12, LABEL, ways=(way,))
        op = "max" if team.index == 0 else "sum"
        with pytest.raises(UsageError, match="the same operation"):
            group.reduce([Span("float32", 0, 64)], op, Label("Bucket.allreduce", op))
        group.close()

    play(mode, body)


@pytest.mark.mpi(min_size=2)
def test_mpi_that_takes_device_memory_gets_it(monkeypatch):
    from mpi4py import MPI

    calls = []
    yes = Direct(True, "it was tried")
    monkeypatch.setattr(group, "agree_direct", lambda team, label: yes)

    def body(team):
        regions = Regions(LEAVES)
        memory, channel = open_device(team, regions, FakeDevice(), True, LABEL, ("mpi", "host"))
        group = channel._group
        real = group._allreduce
        group._allreduce = lambda span, op: (calls.append(span.dtype), real(span, op))
        assert channel.way.startswith("host and mpi")
        views = memory.views(regions)
        fill(views, team)
        channel.allreduce("sum", Label("Bucket.allreduce", "sum"))
        for view, leaf in zip(views, LEAVES, strict=True):
            # MPI adds in an order of its own
            assert np.allclose(
                view.astype("c8"), expected(leaf, team.size).astype("c8"), rtol=1e-4, atol=1e-2
            )
        # MPI has no bfloat16
        assert calls == ["float32", "int32", "complex64"]
        fill(views, team)
        channel.broadcast(1, Label("Bucket.broadcast"))
        assert np.array_equal(views[4], value(LEAVES[4], 1))
        fill(views, team)
        channel.reduce_scatter("sum", Label("a", "sum"))
        channel.allgather(Label("b"))
        assert np.allclose(views[4], expected(LEAVES[4], team.size), rtol=1e-4, atol=1e-2)
        span = Span("float32", regions.regions[0].offset, regions.regions[0].count)
        fill(views, team)
        group.reduce([span], "mean", Label("c", "mean"))
        assert np.allclose(
            views[4], expected(LEAVES[4], team.size, "mean"), rtol=1e-4, atol=1e-2
        )
        channel.close()

    on_ranks(body)
    assert MPI.COMM_WORLD.size >= 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("host_size", ["1", "2"])
def test_members_on_several_hosts_stage(monkeypatch, host_size):
    from mpi4py import MPI

    from mpiml.collectives.members import team_of

    monkeypatch.setenv("MPIML_HOST_SIZE", host_size)
    comm = MPI.COMM_WORLD.Dup()
    team = team_of(comm, "test")
    regions = Regions(LEAVES)
    memory, channel = open_device(team, regions, FakeDevice(), True, LABEL)
    apart = comm.size > int(host_size)
    assert channel.way.startswith("host" if apart else "device")
    assert ("several hosts" in channel.way) is apart
    views = memory.views(regions)
    fill(views, team)
    channel.allreduce("sum", Label("Bucket.allreduce", "sum"))
    for view, leaf in zip(views, LEAVES, strict=True):
        got, wanted = view.astype("c8"), expected(leaf, team.size).astype("c8")
        # sums of hosts are added to each other: another order of members
        assert np.allclose(got, wanted, atol=4 if leaf.dtype_name == "bfloat16" else 1e-2)
    fill(views, team)
    channel.broadcast(1, Label("Bucket.broadcast"))
    assert np.array_equal(views[4], value(LEAVES[4], 1))
    fill(views, team)
    channel.reduce_scatter("sum", Label("a", "sum"))
    channel.allgather(Label("b"))
    assert np.allclose(views[4], expected(LEAVES[4], team.size), rtol=1e-4, atol=1e-2)
    channel.close()
    comm.Free()


@both
@pytest.mark.parametrize("piece", [256 << 20, 4096])
def test_arrays_outside_of_a_bucket(mode, piece, monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr("mpiml.collectives.device.channel.PIECE", piece)

    def body(team):
        for _ in range(2):
            leaves = [value(leaf, team.index).view(FakeArray) for leaf in LEAVES]
            kept = [leaf.copy() for leaf in leaves]
            paths = [leaf.path for leaf in LEAVES]
            label = Label("allreduce", "sum")
            results = reduce_arrays(team, leaves, paths, "sum", None, label)
            check(results, team.size)
            assert all(map(np.array_equal, leaves, kept))
            outs = [np.zeros_like(leaf) for leaf in leaves]
            back = reduce_arrays(team, leaves, paths, "sum", outs, label)
            assert all(a is b for a, b in zip(back, outs, strict=True))
            check(outs, team.size)
        empty = [np.zeros((0, 3), "f4").view(FakeArray)]
        assert reduce_arrays(team, empty, [""], "sum", None, label)[0].shape == (0, 3)
        strided = np.arange(20, dtype="f4")[::2].view(FakeArray)
        (doubled,) = reduce_arrays(team, [strided], [""], "sum", None, label)
        assert np.array_equal(doubled, team.size * np.arange(0, 20, 2))
        team.close()

    if mode == "threads":
        play(mode, body)
    else:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()  # a team of its own, which is closed
        from mpiml.collectives.members import team_of

        body(team_of(comm, "test"))
        comm.Free()


def test_a_wrong_out_is_an_error_on_all(monkeypatch):
    install(monkeypatch)

    def body(team):
        x = np.ones(8, "f4").view(FakeArray)
        out = np.ones(8 - team.index, "f4").view(FakeArray)
        with pytest.raises(UsageError, match=r"out: expected an array like x, \(8,\) float32"):
            reduce_arrays(team, [x], [""], "sum", [out], Label("allreduce", "sum"))
        team.close()

    in_threads(2, body)


def test_arrays_on_two_devices_are_refused(monkeypatch):
    install(monkeypatch)
    from mpiml.collectives.device.arrays import device_of

    arrays = [np.ones(3).view(FakeArray), np.ones(3).view(FakeArray)]
    arrays[1].index = 1
    with pytest.raises(UsageError, match=r"\['a'\] on device 0 and \['b'\] on device 1"):
        device_of(arrays, ["['a']", "['b']"], "Bucket")


def test_views_are_where_the_layout_says():
    regions = Regions(LEAVES)
    slab = FakeDevice().slab(regions.nbytes, exported=False)
    memory = DeviceMemory(slab)
    for number, view in enumerate(memory.views(regions)):
        offset, shape, dtype = regions.leaf(number)
        assert view.ctypes.data == slab.pointer + offset
        assert (view.shape, view.dtype) == (shape, numpy_dtype(dtype))
    assert [flat.shape for flat in memory.flat(regions)] == [
        (r.count,) for r in regions.regions
    ]
