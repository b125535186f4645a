"""Ranks 0 and 1 on one host, 2 and 3 on another: right results, and few bytes on the link.

Started by test_two_hosts.py with the way to send as its argument.
"""

import sys
import time

import numpy as np
import pytest
from mpi4py import MPI

from mpiml.bench.several_hosts import link_bytes
from mpiml.collectives import Bucket, allreduce
from mpiml.errors import UsageError

COUNT = 1_000_003
ROUNDS = 5


def quiet(comm):
    """The bytes that have passed, once nothing is under way, late acknowledgements included."""
    comm.Barrier()
    time.sleep(0.1)
    count = link_bytes()
    comm.Barrier()
    return count


def measured(comm, work):
    """Bytes on the link for a call of `work`; the least, since acknowledgements vary."""
    counts = []
    for _ in range(ROUNDS):
        before = quiet(comm)
        work()
        counts.append(quiet(comm) - before)
    return min(counts)


def results(comm):
    """Every operation gives what it should, to the same bits on all ranks."""
    rank, size = comm.rank, comm.size
    with Bucket(comm, {"x": np.zeros(COUNT, "f4"), "y": np.zeros(7, "f2")}) as bucket:
        for op, want in (("sum", 10.0), ("mean", 2.5), ("max", 4.0)):
            bucket["x"][...] = rank + 1
            bucket["y"][...] = rank + 1
            bucket.allreduce(op)
            assert (bucket["x"] == want).all()
            assert (bucket["y"] == want).all()
        for root in range(size):
            bucket["x"][...] = rank
            bucket.broadcast(root)
            assert (bucket["x"] == root).all()
        bucket["x"][...] = np.arange(COUNT) % 5 + rank
        bucket.reduce_scatter()
        bucket.allgather()
        assert (bucket["x"] == size * (np.arange(COUNT) % 5) + 6).all()
        assert bucket.statistics()["hosts"] == 2
        other = rank >= 2
        with pytest.raises(UsageError, match="expected the same operation on all 4 members"):
            bucket.broadcast(0) if other else bucket.allreduce()
    found = allreduce({"a": np.ones(COUNT, "f4"), "b": np.float64(rank)}, comm=comm)
    assert (found["a"] == size).all()
    assert found["b"] == 6


def main():
    comm = MPI.COMM_WORLD
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert local.size == 2, "MPI does not see two hosts"
    leaders = comm.Split(0 if local.rank == 0 else 1, comm.rank)
    results(comm)
    a = np.ones(COUNT, "f4")

    def among_leaders():
        if local.rank == 0:
            leaders.Allreduce(MPI.IN_PLACE, a)

    theirs = measured(comm, among_leaders)
    with Bucket(comm, a) as bucket, Bucket(comm, np.zeros(2 * COUNT, "f2")) as half:
        assert sys.argv[1] in bucket.statistics()["way"]
        ours = {
            "float32": measured(comm, bucket.allreduce),
            "float16": measured(comm, half.allreduce),
            "plain": measured(comm, lambda: allreduce(a, comm=comm, out=a)),
        }
    if comm.rank == 0:
        print("link", theirs, ours)
        for kind, count in ours.items():
            assert count <= 1.02 * theirs, (kind, count, theirs)  # headers and acknowledgements
            assert count >= 8 * COUNT, "nothing was measured"
    leaders.Free()
    local.Free()


main()
