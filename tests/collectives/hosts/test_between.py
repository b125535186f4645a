"""Collectives among hosts, of which this machine pretends to have several."""

import os
from functools import partial
from functools import reduce as fold

import ml_dtypes
import numpy as np
import pytest

import mpiml
from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.compression import NoFeedback, TopK
from mpiml.errors import ServiceGoneError, SharedMemoryError, UsageError

pytestmark = pytest.mark.mpi(min_size=2)

DTYPES = ["float32", ml_dtypes.bfloat16, "int16", "complex128"]
WAYS = [(1, "leaders"), (2, "leaders"), (2, "stripes"), (3, "leaders")]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[1]} of {way[0]}")
def hosts(request, monkeypatch):
    """A communicator whose ranks live on hosts of so many; four ranks at most."""
    yield from make_hosts(monkeypatch, *request.param)


@pytest.fixture
def two_each(monkeypatch):
    yield from make_hosts(monkeypatch, 2, "leaders")


def make_hosts(monkeypatch, size, senders):
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    monkeypatch.setenv("MPIML_HOST_SIZE", str(size))
    monkeypatch.setenv("MPIML_BETWEEN", senders)
    monkeypatch.setenv("MPIML_BETWEEN_CHUNK", "4096")  # several rounds, of small arrays too
    comm = MPI.COMM_WORLD.Split(0 if rank < 4 else MPI.UNDEFINED, rank)
    if comm == MPI.COMM_NULL:
        pytest.skip("a rank that is left over")
    yield comm
    assert comm.allreduce(1) == comm.size  # MPI is as usable as before
    comm.Free()


def arrays(comm, dtype, count, seed=0):
    """What each rank brings, the same lists on all."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 5, count).astype(dtype) for _ in range(comm.size)]


def same_bits(comm, array):
    assert len(set(comm.allgather(np.ascontiguousarray(array).tobytes()))) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("result", ["own", "shared"])
def test_allreduce(hosts, dtype, op, result):
    dtype = np.dtype(dtype)
    if (op == "mean" and dtype.kind in "iu") or (op in ("min", "max") and dtype.kind == "c"):
        pytest.skip("not defined")
    function = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(op, np.add)
    for count in (1, 33, 5003):
        brought = arrays(hosts, dtype, count)
        wide = [a.astype("complex128" if dtype.kind == "c" else "float64") for a in brought]
        want = fold(function, wide)
        if op == "mean":
            want = want / hosts.size
        with Bucket(hosts, {"x": brought[0], "y": np.zeros(3)}, result=result) as bucket:
            bucket["x"][...] = brought[hosts.rank]
            bucket["y"][...] = hosts.rank
            bucket.allreduce(op)
            got = bucket.result["x"].copy()
            slack = 0 if dtype.kind in "iu" else 4 * float(ml_dtypes.finfo(dtype).eps)
            np.testing.assert_allclose(got.astype(want.dtype), want, rtol=slack)
            same_bits(hosts, got)
            if result == "shared":
                assert (bucket["x"] == brought[hosts.rank]).all()


def test_not_a_number_wins_and_infinity_stays(hosts):
    with Bucket(hosts, np.zeros(3000, "f4")) as bucket:
        bucket.tree[...] = hosts.rank
        bucket.tree[:10] = np.nan if hosts.rank == hosts.size - 1 else 1.0
        bucket.tree[10] = np.inf
        bucket.allreduce("max")
        assert np.isnan(bucket.tree[:10]).all()
        assert np.isposinf(bucket.tree[10])
        assert (bucket.tree[11:] == hosts.size - 1).all()


def test_a_mean_of_float16_whose_sum_overflows(hosts):
    with Bucket(hosts, np.zeros(2000, "f2")) as bucket:
        bucket.tree[...] = 30000 + hosts.rank
        bucket.allreduce("mean")
        middle = np.float16(30000 + (hosts.size - 1) / 2)
        assert (abs(bucket.tree - middle) <= np.spacing(middle)).all()
        same_bits(hosts, bucket.tree)


@pytest.mark.parametrize("bucket", [True, False])
def test_a_compressed_mean_of_float16_whose_sum_overflows(hosts, bucket):
    """In the host nothing is compressed, and 16 bits cannot hold the sum."""
    want = np.float16(30000 + (hosts.size - 1) / 2)
    tree = {"half": np.zeros(2000, "f2"), "single": np.zeros(2000, "f4")}
    for key in tree:
        tree[key][...] = 30000 + hosts.rank
    for compress in (NoFeedback(TopK(1.0)), TopK(1.0)):
        if bucket:
            with Bucket(hosts, tree) as made:
                for key in tree:
                    made[key][...] = tree[key]
                made.allreduce("mean", compress=compress)
                got = {key: made[key].copy() for key in tree}
        else:
            got = allreduce(tree, "mean", hosts, compress=compress)
        assert (abs(got["half"] - want) <= 2 * np.spacing(want)).all()
        np.testing.assert_allclose(got["single"], 30000 + (hosts.size - 1) / 2, rtol=1e-6)
        same_bits(hosts, got["half"])


def test_sums_are_those_of_the_hosts_in_their_order(hosts):
    """Two hosts: the bits follow from the definition, whatever MPI would do."""
    count = 3001
    rng = np.random.default_rng(1)
    brought = [rng.standard_normal(count).astype("f4") for _ in range(hosts.size)]
    with Bucket(hosts, brought[0]) as bucket:
        if bucket.statistics()["hosts"] != 2:
            return
        size = int(os.environ["MPIML_HOST_SIZE"])
        bucket.tree[...] = brought[hosts.rank]
        bucket.allreduce()
        first, second = (
            fold(np.add, part) for part in (brought[:size], brought[size:]) if part
        )
        assert (bucket.tree == first + second).all()


def test_reduce_scatter_then_allgather_is_allreduce(hosts):
    tree = {"a": np.zeros(2500, "f4"), "b": np.zeros((7, 11), "i8"), "c": np.zeros(900, "f2")}
    with Bucket(hosts, tree) as bucket, Bucket(hosts, tree) as other:
        for round_ in range(3):
            for name, leaf in tree.items():
                values = arrays(hosts, leaf.dtype, leaf.size, round_)[hosts.rank]
                for b in (bucket, other):
                    b[name][...] = values.reshape(leaf.shape)
            other.allreduce("sum")
            bucket.reduce_scatter("sum")
            for flat, whole, stripe in zip(
                bucket.flat, other.flat, bucket.stripes, strict=True
            ):
                np.testing.assert_array_equal(flat[stripe], whole[stripe])
                flat[: stripe.start] = 0  # what is not ours is nobody's
                flat[stripe.stop :] = 0
            bucket.allgather()
            for flat, whole in zip(bucket.flat, other.flat, strict=True):
                np.testing.assert_array_equal(flat, whole)


def test_broadcast_from_everyone(hosts):
    with Bucket(hosts, np.zeros(3000, "f8")) as bucket:
        for root in range(hosts.size):
            bucket.tree[...] = np.arange(3000) + hosts.rank
            bucket.broadcast(root)
            assert (bucket.tree == np.arange(3000) + root).all()


def test_requests_overlap_and_keep_their_order(hosts):
    with Bucket(hosts, np.zeros(5000, "f4")) as a, Bucket(hosts, np.zeros(100, "f2")) as b:
        for turn in range(5):
            a.tree[...] = turn + hosts.rank
            b.tree[...] = 1
            requests = [a.iallreduce("max"), b.iallreduce(), a.ibroadcast(0)]
            for request in requests:
                request.wait(30)
            assert (a.tree == turn + hosts.size - 1).all()
            assert (b.tree == hosts.size).all()


def test_one_host_does_something_else(hosts):
    """Every member gets the same error, and the next operation works."""
    with Bucket(hosts, np.zeros(100, "f4")) as bucket:
        for turn in range(2):
            bucket.tree[...] = 1
            last = hosts.rank == hosts.size - 1
            operation = partial(bucket.broadcast, 0) if last else bucket.allreduce
            with pytest.raises(UsageError, match="expected the same operation on") as caught:
                operation()
            text = str(caught.value)
            assert "Bucket.broadcast(root=0)" in text
            assert "Bucket.allreduce(op='sum')" in text
            assert f"(member {hosts.size - 1})" in text
            assert len(set(hosts.allgather(text.partition("This is")[0]))) == 1
            bucket.tree[...] = turn
            bucket.allreduce("max", name="after")
            assert (bucket.tree == turn).all()


def test_without_checks_it_works_too(hosts):
    with Bucket(hosts, np.zeros(3000, "f4"), check=False) as bucket:
        bucket.tree[...] = hosts.rank
        bucket.allreduce()
        assert (bucket.tree == sum(range(hosts.size))).all()


def test_settings_that_differ(two_each, monkeypatch):
    monkeypatch.setenv("MPIML_BETWEEN_CHUNK", str(1024 * (1 + two_each.rank)))
    if two_each.size > 2:  # two ranks are one host
        with pytest.raises(UsageError, match="Set MPIML_BETWEEN and MPIML_BETWEEN_CHUNK alike"):
            Bucket(two_each, np.zeros(3))


def test_an_operation_that_is_left_halfway_ends_the_bucket(hosts, monkeypatch):
    """A member whose wait is ended by its program tells its host; all of that one hear of it."""
    from mpiml.collectives.members import team_of

    class Ended(Exception):
        pass

    def waiting(seconds, missing, label):
        raise Ended

    bucket = Bucket(hosts, np.zeros(3000, "f4"))
    hosts.Barrier()
    if hosts.rank == 0:
        team = team_of(hosts, "test")
        monkeypatch.setattr(team.hooks, "waiting", waiting)
        with pytest.raises((Ended, ServiceGoneError)):
            bucket.allreduce()  # the others never come
        with pytest.raises(ServiceGoneError, match="ended early"):
            bucket.allreduce()
        monkeypatch.undo()
    hosts.Barrier()


def test_the_members_of_a_host_that_is_late_are_known(hosts, monkeypatch):
    from mpiml.collectives.members import team_of

    with Bucket(hosts, np.zeros(3000, "f4")) as bucket:
        team = team_of(hosts, "test")
        last = [i for i in range(hosts.size) if team.hosts[i] == team.hosts[-1]]
        if hosts.rank == 0 and 0 not in last:

            def waiting(seconds, missing, label):
                if missing and not seen:
                    seen.extend(missing)
                    for late in last:
                        hosts.send("come", late)

            seen = []
            monkeypatch.setattr(team.hooks, "waiting", waiting)
            bucket.allreduce()
            assert set(seen) >= set(last)
        else:
            if hosts.rank in last and 0 not in last:
                assert hosts.recv(source=0) == "come"
            bucket.allreduce()


def test_many_hosts_compare_by_mpi(hosts, monkeypatch):
    from mpiml.collectives.hosts import lanes

    monkeypatch.setattr(lanes, "_TOLD", 1)
    test_one_host_does_something_else(hosts)


def test_messages_where_shared_memory_is_refused(hosts, monkeypatch):
    from mpiml.collectives import arena

    monkeypatch.setattr(arena, "_room", lambda total: "needs 1 byte more than there is")
    with Bucket(hosts, {"x": np.zeros(5000, "f4"), "y": np.zeros(3, "f2")}, fallback=True) as b:
        for _ in range(3):
            b["x"][...] = np.arange(5000) * (hosts.rank + 1)
            b["y"][...] = hosts.rank
            b.allreduce()
            assert (b["x"] == np.arange(5000.0) * sum(range(1, hosts.size + 1))).all()
            assert (b["y"] == sum(range(hosts.size))).all()
        b.broadcast(1)
        b.reduce_scatter("mean")
        b.allgather()
        same_bits(hosts, b["x"])
        assert "memory of each process" in b.statistics()["way"]
    with pytest.raises(SharedMemoryError, match="fallback=True"):
        Bucket(hosts, np.zeros(3))


def learn(fail):
    """A replica: every operation, then perhaps one fails while the others wait for it."""
    me = mpiml.context()
    with Bucket(like={"x": np.zeros(30_000, "f4"), "h": np.zeros(1000, "f2")}) as bucket:
        size = bucket.size
        for root in range(2):
            bucket["x"][:] = me.index
            bucket["h"][:] = 1
            bucket.allreduce()
            assert (bucket["x"] == sum(range(size))).all()
            assert (bucket["h"] == size).all()
            bucket["x"][:] = me.index
            bucket.reduce_scatter("mean")
            bucket.allgather()
            np.testing.assert_allclose(bucket["x"], (size - 1) / 2)
            bucket.broadcast(root)
        assert (allreduce(np.ones(40_000)) == size).all()
        if fail and me.index == size - 1:
            raise RuntimeError("of one replica")
        if fail:
            bucket.allreduce()
        return bucket.statistics()["hosts"]


@pytest.mark.parametrize("replicas", [2, 5, 9])
@pytest.mark.parametrize("fail", [False, True])
def test_roles_of_several_hosts(two_each, monkeypatch, replicas, fail):
    """On a rank for each replica, and folded; with the end of one, that of all."""
    size = max(two_each.size // 2, 1)  # of a host
    monkeypatch.setenv("MPIML_HOST_SIZE", str(size))
    program = mpiml.Program("hosts")
    program.add_node(mpiml.PyNode(learn, fail), label="learner", replicas=replicas)
    if replicas < two_each.size:
        program.add_node(mpiml.PyNode(int), label="spare", replicas=mpiml.FILL)
    if fail:
        with pytest.raises(Exception, match="of one replica"):
            mpiml.launch(program, two_each)
        return
    result = mpiml.launch(program, two_each)
    if two_each.rank == 0:
        assert result["learner"][0] == -(-min(replicas, two_each.size) // size)
