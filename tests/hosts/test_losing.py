"""A host that is cut off, or lost: it is said in time, and nothing waits for ever."""

import os
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

from mpiml.ancestors import look_up
from tests.mpi import start, vendor
from tests.two_hosts import several_hosts

PROGRAM = f"{Path(__file__).with_name('programs.py')}:link"
SILENT = "nothing has come from host {} (rank 1) to rank 0 for "


@contextmanager
def running(hosts, folder, *options, far=None):
    """Yield a job whose rank 0 asks a service on the second host, and the file that ends it.

    With the first host as `far` the service is on rank 0, and rank 1 asks.
    """
    far, until = far or hosts.names[1], folder / "until"
    until.unlink(missing_ok=True)
    words = ["-m", "mpiml.run", *options, PROGRAM, "--host", far, "--until", str(until)]
    command, env = hosts.command(words)
    with start(*command, env=env) as job:
        job.wait_for("asked", count=2)
        yield job, until


def test_a_host_that_is_cut_off_or_lost(tmp_path):
    with several_hosts(1, 1, programs=True) as hosts:
        cut_and_mended(hosts, tmp_path)
        for side in hosts.names:  # rank 0 is called, or calls
            cut_for_good(hosts, tmp_path, side)
        killed(hosts, tmp_path)
        forsaken(hosts, tmp_path)


def cut_and_mended(hosts, folder):
    """It is told within the stall time, with the call that waits; then the program goes on."""
    far = hosts.names[1]
    with running(hosts, folder, "--stall-warning", "2") as (job, until):
        hosts.cut(far)
        job.wait_for(SILENT.format(far), timeout=10)
        asked = job.stdout().count("asked")
        hosts.mend(far)
        job.wait_for(f"host {far} is heard again, by rank 0", timeout=30)
        job.wait_for("asked", count=asked + 2)
        until.touch()
        ended = job.wait(30)
    assert ended.rc == 0, str(ended)
    line, wait = ended.stderr[ended.stderr.index("nothing has come") :].splitlines()[:2]
    assert float(line.split()[-2]) <= 2.0, line  # its own account
    assert "near/0 (rank 0) has waited" in wait
    assert "for far/0.ask() at programs.py:" in wait
    assert ended.stderr.count("nothing has come") == 1


def cut_for_good(hosts, folder, far):
    """A stop that does not get through: the end comes after the grace all the same."""
    lost = hosts.names[1]
    options = ("--stall-warning", "0.5", "--grace", "1", "--max-time", "3")
    with running(hosts, folder, *options, far=far) as (job, _):
        hosts.cut(lost)
        ended = job.wait(40)
    assert "so the program is ended:\n" + SILENT.format(lost) in ended.stderr, str(ended)
    if vendor() == "debian":  # its mpirun, told to give up, crashes on its way out
        assert ended.rc != 0, str(ended)
    else:
        assert ended.rc == 1, str(ended)
    hosts.end(lost)  # nobody can tell its ranks
    hosts.mend(lost)


def killed(hosts, folder):
    """A host that goes down with all that runs on it: Open MPI's mpirun takes it for an end."""
    with running(hosts, folder) as (job, _):
        hosts.end(hosts.names[1])
        ended = job.wait(30)
    assert not ended.leftovers
    if vendor() == "openmpi":
        assert "daemon" in ended.stdout + ended.stderr, str(ended)  # its status is 0
    else:
        assert ended.rc != 0, str(ended)


def forsaken(hosts, folder):
    """What stands above a host's daemon dies alone, as when a way there breaks: all hear of it."""
    with running(hosts, folder) as (job, _):
        os.kill(topmost(hosts.names[1]), signal.SIGKILL)
        ended = job.wait(30, grace=10)  # Open MPI 4's daemon ends later than its launcher
    assert not ended.leftovers
    if vendor() != "openmpi":  # as above
        assert ended.rc != 0, str(ended)
    hosts.end(hosts.names[1])


def topmost(host):
    """The process of a host that none there has started."""
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, check=True)
    pids = {int(pid) for pid in listed.stdout.split()}
    return next(pid for pid in pids if look_up(pid).parent not in pids)
