"""What is said of processes that end, and to whom: the protocol, and whole programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives.leavers import _GRACE, Leavers, is_farewell
from tests.mpi import environment, mpiexec


def deliver(sides, wire):
    for to, message in wire:
        assert is_farewell(message)
        wire += sides[to].receive(message)


def told(side):
    side.end(since=0.0, now=100.0)  # known from now on
    return side.end(since=0.0, now=100.0 + 2 * _GRACE)


ORDERS = st.integers(2, 5).flatmap(lambda n: st.permutations(range(n)))


@given(ORDERS, st.booleans())
def test_whoever_stays_hears_of_those_that_leave(order, failed):
    """The first process waits meanwhile, if it stays."""
    sides = [Leavers(len(order), here) for here in range(len(order))]
    for process in order[:-1]:
        wire = sides[process].leave(f"rank {process} has ended", failed)
        if process == 0 and not failed:
            wire += sides[0].give_up("rank 0 has ended")
        deliver(sides, wire)
    if failed or 0 in order[1:]:  # else rank 0 was the first to leave, and is named
        assert told(sides[order[-1]]) == f"rank {order[0]} has ended"
    else:
        assert told(sides[order[-1]]) == "rank 0 has ended"


@given(ORDERS)
def test_where_all_end_in_order_nothing_is_left_that_nobody_receives(order):
    """The first process is still there when the others end: it waits for them at its end."""
    sides = [Leavers(len(order), here) for here in range(len(order))]
    assert not sides[0].leave("rank 0 has ended")
    for process in order:
        if process:
            wire = sides[process].leave(f"rank {process} has ended")
            assert [to for to, _ in wire] == [0]
            assert not sides[0].receive(wire[0][1])
    assert sides[0].alone
    assert not sides[0].give_up("rank 0 has ended")


def test_who_has_left_is_told_nothing_more():
    first = Leavers(4, 0)
    assert [to for to, _ in first.receive(Leavers(4, 2).leave("gone")[0][1])] == [1, 3]
    assert [to for to, _ in first.leave("failed", failed=True)] == [1, 3]


def test_one_of_them_is_passed_on():
    first = Leavers(9, 0)
    assert first.receive(Leavers(9, 2).leave("gone")[0][1])
    assert not first.receive(Leavers(9, 3).leave("gone")[0][1])


def test_who_has_ended_because_of_another_is_not_blamed():
    side = Leavers(3, 0)
    side.receive(Leavers(3, 1).leave("rank 1", failed=True, consequence=True)[0][1])
    side.receive(Leavers(3, 2).leave("rank 2", failed=True)[0][1])
    assert told(side) == "rank 2"


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
import mpiml.world; mpiml.world.start()
import sys, numpy as np
from mpi4py import MPI
from mpiml.collectives import Bucket, RingModel, SharedModel, Window, allreduce
from mpiml.collectives.members import team_of
comm = MPI.COMM_WORLD
team_of(comm, "the test")
def end():
    if comm.rank == {who}:
        {end}
def late():  # by so much that the others ask what this one waits in
    import time
    if comm.rank == 1:
        asked, limit = team_of(comm, "the test").comm, time.monotonic() + 30
        while not asked.Iprobe() and time.monotonic() < limit:
            pass
def body():
    {body}
body()
"""
BODIES = {
    "after all": "w = Window(comm, np.zeros(3)); m = RingModel(comm, np.zeros(3)); m.barrier(); end()",
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
    assert ended.stderr.count(f"{text} (its own") == 2, ended  # both that wait say so
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
    body = "m = SharedModel(comm, np.zeros(3)); late(); m.barrier()"
    file.write_text(PROGRAM.format(who=-1, end="pass", body=body))
    ended = mpiexec(3, file, timeout=60).check()
    assert ended.stderr == "", ended


@pytest.mark.parametrize("who", [0, 1])
def test_ranks_may_end_far_apart_with_all_open(tmp_path, mpi_launcher, who):
    file = tmp_path / "apart.py"
    soon = """
import time
from mpiml.collectives import desk
from mpiml.collectives.onesided import windows
desk.PATIENCE = windows._LAST = 0.2
"""
    file.write_text(
        soon + PROGRAM.format(who=who, end="time.sleep(1.0)", body=BODIES["after all"])
    )
    ended = mpiexec(2, file, timeout=60, env=environment(MPIML_HOST_SIZE="1")).check()
    assert ended.stderr == "", ended
