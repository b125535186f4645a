"""Whether MPI gets device memory: the questions, the decision, and that all members agree."""

import ctypes

import pytest

from mpiml.collectives.device.direct import (
    Direct,
    agree_direct,
    ask_library,
    decide,
    loaded_libraries,
    try_exchange,
)
from mpiml.errors import UsageError
from tests.collectives.device.test_group import in_threads, on_ranks

YES, NO = Direct(True, "lib says yes"), Direct(False, "lib says no")
MAPS = """\
7f00-7f01 r--p 00000000 08:01 77                         /opt/my mpi/lib/libmpi.so.40
7f01-7f02 r-xp 00001000 08:01 77                         /opt/my mpi/lib/libmpi.so.40
7f02-7f03 r--p 00000000 08:01 78                         /opt/lib/libmpi_mpifh.so.40
7f03-7f04 r--p 00000000 08:01 79                         /opt/lib/libmpich.so.12
7f04-7f05 rw-p 00000000 00:00 0
"""


class Library:
    """A libmpi with one question that it answers."""

    def __init__(self, name, answer):
        setattr(self, name, answer)


def asked(name, answer):
    return ask_library(["/x/libmpi.so.12"], lambda path: Library(name, answer))


def write(value, status=0):
    def query(kind, place):
        assert kind == 0
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = value
        return status

    return query


def test_libraries_are_found_by_path():
    lines = MAPS.splitlines(keepends=True)
    assert loaded_libraries(lines) == [
        "/opt/my mpi/lib/libmpi.so.40",
        "/opt/lib/libmpich.so.12",
    ]


def test_the_library_is_asked():
    assert asked("MPIX_Query_cuda_support", lambda: 1).allowed
    assert asked("MPIX_Query_cuda_support", lambda: 0) == Direct(
        False, "libmpi.so.12 says that it takes no CUDA memory"
    )
    assert asked("MPIX_GPU_query_support", write(1)).allowed
    assert not asked("MPIX_GPU_query_support", write(0)).allowed
    assert not asked("MPIX_GPU_query_support", write(1, status=5)).allowed
    assert not asked("nothing", None).allowed
    assert not ask_library([]).allowed


def gone(path):
    raise OSError("gone")


def test_a_library_that_cannot_be_opened_is_a_no():
    assert not ask_library(["/x/libmpi.so.12"], gone).allowed


@pytest.mark.parametrize(
    ("setting", "given", "tried", "allowed", "why"),
    [
        ("on", [NO], [], True, "MPIML_GPU_DIRECT=on"),
        ("off", [YES], [YES], False, "MPIML_GPU_DIRECT=off"),
        ("auto", [YES, NO], [YES], False, "lib says no"),
        ("auto", [YES, YES], [], False, "nobody has tried it"),
        ("auto", [YES, YES], [YES, Direct(False, "it crashed")], False, "it crashed"),
        ("auto", [YES, YES], [YES, YES], True, "lib says yes, and a trial exchange worked"),
    ],
)
def test_the_decision(setting, given, tried, allowed, why):
    assert decide(setting, given, tried) == Direct(allowed, why)


def test_members_of_one_process_cannot_each_call_mpi():
    answers = in_threads(2, lambda team: agree_direct(team, "x", "on"))
    assert answers == [Direct(False, "members share a process")] * 2


@pytest.mark.mpi(min_size=2)
def test_all_ranks_agree():
    from mpi4py import MPI

    from mpiml.collectives.members import team_of

    def fresh(**changed):
        comm = MPI.COMM_WORLD.Dup()
        team = team_of(comm, "test")
        mine = {"setting": "auto", "ask": lambda: YES, "attempt": lambda: YES}
        mine |= {k: v(team) for k, v in changed.items()}
        try:
            return agree_direct(team, "x", **mine), agree_direct(team, "x", "on", None, None)
        finally:
            comm.Free()

    first, again = fresh()
    assert first == again == Direct(True, "lib says yes, and a trial exchange worked")
    one_says_no = fresh(ask=lambda team: lambda: NO if team.index else YES)[0]
    assert one_says_no == NO
    crashed = Direct(False, "it crashed")
    leader = fresh(attempt=lambda team: lambda: crashed if team.index == 0 else 1 / 0)[0]
    assert leader == crashed  # and only the first of the host has tried
    with pytest.raises(UsageError, match="one value on all ranks, got auto and off"):
        fresh(setting=lambda team: "off" if team.index else "auto")


@pytest.mark.mpi(min_size=1)
def test_this_library_says_no_and_nothing_is_tried():
    # The wheels and Debian's package are built without CUDA; with another MPI this is a trial.
    mine = ask_library()
    assert mine.why.startswith("lib")
    found = on_ranks(lambda team: agree_direct(team, "x", "auto", attempt=lambda: NO))
    assert not found.allowed


@pytest.mark.mpi(min_size=1)
def test_a_trial_inside_of_a_job_comes_back():
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        found = try_exchange(60.0)
        assert found.allowed or found.why.startswith("the trial exchange failed: ")
    MPI.COMM_WORLD.Barrier()
