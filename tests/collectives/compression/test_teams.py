"""Compression in `allreduce` and `Bucket`: in threads, on ranks, and between hosts.

What must come out is what the threads of `crowd` compute, which test_reducer.py checks.
"""

import numpy as np
import pytest

from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.compression import (
    QSGD,
    Cast,
    EFSign,
    NoFeedback,
    PowerSGD,
    RandomK,
    SignMajority,
    TopK,
    reducer_of,
)
from mpiml.errors import RemoteError, UsageError
from tests.collectives.compression.crowd import crowd
from tests.collectives.together import outcomes, together

CODECS = {
    "cast": Cast, "topk": lambda: TopK(0.1), "randomk": lambda: RandomK(0.1), "qsgd": QSGD,
    "majority": SignMajority, "efsign": EFSign, "powersgd": lambda: PowerSGD(1),
}  # fmt: skip
SHAPES = {"b": (30,), "s": (), "w": (40, 30)}
STEPS = 3

everywhere = pytest.mark.parametrize(
    "mode",
    [
        "threads",
        pytest.param("ranks", marks=pytest.mark.mpi(min_size=2)),
        pytest.param("hosts", marks=pytest.mark.mpi(min_size=3)),
    ],
)


class Place:
    """Where members are: runs a body on each, and knows which of them compress together."""

    def __init__(self, mode):
        self.mode = mode
        self.comm = None
        if mode == "threads":
            self.size = 3
        else:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD.Dup()
            self.size = self.comm.size
        each = 2 if mode == "hosts" else 1
        self.hosts = [range(i, min(i + each, self.size)) for i in range(0, self.size, each)]

    def __call__(self, body):
        """Run ``body(comm, index)``; return what all members returned, or raised."""
        if self.comm is None:
            return outcomes(self.size, lambda team: body(team, team.index))
        try:
            mine = body(self.comm, self.comm.rank)
        except Exception as error:
            mine = error
        return self.comm.allgather(mine)


@pytest.fixture
def place(mode, monkeypatch):
    if mode == "hosts":
        monkeypatch.setenv("MPIML_HOST_SIZE", "2")
    found = Place(mode)
    yield found
    if found.comm is not None:
        found.comm.Free()


def gradient(member, step, dtype=np.float32):
    rng = np.random.default_rng([member, step])
    return {k: np.asarray(rng.standard_normal(s)).astype(dtype) for k, s in SHAPES.items()}


def expected(place, make, op, names, dtype=np.float32):
    """What each step must give, by the definition: hosts are summed, then compressed."""

    def body(host, codec):
        results = []
        for step in range(STEPS):
            sums = {k: np.zeros(s, dtype) for k, s in SHAPES.items()}
            for member in place.hosts[host.index]:
                for k, g in gradient(member, step, dtype).items():
                    sums[k] = np.asarray(sums[k] + g)
            out = [np.empty_like(g) for g in sums.values()]
            reducer_of(codec, "").reduce(
                host, list(sums.values()), out, names, op, members=place.size
            )
            results.append([g.tobytes() for g in out])
        return results

    codecs = [make() for _ in place.hosts]
    return crowd(len(codecs), body, codecs)[0]


def raised(found):
    """The error that all members had."""
    assert {type(error) for error in found} <= {UsageError, RemoteError}, found
    assert len({str(error) for error in found}) == 1, found
    return found[0]


@everywhere
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_allreduce(place, name, op):
    def body(comm, index):
        codec = CODECS[name]()
        got = []
        for step in range(STEPS):
            tree = gradient(index, step)
            before = {k: g.copy() for k, g in tree.items()}
            result = allreduce(tree, op, comm=comm, compress=codec, name="g")
            np.testing.assert_equal(tree, before)
            got.append([result[k].tobytes() for k in SHAPES])
        return got

    names = [f"g['{k}']" for k in SHAPES]
    assert place(body) == [expected(place, CODECS[name], op, names)] * place.size


@everywhere
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("result", ["own", "shared"])
def test_bucket(place, name, result):
    def body(comm, index):
        codec, got = CODECS[name](), []
        with Bucket(comm, gradient(0, 0), result=result, name="g") as bucket:
            for step in range(STEPS):
                for k, g in gradient(index, step).items():
                    bucket[k][...] = g
                if step == 1:
                    bucket.iallreduce("mean", compress=codec).wait(60)
                else:
                    bucket.allreduce("mean", compress=codec)
                got.append([bucket.result[k].tobytes() for k in SHAPES])
                if result == "shared":
                    for k, g in gradient(index, step).items():
                        np.testing.assert_array_equal(bucket[k], g)
        return got

    names = [f"g['{k}']" for k in SHAPES]
    assert place(body) == [expected(place, CODECS[name], "mean", names)] * place.size


@everywhere
def test_plain_operations_go_on_beside_compressed_ones(place):
    def body(comm, index):
        codec = TopK(0.1)
        with Bucket(comm, np.zeros(100, np.float32)) as bucket:
            for _ in range(3):
                bucket.tree[:] = index
                bucket.allreduce("sum", compress=codec)
                bucket.tree[:] = index
                bucket.allreduce("sum")
                assert (bucket.tree == sum(range(place.size))).all()

    assert place(body) == [None] * place.size


@everywhere
@pytest.mark.parametrize("bad", [0, -1])
def test_nan_is_one_error_on_all_members(place, bad):
    bad %= place.size

    def body(comm, index, bucket=None):
        codec = EFSign()
        tree = gradient(index, 0)
        if index == bad:
            tree["w"][1, 2] = np.nan
        if bucket is None:
            return allreduce(tree, comm=comm, compress=codec)
        for k, g in tree.items():
            bucket[k][...] = g
        return bucket.allreduce(compress=codec)

    def in_bucket(comm, index):
        with Bucket(comm, gradient(0, 0)) as bucket:
            return body(comm, index, bucket)

    for way in (body, in_bucket):
        error = raised(place(way))
        assert "NaN in ['w']: expected finite numbers, got 1 of 1200" in str(error)
        names = str(error).partition(": op=")[0]
        assert f"{bad}" in names

    def plain(comm, index):
        with Bucket(comm, np.zeros(3)) as bucket:
            bucket.tree[:] = 1
            bucket.allreduce()
            return bucket.tree.tolist()

    assert place(plain) == [[place.size] * 3] * place.size


@everywhere
def test_other_operations_are_refused(place):
    def body(comm, index):
        return allreduce(gradient(index, 0), "max", comm=comm, compress=Cast())

    assert "op: expected 'sum' or 'mean' with compress=" in str(raised(place(body)))


@everywhere
def test_whole_numbers_are_refused(place):
    def body(comm, index):
        return allreduce({"n": np.arange(3)}, comm=comm, compress=EFSign())

    assert "Leave it out of the tree" in str(raised(place(body)))


@everywhere
def test_what_does_not_compress_on_the_first_member_is_told_to_all(place):
    def body(comm, index):
        compress = "bfloat16" if index == 0 else EFSign()
        return allreduce(gradient(index, 0), comm=comm, compress=compress)

    error = raised(place(body))
    assert "compress: expected None, one of mpiml.collectives.compression" in str(error)
    assert "got str" in str(error)


class Broken:
    def __init__(self, broken):
        self.broken = broken

    def encode(self, array):
        if self.broken:
            raise LookupError("no table")
        return array

    def decode(self, payload, shape, dtype):
        return payload


@everywhere
def test_the_users_exception_is_told_to_all(place):
    def body(comm, index):
        return allreduce(gradient(index, 0), comm=comm, compress=Broken(index == 0))

    error = raised(place(body))
    assert isinstance(error, RemoteError)
    assert "LookupError: no table" in str(error)


@everywhere
def test_members_of_which_one_does_not_compress_are_told_so(place):
    def body(comm, index):
        with Bucket(comm, np.zeros(5)) as bucket:
            bucket.allreduce(compress=EFSign() if index else None)

    found = place(body)
    assert {type(error) for error in found} == {UsageError}
    assert all("compressed" in str(error) for error in found)


@everywhere
def test_members_with_other_settings_are_told_so(place):
    def body(comm, index):  # 0 and 2 speak for their hosts, where there are hosts of 2
        codec = TopK(0.1 if index == 0 else 0.2)
        return allreduce(gradient(index, 0), comm=comm, compress=codec)

    error = raised(place(body))
    assert "TopK(ratio=0.1)" in str(error)
    assert "TopK(ratio=0.2)" in str(error)


@everywhere
def test_a_state_goes_on(place):
    def body(comm, index, split):
        codec = RandomK(0.2)
        got = []
        for step in range(4):
            if step == split:
                old, codec = codec, RandomK(0.2)
                codec.load_state_dict(old.state_dict())
            got.append(
                allreduce(gradient(index, step), comm=comm, compress=codec)["w"].tobytes()
            )
        return got

    assert place(lambda c, i: body(c, i, 2)) == place(lambda c, i: body(c, i, None))


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("mode", ["hosts"])
def test_only_what_goes_between_hosts_is_compressed(place):
    def body(comm, index):
        codec = EFSign()
        allreduce(gradient(index, 0), comm=comm, compress=codec)
        return codec.statistics().bytes_sent

    counts = place(body)
    speaks = [index % 2 == 0 for index in range(place.size)]
    declared = sum(EFSign().nbytes(shape, np.float32) for shape in SHAPES.values())
    assert counts == [declared if first else 0 for first in speaks]


def test_names_keep_arrays_apart():
    def body(team):
        codec = TopK(k=1)
        for name, size in (("a", 3), ("b", 4), ("a", 3)):
            allreduce(np.ones(size), comm=team, compress=codec, name=name)
        with pytest.raises(UsageError, match="holds the residual of another array"):
            allreduce(np.ones(5), comm=team, compress=codec, name="a")
        return sorted(codec.state_dict()["members"][str(team.index)])

    assert together(2, body) == [["a", "b"]] * 2


def test_results_go_where_they_are_asked_for():
    def body(team):
        x = np.float32([1, -3, 2])
        out = np.zeros((3, 2), np.float32)[:, 0]
        assert allreduce(x, comm=team, compress=NoFeedback(TopK(k=1)), out=out) is out
        assert allreduce(x, comm=team, compress=NoFeedback(TopK(k=1)), out=x) is x
        return out.tolist(), x.tolist()

    assert together(2, body) == [([0, -6, 0], [0, -6, 0])] * 2


def test_torch_tensors():
    torch = pytest.importorskip("torch")

    def body(team):
        got = allreduce({"w": torch.ones(20)}, "mean", comm=team, compress=Cast())
        return got["w"]

    for got in together(2, body):
        assert torch.equal(got, torch.ones(20))
