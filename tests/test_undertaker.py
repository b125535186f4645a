"""How a launcher is ended that waits for a host it has lost."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from mpiml import undertaker
from mpiml.ancestors import Process, look_up
from mpiml.undertaker import script

#: A process that must not sleep any more.
SLEEPLESS = "import time; time.sleep = None; "
WAYS = [Process(7, "ssh", 101, 70), Process(8, "ssh", 101, 80)]


def chain(*names):
    return [Process(100 + i, name, 101 + i, 1) for i, name in enumerate(names)]


def test_mpirun_of_open_mpi_is_asked_until_it_gives_up():
    text = script(chain("prterun"), WAYS)
    assert "kill -TERM 100" in text
    assert text.endswith("kill -KILL 100")


def test_the_ways_of_mpich_to_other_hosts_go_first():
    text = script(chain("hydra_pmi_proxy", "mpiexec"), WAYS)
    assert text.index("for w in 7:70 8:80;") < text.index("kill -KILL 101")
    assert "-TERM" not in text


@pytest.mark.parametrize("daemon", ["prted", "orted", "hydra_pmi_proxy"])
def test_a_daemon_is_killed(daemon):
    assert script(chain("sh", daemon), []).endswith("kill -KILL 101")


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("slurmstepd",),
        ("prted", "srun"),
        ("hydra_pmi_proxy", "slurmstepd"),
        ("prted", "prted", "slurmstepd"),
        ("sh", "slurmstepd", "mpirun"),
    ],
)
def test_a_batch_system_is_left_alone(names):
    assert script(chain(*names), WAYS) == ""


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (("prterun", "python", "mpirun"), 0),
        (("mpiexec.openmpi", "python", "slurmstepd"), 0),
        (("hydra_pmi_proxy", "mpiexec", "python", "hydra_pmi_proxy", "mpiexec"), 1),
        (("hydra_pmi_proxy", "mpiexec", "bash", "slurmstepd"), 1),
    ],
)
def test_the_launcher_around_the_one_of_the_job_is_let_be(names, place):
    text = script(chain(*names), WAYS)
    assert text.endswith(f"kill -KILL {100 + place}")
    assert not any(str(100 + i) in text for i in range(place + 1, len(names)))


def test_a_process_that_ends_by_itself_is_let_be():
    """The shell looks whether it is there before each blow, and while it is patient."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    text = script([Process(child.pid, "prterun", 1, 1)], [], patience=1000.0)
    run(text)


def test_a_shell_is_patient_with_a_launcher_only_while_that_is_there():
    """It ends within a moment of the launcher, and has not struck it."""
    code = "import signal; signal.signal(15, lambda *_: print('struck', flush=True)); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        text = script([of(child, "prterun")], [], patience=1000.0)
        with subprocess.Popen(["/bin/sh", "-c", text]) as shell:
            child.communicate(
                b"\n", timeout=20
            )  # and no more than a zombie until it is waited for
            assert shell.wait(20) == 0
    assert child.returncode == 0


def test_a_process_that_does_not_end_is_ended(monkeypatch):
    """What stands in for a launcher here does not listen to SIGTERM."""
    code = "import signal, sys; signal.signal(15, 1); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"up\n"
        chained = [of(child, "prterun")]
        monkeypatch.setattr(undertaker, "launcher_chain", lambda pid: chained)
        assert not undertaker.bury(0.5)
        assert child.wait(20) == -9


def test_another_process_of_the_same_number_is_let_be():
    with waiting() as child:
        run(script([of(child, "prterun", later=1)], []))
        assert child.poll() is None


def test_ways_are_killed_and_a_process_that_has_got_the_number_of_one_is_let_be():
    with waiting() as launcher, waiting() as way, waiting() as other:
        chained = [Process(1, "hydra_pmi_proxy", launcher.pid, 1), of(launcher, "mpiexec")]
        text = script(chained, [of(way, "ssh"), of(other, "ssh", later=1)])
        run(text.partition("sleep 3;")[0])
        assert way.wait(20) == -9
        assert other.poll() is launcher.poll() is None


def test_only_the_ways_to_proxies_are_ended_of_what_a_launcher_has_started(monkeypatch):
    """A script that has become mpiexec may have begun something of its user's before."""
    proxy = [sys.executable, "-c", "input()", "hydra_pmi_proxy", "--control-port", "a:1"]
    with waiting() as other, waiting(proxy) as way, waiting(proxy) as above:
        chained = [of(above, "hydra_pmi_proxy"), look_up(os.getpid())]
        assert [process.pid for process in undertaker._ways(chained)] == [way.pid]
        assert other.poll() is None


def test_a_descriptor_that_is_no_process_managers_is_not_written_to(tmp_path):
    """The variable may come from a job around this one, and the file be the user's."""
    file = tmp_path / "data"
    code = (
        "import os, sys; from mpiml.undertaker import resign; "
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); "
        "os.environ['PMI_FD'] = str(fd); resign(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, file], timeout=60).returncode == 7
    assert file.read_bytes() == b""


def test_a_process_manager_that_is_there_hears_of_the_end_and_one_that_is_gone_delays_none():
    code = "from mpiml.undertaker import resign; resign(7)"
    for there in (True, False):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            environ = os.environ | {"PMI_FD": str(theirs.fileno())}
            command = [
                sys.executable,
                "-c",
                code.replace("resign(7)", SLEEPLESS * (not there) + "resign(7)"),
            ]
            if not there:
                mine.close()
            ended = subprocess.run(command, env=environ, pass_fds=[theirs.fileno()], timeout=60)
            assert ended.returncode == 7
            assert not there or mine.recv(100) == b"cmd=abort exitcode=7\n"


def of(child, name, later=0):
    """A process as the undertaker sees it, or one that had its number before."""
    return look_up(child.pid)._replace(name=name, start=look_up(child.pid).start + later)


def run(text):
    subprocess.run(["/bin/sh", "-c", text.replace("sleep 1;", "")], check=False, timeout=20)


@contextmanager
def waiting(command=(sys.executable, "-c", "input()")):
    """A process that ends only once it is told, or killed."""
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        yield child
        child.kill()
