"""What is said of processes that end, and to whom: the protocol, and whole programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives.leavers import _GRACE, Leavers, is_farewell
from tests.mpi import environment, mpiexec


@given(st.integers(2, 5).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))))
def test_all_that_stay_hear_of_all_that_leave_and_name_the_first(case):
    n, order = case
    sides = [Leavers(n, here) for here in range(n)]
    for process in order[:-1]:
        wire = sides[process].leave(f"rank {process} has ended")
        for to, message in wire:
            assert is_farewell(message)
            wire += sides[to].receive(message)
    (last,) = order[-1:]
    assert sides[last].end(since=0.0, now=100.0) == ""  # known from now on
    assert sides[last].end(since=0.0, now=100.0 + 2 * _GRACE) == f"rank {order[0]} has ended"


def test_nobody_is_told_who_has_left():
    first = Leavers(4, 0)
    assert [to for to, _ in first.receive(Leavers(4, 2).leave("gone")[0][1])] == [1, 3]
    assert [to for to, _ in first.leave("gone")] == [1, 3]


def test_a_wait_has_time_to_end_after_it_began_and_after_the_news():
    side = Leavers(2, 0)
    assert side.end(since=0.0, now=50.0) == ""
    side.receive(Leavers(2, 1).leave("rank 1 has ended")[0][1])
    assert side.end(since=0.0, now=60.0) == ""
    assert side.end(since=0.0, now=60.0 + 0.9 * _GRACE) == ""
    assert side.end(since=60.0 + _GRACE, now=60.0 + 1.9 * _GRACE) == ""  # another, begun later
    assert side.end(since=60.0 + _GRACE, now=60.0 + 2.1 * _GRACE) == "rank 1 has ended"


# -- whole programs --------------------------------------------------------------------------------

PROGRAM = """
import sys, numpy as np
from mpi4py import MPI
from mpiml.collectives import Bucket, RingModel, SharedModel, Window, allreduce
from mpiml.collectives.members import team_of
comm = MPI.COMM_WORLD
team_of(comm, "the test")
def end():
    if comm.rank == {who}:
        {end}
def body():
    {body}
body()
"""
BODIES = {
    "first allreduce": "end(); allreduce(np.zeros(3), comm=comm)",
    "making a bucket": "end(); Bucket(comm, np.zeros(3))",
    "making a model": "end(); SharedModel(comm, np.zeros(3))",
    "barrier": "m = SharedModel(comm, np.zeros(3)); end(); m.barrier()",
    "close": "m = RingModel(comm, np.zeros(3)); end(); m.close()",
    "within with": "with Window(comm, np.zeros(3)) as w: end()",
    "others open": "w = Window(comm, np.zeros(3)); m = SharedModel(comm, np.zeros(3)); end(); m.barrier()",
}


@pytest.mark.parametrize(
    ("body", "size", "who"),
    [
        ("first allreduce", "3", 0),
        ("making a bucket", "1", 2),
        ("making a model", "3", 2),
        ("barrier", "1", 0),
        ("close", "3", 2),
        ("within with", "1", 2),
        ("others open", "1", 1),
    ],
)
def test_a_rank_that_ends_is_named_where_the_others_meet(
    tmp_path, mpi_launcher, body, size, who
):
    file = tmp_path / "ends.py"
    file.write_text(
        PROGRAM.format(who=who, end="raise ValueError('bad batch')", body=BODIES[body])
    )
    ended = mpiexec(3, file, timeout=60, env=environment(MPIML_HOST_SIZE=size))
    assert ended.rc not in (0, None), ended
    text = f"rank {who} has ended with ValueError: bad batch, and will never come"
    assert ended.stderr.count("ServiceGoneError") >= 1, ended
    assert text in ended.stderr, ended
    assert not ended.leftovers


def test_a_rank_whose_data_end_first_is_named(tmp_path, mpi_launcher):
    file = tmp_path / "uneven.py"
    file.write_text(PROGRAM.format(who=1, end="sys.exit()", body=BODIES["barrier"]))
    ended = mpiexec(2, file, timeout=60)
    assert ended.rc not in (0, None), ended
    assert "rank 1 has ended, and will never come" in ended.stderr, ended


@pytest.mark.parametrize("size", ["1", "2"])
def test_a_rank_that_finalises_mpi_early_is_named(tmp_path, mpi_launcher, size):
    file = tmp_path / "early.py"
    file.write_text(
        PROGRAM.format(who=1, end="MPI.Finalize(); sys.exit()", body=BODIES["barrier"])
    )
    ended = mpiexec(2, file, timeout=60, env=environment(MPIML_HOST_SIZE=size))
    assert ended.rc not in (0, None), ended
    assert "rank 1 has ended, and will never come" in ended.stderr, ended


def test_programs_that_end_in_order_say_nothing(tmp_path, mpi_launcher):
    file = tmp_path / "whole.py"
    body = "m = SharedModel(comm, np.zeros(3)); m.barrier()"
    file.write_text(PROGRAM.format(who=-1, end="pass", body=body))
    ended = mpiexec(3, file, timeout=60).check()
    assert "mpiml" not in ended.stderr, ended
