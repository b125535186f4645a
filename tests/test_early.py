"""Signals in the first moments of a program, and in its last."""

import os
import signal
import sys

import pytest

from tests.mpi import ROOT, child, environment, start, start_mpiexec

LOADING = """
import sys, time
import mpiml

def body():
    print("up", flush=True)
    while not mpiml.context().stopping:
        time.sleep(0.01)
    print("told", flush=True)

def build():
    print("loading", flush=True)
    time.sleep(1)
    program = mpiml.Program("late")
    program.add_node(mpiml.PyNode(body), label="node", replicas=mpiml.FILL)
    return program
"""
NOTED = """
import os, signal, sys
from mpiml import early
early.listen()
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "late.py"
    path.write_text(LOADING)
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_while_the_file_is_loaded_stops_the_program_in_order(file, number):
    with start(sys.executable, "-m", "mpiml.run", file, cwd=ROOT) as job:
        job.wait_for("loading")
        job.signal(number)
        ended = job.wait(30)
    assert ended.rc == 143, str(ended)
    assert ended.stdout.count("] told") == 1, str(ended)
    assert ended.stderr == "", str(ended)


def test_a_launcher_that_hands_it_on_early_kills_no_rank(mpi_launcher, file):
    with start_mpiexec(3, "-m", "mpiml.run", file, cwd=ROOT) as job:
        job.wait_for("loading", count=3)
        job.signal(signal.SIGUSR1)
        ended = job.wait(30)
    assert ended.rc == 143, str(ended)
    assert ended.stdout.count("] told") == 3, str(ended)
    assert not ended.leftovers, str(ended)


def test_ctrl_c_while_the_file_is_loaded_ends_at_once(file):
    with start(sys.executable, "-m", "mpiml.run", file, cwd=ROOT) as job:
        job.wait_for("loading")
        job.signal(signal.SIGINT)
        ended = job.wait(30)
    assert "up" not in ended.stdout, str(ended)
    assert ended.rc != 0, str(ended)


def test_what_has_come_is_handed_over_once_and_later_ones_are_sent():
    code = NOTED + (
        "print(*sorted(early.take(print)), *early.take(print), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "early.take(print)\n"  # waits until the pipe has been read
        "early.give_back()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(*early.take())\n"
    )
    ended = child(sys.executable, "-c", code, cwd=ROOT).check()
    lines = ended.stdout.splitlines()
    numbers = sorted([signal.SIGUSR1, signal.SIGTERM])
    assert lines[0] == " ".join(str(int(n)) for n in numbers), str(ended)
    assert set(lines[1:-1]) == {str(int(signal.SIGUSR2))}, str(ended)
    assert lines[-1] == str(int(signal.SIGTERM)), str(ended)


def test_a_start_that_does_not_go_on_ends_with_143_and_a_word():
    code = NOTED.replace("early.listen()", "early.PATIENCE = 0.1; early.listen()") + (
        "import ctypes\nctypes.CDLL(None).sleep(60)\n"  # as in MPI_Init: no handler runs
    )
    ended = child(sys.executable, "-c", code, cwd=ROOT, timeout=30)
    assert ended.rc == 143, str(ended)
    assert "neither started nor ended" in ended.stderr, str(ended)


WAITING = """
import os, sys, time
if len(sys.argv) > 1:  # the rank that never comes
    time.sleep(60)
from mpiml import early
early.PATIENCE = 1.0
early.listen()
print("starting", os.getpid(), flush=True)
from mpiml import world
world.start()
"""


def test_a_stop_while_mpi_init_waits_for_a_rank_that_never_comes_ends_the_job(
    mpi_launcher, tmp_path
):
    (tmp_path / "waiting.py").write_text(WAITING)
    rank = [sys.executable, tmp_path / "waiting.py"]
    command = [mpi_launcher, "-n", "1", *rank, ":", "-n", "1", *rank, "late"]
    with start(*command, cwd=ROOT, env=environment(PYTHONPATH=ROOT)) as job:
        [pid] = job.find(r"starting (\d+)")
        os.kill(int(pid), signal.SIGUSR1)
        ended = job.wait(30)
    assert ended.rc != 0, str(ended)
    assert "neither started nor ended" in ended.stderr, str(ended)
    assert not ended.leftovers, str(ended)


def test_an_ignored_signal_stays_ignored():
    code = NOTED.replace(
        "early.listen()", "signal.signal(signal.SIGUSR1, signal.SIG_IGN); early.listen()"
    )
    ended = child(sys.executable, "-c", code + "print(*early.take())", cwd=ROOT).check()
    assert ended.stdout.split() == [str(int(signal.SIGTERM))], str(ended)


def test_a_forked_child_is_ended_by_sigterm_and_tells_its_parent_nothing():
    code = (
        "import os, signal, time\nfrom mpiml import early\nearly.listen()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)\n"
        "print(os.waitpid(pid, 0)[1], early.take())\n"
    )
    ended = child(sys.executable, "-c", code, cwd=ROOT, timeout=30).check()
    assert ended.stdout.split() == [str(int(signal.SIGTERM)), "[]"], str(ended)


POOL = """
import multiprocessing, time
import mpiml

def body():
    fork = multiprocessing.get_context("fork")
    codes = []
    for _ in range(20):  # at once: before the child could have put anything in order
        child = fork.Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
        child.terminate()
        child.join()
        codes.append(child.exitcode)
    with fork.Pool(2) as pool:  # whose end is a SIGTERM too
        print(pool.map(abs, [-1, -2]), set(codes), mpiml.context().stopping, flush=True)

def build():
    program = mpiml.Program("pool")
    program.add_node(mpiml.PyNode(body), label="node")
    return program
"""


def test_the_workers_of_a_pool_end_by_sigterm_and_the_program_goes_on(tmp_path):
    """Under mpiml.run both the early handlers and those of the program stand."""
    file = tmp_path / "pool.py"
    file.write_text(POOL)
    ended = child(sys.executable, "-m", "mpiml.run", file, cwd=ROOT, timeout=60).check()
    assert "[1, 2] {-15} False" in ended.stdout, str(ended)


def test_mpiml_run_that_is_stopped_before_it_starts_mpiexec_starts_none(mpi_launcher, file):
    code = (
        "import os, signal, sys\nfrom mpiml import early\nearly.listen()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        f"from mpiml.run import main\nsys.exit(main(['-n', '2', {file!r}]))\n"
    )
    ended = child(sys.executable, "-c", code, cwd=ROOT)
    assert ended.rc == 143, str(ended)
    assert "loading" not in ended.stdout, str(ended)
