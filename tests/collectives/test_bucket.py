"""`Bucket` among threads of this process, and on ranks."""

import contextlib
import gc
import hashlib
import os
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.collectives import Bucket
from mpiml.errors import DeadlineError, ServiceGoneError, SharedMemoryError, UsageError
from tests.collectives.together import outcomes, together

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(t) for t in ("f4", "f8", "f2")] + [BF16]
INTS = [np.dtype(t) for t in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
COMPLEX = [np.dtype(t) for t in ("c8", "c16")]
everywhere = pytest.mark.parametrize(
    "members", [2, 3, pytest.param("ranks", marks=pytest.mark.mpi(min_size=2))]
)


def members_of(members):
    """Return a function that runs a body on each member: of threads, or this rank alone."""
    if members != "ranks":
        return lambda body: together(members, body)
    from mpi4py import MPI

    return lambda body: MPI.COMM_WORLD.allgather(body(MPI.COMM_WORLD))


def index_size(comm):
    return (comm.rank, comm.size) if hasattr(comm, "rank") and hasattr(comm, "Split") else (
        comm.index, comm.size,
    )  # fmt: skip


def in_order(values, op, dtype):
    """Combine the values as the definition says: in the order of members, rounded once."""
    wide = np.float32 if dtype in (np.dtype("f2"), BF16) else dtype
    total = values[0].astype(wide)
    with np.errstate(over="ignore"):
        for other in values[1:]:
            other = other.astype(wide)
            if op in ("sum", "mean"):
                total = total + other
            elif op == "prod" and total.dtype.kind == "c":  # NumPy may fuse these
                a, b, c, d = total.real, total.imag, other.real, other.imag
                total = (a * c - b * d + 1j * (a * d + b * c)).astype(dtype)
            elif op == "prod":
                total = total * other
            else:
                total = (np.minimum if op == "min" else np.maximum)(total, other)
        if op == "mean":
            parts = total.view(total.real.dtype)  # NumPy divides complex numbers another way
            parts /= parts.dtype.type(len(values))
        return total.astype(dtype)


def some(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    if dtype.kind in "iub":
        return rng.integers(0, 100, shape).astype(dtype)
    values = rng.standard_normal(shape) * 4
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS + INTS + COMPLEX, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("length", [1, 37, 5003])
def test_every_dtype_and_operation(dtype, op, length):
    if (op == "mean" and dtype.kind in "iu") or (op in ("min", "max") and dtype.kind == "c"):
        pytest.skip("not defined; refused, see below")
    values = [some(dtype, length, i) for i in range(3)]
    expected = in_order(values, op, dtype)

    def body(team):
        with Bucket(team, np.empty(length, dtype)) as bucket:
            bucket.tree[:] = values[team.index]
            bucket.allreduce(op)
            return bucket.tree.tobytes()

    assert set(together(3, body)) == {expected.tobytes()}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("length", [1, 13, 1001, 40_003])
def test_bitwise_the_same_on_all_members_and_from_run_to_run(size, length):
    values = [some(np.dtype("f4"), length, i) * 10.0 ** (3 * (i % 3)) for i in range(size)]
    values = [v.astype("f4") for v in values]

    def body(team):
        digests = set()
        with Bucket(team, values[0]) as bucket:
            for _ in range(4):
                bucket.tree[:] = values[team.index]
                bucket.allreduce()
                digests.add(hashlib.sha256(bucket.tree.tobytes()).hexdigest())
        return digests

    expected = hashlib.sha256(in_order(values, "sum", np.dtype("f4")).tobytes()).hexdigest()
    assert set.union(*together(size, body)) == {expected}


@everywhere
def test_a_tree_of_several_dtypes(members):
    like = {
        "w": np.empty((300, 7), "f4"),
        "deep": [np.empty((), "f8"), (np.empty(0, "i8"), np.empty(5, BF16))],
        "n": np.empty(3, "i8"),
    }

    def body(comm):
        index, size = index_size(comm)
        with Bucket(comm, like) as bucket:
            assert not bucket["w"].any()
            bucket["w"][:] = index + 1
            bucket["deep"][0][...] = index + 1
            bucket["deep"][1][1][:] = index + 1
            bucket["n"][:] = index + 1
            bucket.allreduce()
            total = size * (size + 1) / 2
            assert (bucket["w"] == total).all()
            assert bucket["deep"][0] == total
            assert (bucket["deep"][1][1].astype("f4") == total).all()
            assert (bucket["n"] == total).all()
            assert bucket["w"].flags.writeable
            assert bucket["w"].ctypes.data % 64 == 0
            assert [f.dtype for f in bucket.flat] == ["f8", "i8", BF16, "f4"]
            assert bucket.statistics()["members"] == size
        return index

    members_of(members)(body)


@everywhere
@pytest.mark.parametrize("length", [5, 100_003])
def test_scatter_and_gather_are_the_two_halves(members, length):
    def body(comm):
        index, size = index_size(comm)
        with Bucket(comm, [np.empty(length, "f4"), np.empty(3, "f8")]) as bucket:
            values = [some(np.dtype("f4"), length, i) for i in range(size)]
            bucket[0][:] = values[index]
            bucket[1][:] = index
            bucket.reduce_scatter("mean")
            expected = in_order(values, "mean", np.dtype("f4"))
            flat, own = bucket.flat[0], bucket.stripes[0]
            inside = flat[own][: max(0, length - own.start)]
            np.testing.assert_array_equal(inside, expected[own][: len(inside)])
            outside = np.ones(len(flat), bool)
            outside[own] = False
            flat[outside] = -1
            bucket.allgather()
            np.testing.assert_array_equal(bucket[0], expected)
            np.testing.assert_array_equal(bucket[1], np.full(3, (size - 1) / 2))
        return True

    members_of(members)(body)


@everywhere
def test_broadcast_from_each_member(members):
    def body(comm):
        index, size = index_size(comm)
        with Bucket(comm, np.empty(70_001, "i4")) as bucket:
            for root in range(size):
                bucket.tree[:] = 10 * index + root
                bucket.broadcast(root)
                assert (bucket.tree == 11 * root).all()
        return True

    members_of(members)(body)


@everywhere
def test_a_shared_result_is_one_array_and_leaves_the_own_ones(members):
    def body(comm):
        index, size = index_size(comm)
        with Bucket(comm, {"g": np.empty(3000, "f4")}, result="shared") as bucket:
            for round_ in range(3):
                bucket["g"][:] = index + round_
                bucket.allreduce("mean")
                np.testing.assert_array_equal(
                    bucket.result["g"], np.full(3000, (size - 1) / 2 + round_, "f4")
                )
                np.testing.assert_array_equal(bucket["g"], np.full(3000, index + round_))
            assert not bucket.result["g"].flags.writeable
        return True

    members_of(members)(body)


@everywhere
def test_requests_go_on_in_the_order_in_which_they_were_begun(members):
    def body(comm):
        index, size = index_size(comm)
        buckets = [Bucket(comm, np.empty(20_000, "f8")) for _ in range(4)]
        for round_ in range(5):
            for number, bucket in enumerate(buckets):
                bucket.tree[:] = index + number + round_
            requests = [bucket.iallreduce() for bucket in buckets]
            buckets[0].regions  # noqa: B018 - something else meanwhile
            for request in reversed(requests):
                request.wait(60)
                assert request.test()
            for number, bucket in enumerate(buckets):
                expected = size * (size - 1) / 2 + size * (number + round_)
                assert (bucket.tree == expected).all()
        request = buckets[0].ibroadcast(0)
        buckets[0].allreduce("max")  # waits for what was begun
        assert request.test()
        for bucket in buckets:
            bucket.close()
        return True

    members_of(members)(body)


def test_a_request_that_is_late_says_so_and_goes_on():
    def body(team):
        with Bucket(team, np.empty(4, "f4")) as bucket:
            if team.index == 1:
                team.room.shared["first"].wait(30)
            request = bucket.iallreduce()
            if team.index == 0:
                with pytest.raises(DeadlineError, match=r"allreduce.*not done within 0\.01 s"):
                    request.wait(0.01)
                assert not request.test()
                team.room.shared["first"].set()
            request.wait(60)
        return True

    import threading

    event = threading.Event()

    def with_event(team):
        team.room.shared["first"] = event
        return body(team)

    together(2, with_event)


@everywhere
def test_a_view_outlives_close(members):
    def body(comm):
        bucket = Bucket(comm, np.empty(9, "f4"))
        view = bucket.tree
        view[:] = 3
        bucket.allreduce("max")
        bucket.close()
        bucket.close()
        del bucket
        gc.collect()
        assert (view == 3).all()
        view[:] = 4
        return view.sum()

    assert set(members_of(members)(body)) == {36}


@everywhere
def test_a_closed_bucket_says_so(members):
    def body(comm):
        bucket = Bucket(comm, np.empty(9, "f4"))
        bucket.close()
        for call in (bucket.allreduce, bucket.iallreduce, bucket.allgather, bucket.broadcast):
            with pytest.raises(ServiceGoneError, match="the bucket is closed"):
                call()
        return bucket.statistics()["way"]

    assert set(members_of(members)(body)) == {"closed"}


def test_a_member_that_closed_while_others_wait_is_named():
    def body(team):
        bucket = Bucket(team, np.empty(9, "f4"))
        if team.index == 1:
            bucket.close()
            return ""
        with pytest.raises(ServiceGoneError) as caught:
            bucket.allreduce()
        with pytest.raises(ServiceGoneError, match="an earlier operation ended early"):
            bucket.allreduce()
        return str(caught.value)

    text, _ = together(2, body)
    assert "member 1 closed it" in text
    assert "test_bucket.py" in text


DIFFERENT = {
    "shapes": (
        lambda i: np.empty(3 + i),
        r"\(3,\) float64 \(member 0\), .*\(4,\) float64 \(memb",
    ),
    "dtypes": (lambda i: np.empty(3, "f4" if i else "f8"), "float64 .member 0., .*float32"),
    "order": (
        lambda i: [np.empty(2), np.empty(3)][:: 1 - 2 * i],
        r"\[0\] \(2,\).*\[0\] \(3,\)",
    ),
    "leaves": (lambda i: [np.empty(2)] * (1 + i), "no such leaf"),
    "objects": (lambda i: np.array([None] if i else [1.0]), "got object"),
    "none": (
        lambda i: {"a": None if i else np.empty(2)},
        r"\['a'\]: expected an array, got None",
    ),
}


@everywhere
@pytest.mark.parametrize("what", DIFFERENT)
def test_members_with_other_trees_all_get_one_error(members, what):
    make, text = DIFFERENT[what]

    def body(comm):
        index, _ = index_size(comm)
        with pytest.raises(UsageError, match=text):
            Bucket(comm, make(min(index, 1)))
        with Bucket(comm, np.empty(2)) as bucket:  # they are still in step
            bucket.allreduce()
        return True

    members_of(members)(body)


CALLS = {
    "name": (lambda b, i: b.allreduce(name=f"step {i}"), "name='step 0'"),
    "op": (lambda b, i: b.allreduce("max" if i else "min"), "op='min'"),
    "kind": (
        lambda b, i: b.broadcast(0) if i else b.allreduce(),
        r"Bucket.broadcast\(root=0\)",
    ),
    "root": (lambda b, i: b.broadcast(min(i, 1)), "root=1"),
    "undefined": (lambda b, i: b.allreduce("what" if i else "sum"), "what|refused"),
    "compressed": (
        lambda b, i: b.allreduce(compress=_Plain() if i else None),
        "compressed",
    ),
}


class _Plain:
    def encode(self, array):
        return array

    def decode(self, payload, shape, dtype):
        return payload


@everywhere
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("length", [3, 30_000])
def test_members_that_do_different_things_all_get_one_error(members, what, length):
    call, text = CALLS[what]

    def body(comm):
        index, size = index_size(comm)
        with Bucket(comm, np.empty(length, "f4")) as bucket:
            bucket.tree[:] = 0
            with pytest.raises(UsageError, match=text) as caught:
                call(bucket, index)
            assert "expected" in str(caught.value)
            bucket.tree[:] = 1
            bucket.allreduce()
            assert (bucket.tree == size).all()
        return True

    members_of(members)(body)


def test_what_is_not_defined_is_refused_with_a_cure():
    def body(team):
        with Bucket(team, np.empty(3, "i4")) as bucket:
            with pytest.raises(
                UsageError, match=r"'mean' is not defined for int32.*Take 'sum'"
            ):
                bucket.allreduce("mean")
        with (
            Bucket(team, np.empty(3, "c8")) as bucket,
            pytest.raises(UsageError, match="order"),
        ):
            bucket.allreduce("max")
        with Bucket(team, np.empty(3, bool)) as bucket:
            bucket.tree[:] = [team.index, True, False]
            bucket.allreduce("max")
            assert bucket.tree.tolist() == [True, True, False]
            with pytest.raises(UsageError, match="'sum' is not defined for bool"):
                bucket.allreduce()
        with (
            Bucket(team, np.empty(3)) as bucket,
            pytest.raises(UsageError, match=r"0\.\.1, got 2"),
        ):
            bucket.broadcast(2)
        return True

    together(2, body)


@pytest.mark.parametrize("arguments", [{"result": "other"}, {}])
def test_arguments_are_checked(arguments):
    def body(team):
        with pytest.raises(UsageError, match=r"expected 'own' or 'shared'|got None"):
            Bucket(team, None, **arguments)
        return True

    together(1, body)


def test_outside_of_a_node_comm_must_be_given():
    with pytest.raises(UsageError, match=r"comm=MPI\.COMM_WORLD"):
        Bucket(like=np.empty(3))


@contextlib.contextmanager
def made_in_shared_memory(monkeypatch):
    """Give the paths in /dev/shm that this rank opens; other jobs may have some there too."""
    paths = []
    real = os.open

    def note(path, *arguments, **options):
        if str(path).startswith("/dev/shm/mpiml-"):
            paths.append(path)
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", note)
        yield paths


@pytest.mark.mpi(min_size=2)
def test_a_full_shared_memory_is_an_error_on_all_ranks_before_anything_is_written(monkeypatch):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    real = os.statvfs

    def tiny(path):
        return (
            SimpleNamespace(f_bavail=256, f_frsize=4096) if path == "/dev/shm" else real(path)
        )

    monkeypatch.setattr(os, "statvfs", tiny)
    with made_in_shared_memory(monkeypatch) as names:
        with pytest.raises(
            SharedMemoryError, match=r"needs [\d,]+ bytes in /dev/shm, which has"
        ) as e:
            Bucket(comm, np.empty(1 << 20, "f4"))
    assert not names
    assert "--shm-size" in str(e.value)
    assert isinstance(e.value, MemoryError)


@pytest.mark.mpi(min_size=2)
def test_shared_memory_that_fails_on_one_rank_fails_on_all(monkeypatch):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(os, "posix_fallocate", _no_space)
    with made_in_shared_memory(monkeypatch) as names:
        with pytest.raises(SharedMemoryError, match=f"rank {comm.size - 1} /dev/shm: No space"):
            Bucket(comm, np.empty(1 << 16, "f4"))
        comm.Barrier()
        assert names
        assert not [path for path in names if os.path.exists(path)]


def _no_space(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.mpi(min_size=2)
def test_nothing_is_left_behind_in_shared_memory(monkeypatch):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with made_in_shared_memory(monkeypatch) as names:
        bucket = Bucket(comm, np.empty(1000, "f4"))
        comm.Barrier()
        assert names
        assert not [path for path in names if os.path.exists(path)]
    bucket.close()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["f4", "f8", "i4", "u1"]),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_any_tree_of_any_shapes(specs, size):
    like = [np.empty(shape, dtype) for dtype, shape in specs]

    def body(team):
        with Bucket(team, like) as bucket:
            for leaf in bucket.tree:
                leaf[...] = team.index + 1
            bucket.allreduce()
            return [leaf.copy() for leaf in bucket.tree]

    for leaves in together(size, body):
        for leaf, (dtype, shape) in zip(leaves, specs, strict=True):
            assert leaf.dtype == dtype
            assert leaf.shape == tuple(shape)
            assert (leaf == size * (size + 1) // 2).all()


def test_a_wait_that_is_ended_breaks_the_bucket_for_all():
    class Ended(Exception):
        pass

    class Hooks:
        def begin(self, label):
            pass

        def end(self):
            pass

        def waiting(self, seconds, missing, label):
            if missing == [2]:
                raise Ended(str(label))

    def body(team):
        bucket = Bucket(team, np.empty(4, "f4"))
        if team.index == 2:
            return None
        bucket.allreduce()
        return None

    first, second, _ = outcomes(3, body, Hooks())
    # one is ended by its hook; the other by the same, or since the first has left
    assert isinstance(first, Ended | ServiceGoneError)
    assert isinstance(second, Ended | ServiceGoneError)
    assert Ended in (type(first), type(second))
