"""Signals, clocks and deaths, under the launcher there is: an ordered end, or a quick one."""

import re
import signal
import sys

import pytest

from mpiml.ancestors import look_up
from tests.mpi import ROOT, child, mpiexec, start, start_mpiexec

RUN = ("-m", "mpiml.run")
FILE = "tests/waiting.py:build"


def ranks(job):
    """Process ids of the two nodes, once they wait."""
    pids = [int(pid) for _, pid in sorted(job.find(r"ready (\d) (\d+)", count=2))]
    assert all(below(pid, job.pid) for pid in pids), pids  # signals go nowhere else
    return pids


def below(pid, above):
    """Whether a process has been started by another one, or by what that has started."""
    while pid > 1 and pid != above:
        process = look_up(pid)
        pid = process.parent if process is not None else 0
    return pid == above


def send(pid, number):
    import os

    os.kill(pid, number)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGUSR1, 143),
        (signal.SIGUSR2, 143),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_to_one_rank_stops_the_program_in_order(mpi_launcher, number, status):
    with start_mpiexec(4, *RUN, FILE, cwd=ROOT) as job:
        send(ranks(job)[1], number)
        ended = job.wait(20)
    assert ended.rc == status, str(ended)
    assert ended.stdout.count("] told") == 2, str(ended)  # bodies left in order
    assert "Traceback" not in ended.stderr, str(ended)
    assert not ended.leftovers, str(ended)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)]
)
def test_a_signal_to_the_one_process_does_too(number, status):
    with start(sys.executable, *RUN, FILE, cwd=ROOT) as job:
        job.wait_for("ready", count=2)
        job.signal(number)
        ended = job.wait(20)
    assert (ended.rc, ended.stderr) == (status, ""), str(ended)
    assert ended.stdout.count("] told") == 2, str(ended)


def test_a_second_interrupt_ends_everything_at_once(mpi_launcher):
    with start_mpiexec(4, *RUN, "--grace", "60", FILE, "--sleep", "60", cwd=ROOT) as job:
        pid = ranks(job)[0]
        send(pid, signal.SIGINT)
        job.wait_for("open is told")  # two signals at once would be one
        send(pid, signal.SIGINT)
        ended = job.wait(20)
    assert ended.rc != 0, str(ended)
    assert not ended.leftovers, str(ended)


def test_sigusr1_to_the_launcher_stops_the_program(mpi_launcher):
    with start_mpiexec(4, *RUN, FILE, cwd=ROOT) as job:
        ranks(job)
        job.signal(signal.SIGUSR1)
        ended = job.wait(20)
    assert ended.rc == 143, str(ended)
    assert ended.stdout.count("] told") == 2, str(ended)


def test_sigquit_says_who_waits_and_goes_on(mpi_launcher):
    with start_mpiexec(4, *RUN, FILE, cwd=ROOT) as job:
        pid = ranks(job)[0]
        send(pid, signal.SIGQUIT)
        job.wait_for("who waits for whom")
        job.wait_for("node/1 (rank 2) waits for the stop")
        send(pid, signal.SIGTERM)
        ended = job.wait(20)
    assert ended.rc == 143, str(ended)
    assert "in held_open" in ended.stderr, str(ended)
    assert "no answer" not in ended.stderr, str(ended)


@pytest.mark.parametrize("n", [4, 0])
def test_max_time_stops_the_program(n, mpi_launcher):
    command = (*RUN, "--max-time", "0.5", FILE)
    ended = mpiexec(n, *command, cwd=ROOT) if n else child(sys.executable, *command, cwd=ROOT)
    assert ended.rc == 143, str(ended)
    assert ended.stdout.count("] told") == 2, str(ended)


def test_a_body_that_does_not_end_is_listed_and_the_status_is_1(mpi_launcher):
    command = (*RUN, "--grace", "0.5", "--max-time", "0.5", FILE, "--sleep", "60")
    ended = mpiexec(4, *command, cwd=ROOT, timeout=20)
    assert ended.rc == 1, str(ended)
    assert re.search(r"still running 0\.\d s after the stop", ended.stderr), str(ended)
    assert "[node/0] body" in ended.stderr or "[node/1] body" in ended.stderr, str(ended)
    assert "in ready" in ended.stderr, str(ended)


def test_no_rank_outlives_a_launcher_that_was_killed(mpi_launcher):
    with start_mpiexec(4, *RUN, FILE, "--sleep", "60", cwd=ROOT) as job:
        pids = ranks(job)
        job.signal(signal.SIGKILL)
        job.process.wait(10)
        job._poll(lambda: not alive(pids), 10, "end of the ranks")


def alive(pids):
    import os

    return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and not zombie(pid)]


def zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_rank_that_is_killed_ends_the_job(mpi_launcher):
    with start_mpiexec(4, *RUN, FILE, cwd=ROOT) as job:
        send(ranks(job)[1], signal.SIGKILL)
        ended = job.wait(20)
    assert ended.rc != 0, str(ended)
    assert not ended.leftovers, str(ended)
