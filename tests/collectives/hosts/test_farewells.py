"""A member that leaves: those on other hosts hear of it, and nothing waits or is left over."""

import signal
import time

import numpy as np
import pytest

from mpiml.collectives import Bucket, allreduce, arena, channel
from mpiml.errors import ServiceGoneError, SharedMemoryError

pytestmark = pytest.mark.mpi(min_size=2)
WAYS = [(1, "leaders"), (2, "leaders"), (2, "stripes")]


class Rung(Exception):
    """Raised by a signal."""


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[1]} of {way[0]}")
def comm(request, monkeypatch):
    """A communicator whose ranks live on hosts of so many."""
    from mpi4py import MPI

    size, senders = request.param
    monkeypatch.setenv("MPIML_HOST_SIZE", str(size))
    monkeypatch.setenv("MPIML_BETWEEN", senders)
    if MPI.COMM_WORLD.size <= size:
        pytest.skip("one host")
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    assert comm.allreduce(1) == comm.size  # MPI is as usable as before
    comm.Free()


def usable(comm):
    """A new bucket works, whatever has become of others."""
    with Bucket(comm, np.zeros(100)) as bucket:
        bucket.tree[...] = comm.rank
        bucket.allreduce()
        assert (bucket.tree == sum(range(comm.size))).all()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("early", [True, False])
def test_a_member_that_closes_is_named_on_all_hosts(comm, who, early):
    bucket = Bucket(comm, np.zeros(1000))
    other = Bucket(comm, np.zeros(10))
    for _ in range(20):
        bucket.allreduce()
    if comm.rank == who:
        time.sleep(0.0 if early else 0.3)
        bucket.close()
    else:
        request = bucket.iallreduce()
        with pytest.raises(ServiceGoneError, match=f"rank {who} closed it"):
            request.wait(10)
    comm.Barrier()
    usable(comm)
    other.close()
    bucket.close()


def test_closing_after_the_last_operation_disturbs_nobody(comm):
    for turn in range(30):
        with Bucket(comm, np.zeros(3000), name=str(turn)) as bucket:
            bucket.tree[...] = 1
            bucket.allreduce()
            assert (bucket.tree == comm.size).all()
            bucket.broadcast(comm.size - 1)
    assert allreduce(np.ones(4), comm=comm)[0] == comm.size


@pytest.mark.parametrize("after", [0.01, 0.12])
def test_a_signal_ends_the_operation_on_all_hosts(comm, after):
    """Also in the first 50 ms of a wait, before anything is looked at."""

    def ring(*_):
        raise Rung

    bucket = Bucket(comm, np.zeros(100))
    bucket.allreduce()
    comm.Barrier()
    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, after)
        try:
            with pytest.raises(Rung):
                bucket.allreduce()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(ServiceGoneError, match="ended early"):
            bucket.allreduce()
    else:
        time.sleep(0.3)
        with pytest.raises(ServiceGoneError, match="rank 0 closed it, left it halfway"):
            bucket.allreduce()
    comm.Barrier()
    usable(comm)
    bucket.close()


def test_what_is_under_way_ends_before_its_communicator_is_freed(comm):
    own = comm.Dup()
    bucket = Bucket(own, np.ones(1000))
    bucket.tree[...] = 1
    request = bucket.iallreduce()
    own.Free()
    request.wait(10)
    assert (bucket.tree == comm.size).all()
    with pytest.raises(ServiceGoneError, match=r"has been freed|closed it"):
        bucket.allreduce()
    comm.Barrier()
    bucket.close()


def test_a_request_that_not_all_have_begun_ends_with_its_communicator(comm, monkeypatch):
    from mpiml.collectives.hosts import farewells

    monkeypatch.setattr(farewells, "_ENDING", 0.5)
    own = comm.Dup()
    bucket = Bucket(own, np.ones(1000))
    request = bucket.iallreduce() if comm.rank else None
    own.Free()
    if request is not None:
        with pytest.raises(ServiceGoneError, match=r"has been freed|closed it"):
            request.wait(10)


def test_memory_that_one_process_cannot_have_is_an_error_on_all(comm, monkeypatch):
    class Full:
        class mmap:
            def __init__(self, *_):
                raise OSError(12, "Cannot allocate memory")

    refused = SharedMemoryError("refused")
    monkeypatch.setattr(channel, "make_arena", lambda *_: refused)
    if comm.rank == 1:
        monkeypatch.setattr(arena, "mmap", Full)
    with pytest.raises(SharedMemoryError, match="rank 1 got 'Cannot allocate memory'"):
        Bucket(comm, np.zeros(10), fallback=True)
    monkeypatch.undo()
