"""Programs inside an MPI code, at each thread level; what the code does stands in `code.py`."""

import re
import sys
from pathlib import Path

import pytest

from tests.mpi import child, environment, launcher, mpiexec

CODE = str(Path(__file__).with_name("code.py"))
RANKS = 3
#: at every level
ALIKE = (
    "calls", "topics", "polled", "refused", "reduced", "parts", "nested", "around", "two", "early",
    "failing", "stopped", "agreed", "async_bodies", "handlers", "petsc", "last",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("mpi_launcher")


def run(level, *scenarios, **changes):
    """Run scenarios on some ranks, and see that each has passed on all."""
    ended = mpiexec(
        RANKS, CODE, level, *scenarios, env=environment(**changes), timeout=80
    ).check()
    wanted = {f"{name} ok on {rank}" for name in scenarios for rank in range(RANKS)}
    assert wanted <= set(ended.stdout.splitlines()), ended
    assert not ended.leftovers
    return ended


@pytest.mark.parametrize("level", ["funneled", "serialized", "multiple"])
def test_programs_and_collectives_work_at_each_level(level):
    run(level, *ALIKE)


@pytest.mark.parametrize("level", ["funneled", "multiple"])
def test_finalising_mpi_inside_a_program_is_an_error_on_all_ranks(level):
    run(level, "finalised")


@pytest.mark.parametrize(
    ("level", "how", "why"),
    [
        ("multiple", "raises", "ValueError: nan in the solver"),
        ("funneled", "raises", "ValueError: nan in the solver"),
        ("multiple", "finalises", "MPI was finalised while the program 'small' runs"),
    ],
)
def test_a_rank_that_waits_in_mpi_for_one_that_has_left_ends_with_the_cause(level, how, why):
    ended = mpiexec(RANKS, CODE, level, how, env=environment(), timeout=60)
    assert ended.rc not in (0, None), ended
    assert why in ended.stderr, ended
    assert re.search(r"still running \d\.\d s after the stop", ended.stderr), ended
    assert not ended.leftovers, ended


def test_what_needs_a_thread_that_calls_mpi_is_refused_by_name():
    run("funneled", "far", MPIML_HOST_SIZE="1")


def test_one_thread_is_too_few():
    run("single", "single")


def test_under_funneled_only_the_thread_that_initialised_mpi_may_launch():
    run("funneled", "elsewhere")


def test_the_ranks_of_a_role_need_one_level_and_roles_do_not():
    parts = ["-n", 1, sys.executable, CODE, "funneled", "mixed"]
    others = ["-n", RANKS - 1, sys.executable, CODE, "multiple", "mixed"]
    ended = child(launcher(), *parts, ":", *others, env=environment(), timeout=60).check()
    assert ended.stdout.count("mixed ok on") == RANKS, ended
    assert not ended.leftovers


LESS = """
import mpiml
import mpiml.world as world

# as a library would that has no more
world.initialize = lambda: world.MPI.Init_thread(world.MPI.THREAD_FUNNELED)

class Echo:
    def say(self, x):
        return x

def ask(echo):
    return [echo.say(i) for i in range(3)]

def build():
    program = mpiml.Program("less")
    echo = program.add_node(mpiml.ServiceNode(Echo), label="echo")
    program.add_node(mpiml.PyNode(ask, echo), label="ask")
    return program

result = mpiml.launch(build())
if world.MPI.COMM_WORLD.rank == 0:
    print(result["ask"])
"""


def test_a_library_that_gives_less_is_said_once_and_used():
    ended = mpiexec(2, "-c", LESS).check()
    assert ended.stdout == "[[0, 1, 2]]\n"
    assert ended.stderr.count("gives MPI_THREAD_FUNNELED, so the main thread of each rank") == 1
