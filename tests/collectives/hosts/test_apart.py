"""`allreduce` of plain arrays among hosts, of which this machine pretends to have several."""

import ml_dtypes
import numpy as np
import pytest

from mpiml.collectives import allreduce
from mpiml.collectives.hosts.apart import CHUNK, open_apart
from mpiml.collectives.labels import Label
from mpiml.collectives.members import team_of
from mpiml.errors import UsageError

pytestmark = pytest.mark.mpi(min_size=2)

WAYS = [(1, "leaders"), (2, "leaders"), (2, "stripes"), (3, "leaders")]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[1]} of {way[0]}")
def hosts(request, monkeypatch):
    """A communicator whose ranks live on hosts of so many; four ranks at most."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    monkeypatch.setenv("MPIML_HOST_SIZE", str(request.param[0]))
    monkeypatch.setenv("MPIML_BETWEEN", request.param[1])
    comm = MPI.COMM_WORLD.Split(0 if rank < 4 else MPI.UNDEFINED, rank)
    if comm == MPI.COMM_NULL:
        pytest.skip("a rank that is left over")
    yield comm
    assert comm.allreduce(1) == comm.size  # MPI is as usable as before
    comm.Free()


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
@pytest.mark.parametrize("nbytes", [0, 4, 4000, CHUNK, 4 * CHUNK + 4])
def test_arrays_of_any_size(hosts, dtype, nbytes):
    count = nbytes // np.dtype(dtype).itemsize
    own = (np.arange(count) % 7 + hosts.rank).astype(dtype)
    want = sum((np.arange(count) % 7 + i).astype("f8") for i in range(hosts.size))
    for _ in range(2):
        assert (allreduce(own, comm=hosts) == want).all()
    result = own.copy()
    assert allreduce(result, comm=hosts, out=result) is result
    assert (result == want).all()
    assert (allreduce(result, "mean", comm=hosts) == want).all()
    assert (allreduce(own, "max", comm=hosts) == own - hosts.rank + hosts.size - 1).all()


def test_trees(hosts):
    tree = {"a": np.full(5, hosts.rank, "i8"), "b": [np.ones((2, 3)), np.float32(2)]}
    found = allreduce(tree, comm=hosts)
    assert (found["a"] == sum(range(hosts.size))).all()
    assert (found["b"][0] == hosts.size).all()
    assert found["b"][1] == 2 * hosts.size


def test_arrays_that_differ(hosts):
    with pytest.raises(UsageError, match="with other arrays"):
        allreduce(np.zeros(3 + (hosts.rank == hosts.size - 1)), comm=hosts)
    with pytest.raises(UsageError):  # one member's alone
        allreduce(np.zeros(3), "sum" if hosts.rank else "all", comm=hosts)
    assert (allreduce(np.ones(3), comm=hosts) == hosts.size).all()


def test_bytes_of_all_members(hosts):
    label = Label("gather")
    apart = open_apart(team_of(hosts, "test"), label, True)
    for unit in (0, 1, 100, 3 * CHUNK // 2):
        lengths = [unit * i for i in range(hosts.size)]
        own = np.full(lengths[hosts.rank], hosts.rank, np.uint8)
        found = apart.gather(own, lengths, label)
        assert [len(a) for a in found] == lengths
        assert all((array == i).all() for i, array in enumerate(found))
    apart.close()


def test_processes_that_share_no_memory(hosts, monkeypatch):
    from mpiml.collectives import arena

    monkeypatch.setattr(arena, "_room", lambda total: "needs 1 byte more than there is")
    label = Label("open")
    apart = open_apart(team_of(hosts, "test"), label, True)
    assert "memory of each process" in apart.way
    own, out = np.full(CHUNK, hosts.rank, "f4"), np.zeros(CHUNK, "f4")
    apart.reduce(own, out, "float32", "sum", label)
    assert (out == sum(range(hosts.size))).all()
    apart.close()
