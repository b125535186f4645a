"""Ranks under plain mpiexec that are killed, or end early: nobody waits for them for ever."""

import pytest

from tests.mpi import mpiexec

LIMIT = 60  # s; a job that hangs fails here

JOB = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
from mpiml import optim, topology
from mpiml.collectives import neighbor_allreduce
from mpiml.collectives.neighbors import ADPSGD, DPSGD, PushSum, gossip
comm = MPI.COMM_WORLD
n, graph, pairs = comm.size, topology.ring(comm.size), topology.RandomPairs(comm.size, 1)
x = np.ones({length})
def sgd(rule, graph):
    model = rule(np.zeros({length}), optim.SGD(0.1), graph, comm=comm)
    return lambda step: model.step(x)
def push_sum():
    pushed = PushSum(x, graph, comm)
    return lambda step: pushed.step()
calls = {{
    "neighbor_allreduce": lambda: lambda step: neighbor_allreduce(x, graph, comm),
    "gossip": lambda: lambda step: gossip(x, pairs, step, comm),
    "DPSGD": lambda: sgd(DPSGD, graph),
    "ADPSGD": lambda: sgd(ADPSGD, topology.bipartite(n)),
    "PushSum": push_sum,
}}
call = calls["{call}"]()
for step in range(3):
    call(step)
comm.Barrier()
if comm.rank == 1:
    {end}
for step in range(3, 100_000):
    call(step)
print("went on without rank 1")
"""

CALLS = ("neighbor_allreduce", "gossip", "DPSGD", "PushSum", "ADPSGD")


def run(tmp_path, ranks, call, length, end):
    """Run the job, and check that it ended by itself, with an error, and nobody went on."""
    file = tmp_path / "job.py"
    file.write_text(JOB.format(call=call, length=length, end=end))
    ended = mpiexec(ranks, "-m", "mpi4py", file, timeout=LIMIT)
    assert ended.rc != 0, ended
    assert "went on" not in ended.stdout, ended
    assert not ended.leftovers, ended
    return ended


@pytest.mark.parametrize("call", CALLS)
def test_a_killed_rank_ends_the_job(tmp_path, mpi_launcher, call):
    run(tmp_path, 2, call, 9, "os.kill(os.getpid(), signal.SIGKILL)")


def test_a_rank_that_is_killed_with_large_messages_under_way(tmp_path, mpi_launcher):
    run(tmp_path, 3, "neighbor_allreduce", 300_000, "os.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.parametrize("call", ["neighbor_allreduce", "gossip"])
def test_a_rank_that_raises_ends_the_job(tmp_path, mpi_launcher, call):
    ended = run(tmp_path, 2, call, 9, "raise ArithmeticError('rank 1 has no data')")
    assert "rank 1 has no data" in ended.stderr, ended


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_leaves_is_named_by_those_that_wait(tmp_path, mpi_launcher, call):
    """It waits in MPI_Finalize for the others, which must not wait for it."""
    ended = run(tmp_path, 2, call, 9, "sys.exit(0)")
    assert "rank 1 has ended" in ended.stderr, ended
