"""Programs in C on libmpiml beside Python ranks: one job for many checks, and each way to end."""

import sys

import pytest

from tests.external.building import HERE, program
from tests.mpi import environment, launcher, start, vendor

pytestmark = pytest.mark.skipif(launcher() is None, reason="no mpiexec")


def run(source, script, *words, arguments=(), pythons=2, solvers=2, exe=None):
    """Run a program of C as the first ranks of a job, and a Python program as the others."""
    exe = exe or program(source)
    command = [launcher(), "-n", solvers, exe, *words]
    if pythons:
        python = [sys.executable, "-m", "mpiml.run", HERE / "c" / script, *arguments]
        command += [":", "-n", pythons, *python]
    with start(*command, env=environment()) as job:
        return job.wait(60)


def tracebacks(ended):
    return ended.stderr.count("Traceback (most recent call last)")


def test_calls_and_parameters():
    ended = run("calls.c", "calls.py").check()
    assert "all calls are right" in ended.stdout
    assert not ended.leftovers


def test_paths_in_a_tree_with_lists():
    ended = run("lists.c", "lists.py", pythons=1, solvers=1).check()
    assert "all paths are right" in ended.stdout


def test_a_rank_that_fails_last_in_attach_keeps_nobody_waiting():
    ended = run("late.c", "lists.py", 1, pythons=1)
    assert ended.stdout.count("refused") == 2, ended
    assert tracebacks(ended) <= 1, ended
    assert "rank 1 of the job, which runs another program" in ended.stderr, ended
    assert ended.rc == 2, ended


def test_topics():
    ended = run("topics.c", "topics.py").check()
    assert "all topics are right" in ended.stdout
    assert not tracebacks(ended)


@pytest.mark.parametrize("kept", [0, 3])
def test_an_array_that_comes_while_another_is_received_is_not_lost(kept):
    arguments = ["--kept", kept]
    ended = run("between.c", "between.py", arguments=arguments, solvers=1).check()
    assert "none was lost between" in ended.stdout


def ends(how, **more):
    return run("ends.c", "ends.py", how, arguments=["--how", how], **more)


@pytest.mark.parametrize("how", ["stop", "stopped", "forgets"])
def test_all_have_left(how):
    ended = ends(how).check()
    assert ended.stdout.count(f": {how}: done") == 2
    assert not tracebacks(ended)
    assert not ended.leftovers


def test_one_that_leaves_early_is_not_waited_for():
    ended = ends("early").check()
    assert "heard [1.0, 1.0, 1.0, 1.0, 1.0]" in ended.stdout


def test_a_failure_in_python_ends_waits_in_c():
    ended = ends("fails")
    assert ended.rc == 1, ended
    assert ended.stdout.count(": fails: done") == 2
    assert tracebacks(ended) == 1
    assert "ValueError: boom" in ended.stderr
    assert not ended.leftovers


def test_memory_is_the_callers_again_when_a_call_returns():
    exe = program("ends.c", define="-DLATE")
    ended = ends("late", exe=exe, solvers=1).check()
    assert ": late: done" in ended.stdout
    ended = ends("lost", exe=exe, solvers=1)
    assert ended.rc == 1, ended
    assert ": lost: done" in ended.stdout, ended


@pytest.mark.parametrize(
    "order",
    [
        [("python", 2), ("red", 2), ("blue", 1)],
        [("red", 1), ("python", 1), ("blue", 1), ("red", 1), ("python", 1)],
    ],
)
def test_ranks_stand_in_any_order(order):
    words, rows, colours = [], [], []
    python = [sys.executable, "-m", "mpiml.run", HERE / "c/crowd.py", "--blue", "1"]
    for who, n in order:
        words += [":"] if words else []
        words += ["-n", n, *(python if who == "python" else [program("crowd.c"), who])]
        colours += n * [who]
    for world, colour in enumerate(colours):
        if colour != "python":
            rank, size = colours[:world].count(colour), colours.count(colour)
            rows.append((int(colour == "red"), rank, size, world))
    with start(launcher(), *words, env=environment()) as job:
        ended = job.wait(60).check()
    assert f"said {sorted(rows)}" in ended.stdout


def test_part_of_the_world_attaches():
    guests, python = [program("crowd.c"), "red", "part"], [sys.executable, HERE / "c/crowd.py"]
    with start(launcher(), "-n", 3, *guests, ":", "-n", 2, *python, env=environment()) as job:
        ended = job.wait(60).check()
    assert f"said {[(1, 0, 2, 2), (1, 1, 2, 1)]}" in ended.stdout


@pytest.mark.parametrize(("how", "status"), [("abort", 5), ("exit", 4)])
def test_a_solver_that_dies_ends_the_job(how, status):
    ended = ends(how)
    killed = 9 if vendor() == "mpich" else status  # its launcher tells of those that it kills
    assert ended.rc in (status, killed), ended
    assert "done" not in ended.stdout
    assert not ended.leftovers


def test_a_label_that_the_program_has_not_is_refused():
    ended = ends("label")
    assert ended.rc != 0
    assert ended.stdout.count('code 7: mpiml_attach("nobody")') == 2, ended


def test_wrong_arguments_of_one_rank_are_told_to_all():
    ended = ends("wrong")
    assert ended.rc != 0
    assert ended.stdout.count("code 2: ") == 1, ended
    assert "a label of 1 to 43 bytes" in ended.stdout
    assert ended.stdout.count("code 7: ") == 1
    assert "rank 1 called mpiml_attach with arguments that it refuses" in ended.stdout
    assert "'wrong arguments' on rank 1" in ended.stderr


def test_alone_there_is_nothing_to_attach_to():
    ended = run("ends.c", None, "alone", pythons=0).check()
    assert ended.stdout.count("code 7: ") == 2
    assert "expected ranks that run Python among the 2" in ended.stdout


def test_of_another_version_the_library_is_refused():
    exe = program("ends.c", define="-DOTHER_VERSION")
    ended = ends("version", exe=exe)
    assert ended.rc != 0
    assert ended.stdout.count("code 5: ") == 2, ended
    assert "expected mpiml 9.9.9 on all ranks" in ended.stdout


def test_with_another_mpi_library_it_is_refused():
    ended = ends("library", exe=program("ends.c", define="-DOTHER_LIBRARY"))
    assert ended.rc != 0
    assert ended.stdout.count("code 6: ") == 2, ended
    assert "expected the MPI library Other MPI v1.0 on all ranks" in ended.stdout


def test_the_wrong_launcher_is_told():
    exe = program("ends.c")
    with start(exe, "alone", env=environment(OMPI_COMM_WORLD_SIZE=4, PMI_SIZE=4)) as job:
        ended = job.wait(60)
    assert "code 6: " in ended.stdout, ended
    assert "mpirun of that library" in ended.stdout
