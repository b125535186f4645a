"""Notes: they come in order, and none outlives its communicator, however a program ends."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import mpiml
from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.members import team_of
from mpiml.collectives.notes import DESK, FAREWELLS, Notes, notes_of
from mpiml.errors import RemoteError, UsageError
from tests.collectives.together import together

pytestmark = pytest.mark.mpi(min_size=2)
TAGS = pytest.mark.parametrize("tag", [DESK, FAREWELLS])


def others_of(comm):
    return [rank for rank in range(comm.size) if rank != comm.rank]


def nothing_is_left(comm):
    """Whether communicators made now are empty: an MPI gives numbers out again."""
    from mpi4py import MPI

    after = [comm.Dup() for _ in range(4)]
    comm.Barrier()
    empty = not any(own.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for own in after)
    for own in after:
        own.Free()
    return comm.allreduce(empty, MPI.LAND)


def test_notes_of_each_sender_and_kind_come_in_their_order():
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Dup()
    notes = notes_of(team_of(own, "the test"))
    for number in range(30):
        for rank in others_of(own):
            notes.send(rank, (DESK, FAREWELLS)[number % 2], f"{number}".encode())
    own.Barrier()
    assert not notes.received
    found = {DESK: {}, FAREWELLS: {}}
    while notes.received < 30 * (own.size - 1):
        for tag, by_source in found.items():
            for source, text in notes.take(tag):
                by_source.setdefault(source, []).append(int(text))
    expected = list(range(0, 30, 2)), list(range(1, 30, 2))
    for numbers, by_source in zip(expected, found.values(), strict=True):
        assert by_source == dict.fromkeys(others_of(own), numbers)
    own.Free()


@TAGS
def test_notes_do_not_outlive_the_communicator_of_a_plain_team(tag):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for _ in range(20):
        own = world.Dup()
        team = team_of(own, "the test")
        if world.rank:  # where one has never had anything to tell, others may have
            for rank in others_of(world):
                notes_of(team).send(rank, tag, b'["ask", 1, false]')
        own.Free()
        assert nothing_is_left(world)


def test_one_process_has_none():
    assert together(2, notes_of) == [None, None]


def test_once_they_are_closed_nothing_is_sent_or_taken():
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Dup()
    notes = notes_of(team_of(own, "the test"))
    own.Free()
    for rank in others_of(MPI.COMM_WORLD):
        notes.send(rank, DESK, b"late")
    assert notes.take(DESK) == []
    assert not notes.unsent()
    assert nothing_is_left(MPI.COMM_WORLD)


def tells(tag, fails):
    team = team_of(None, "the test")
    notes = notes_of(team)
    for rank in others_of(team.comm):
        notes.send(rank, tag, b"it comes when nobody looks")
    if fails:
        raise KeyError("the test")


@TAGS
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("factor", [1, 2], ids=["ranks", "folded"])
def test_notes_do_not_outlive_a_program(tag, fails, factor):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for _ in range(3):
        program = mpiml.Program("notes")
        node = mpiml.PyNode(tells, tag, fails)
        program.add_node(node, label="learner", replicas=factor * world.size)
        with pytest.raises((KeyError, RemoteError)) if fails else nullcontext():
            mpiml.launch(program, comm=world)
        assert nothing_is_left(world)


def test_where_members_were_out_of_step_nothing_is_begun_before_it_is_freed(monkeypatch):
    """Not all have begun the same collectives of MPI: no other one can be made sense of."""
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Dup()
    allreduce(np.ones(4), comm=own)
    makes, reduces = partial(Bucket, own, np.zeros(5)), partial(allreduce, np.ones(4), comm=own)
    with pytest.raises(UsageError):
        (reduces if own.rank else makes)()
    begun = []
    monkeypatch.setattr(Notes, "close", lambda *_: begun.append(1))
    own.Free()
    assert not begun
