"""How a launcher is ended that waits for a host it has lost."""

import subprocess
import sys

import pytest

from mpiml import undertaker
from mpiml.ancestors import Process, look_up
from mpiml.undertaker import script


def chain(*names):
    return [Process(100 + i, name, 101 + i, 1) for i, name in enumerate(names)]


def test_mpirun_of_open_mpi_is_asked_until_it_gives_up():
    text = script(chain("prterun"), [7])
    assert "kill -TERM 100" in text
    assert text.endswith("kill -KILL 100")


def test_the_ways_of_mpich_to_other_hosts_go_first():
    text = script(chain("hydra_pmi_proxy", "mpiexec"), [7, 8])
    assert text.index("kill -KILL 7 8") < text.index("kill -KILL 101")
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
    assert script(chain(*names), [7]) == ""


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
    text = script(chain(*names), [7])
    assert text.endswith(f"kill -KILL {100 + place}")
    assert not any(str(100 + i) in text for i in range(place + 1, len(names)))


def test_a_process_that_ends_by_itself_is_let_be():
    """The shell looks whether it is there before each blow."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    text = script([Process(child.pid, "prterun", 1, 1)], [])
    subprocess.run(["/bin/sh", "-c", text.replace("sleep 1;", "")], check=True, timeout=20)


def test_a_process_that_does_not_end_is_ended(monkeypatch):
    """What stands in for a launcher here does not listen to SIGTERM."""
    code = "import signal, sys; signal.signal(15, 1); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"up\n"
        chained = [Process(child.pid, "prterun", 1, look_up(child.pid).start)]
        monkeypatch.setattr(undertaker, "launcher_chain", lambda pid: chained)
        assert not undertaker.bury()
        assert child.wait(20) == -9


def test_another_process_of_the_same_number_is_let_be():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        chained = [Process(child.pid, "prterun", 1, look_up(child.pid).start + 1)]
        text = script(chained, [])
        subprocess.run(["/bin/sh", "-c", text.replace("sleep 1;", "")], check=True, timeout=20)
        assert child.poll() is None
        child.communicate(b"\n", timeout=20)
    assert child.returncode == 0
