"""Standing in for mpiexec: signals, statuses, nothing left behind. mpiexec is a small fake."""

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mpiml.cmdline import Options
from mpiml.errors import UsageError
from mpiml.mpiexec import Launcher
from mpiml.starter import command, exit_status, members, start
from mpiml.vendors import Mpi

# A launcher with one rank in a session of its own, as MPICH's; both say what reaches them.
# argv: what the launcher does on SIGUSR1: a status to end with, or "stay".
FAKE = """
import os, signal, subprocess, sys
if os.environ.get("PMI_RANK") is None:
    env = os.environ | {"PMI_RANK": "0"}
    rank = subprocess.Popen([sys.executable, __file__], env=env, start_new_session=True)
    def usr1(*_):
        print("mpiexec SIGUSR1", flush=True)
        if sys.argv[1] != "stay":
            os._exit(int(sys.argv[1]))
    signal.signal(signal.SIGUSR1, usr1)
    while True:
        signal.pause()
else:
    signal.signal(signal.SIGQUIT, lambda *_: print("rank SIGQUIT", flush=True))
    print("rank", os.getpid(), flush=True)
    while True:
        signal.pause()
"""

STAND_IN = """
import os, sys
from mpiml.starter import Supervisor
env = os.environ | {"MPIML_LAUNCHER_PID": str(os.getpid())}
status = Supervisor([sys.executable, *sys.argv[1:]], env).run()
print("done", flush=True)
sys.exit(status)
"""


@pytest.fixture
def stand_in(tmp_path):
    """Start the supervisor in a child; returns it and a handle on its rank."""
    started, gone = [], []
    (tmp_path / "fake.py").write_text(textwrap.dedent(FAKE))
    root = Path(__file__).resolve().parents[1]

    def begin(on_usr1):
        child = subprocess.Popen(
            [sys.executable, "-c", STAND_IN, str(tmp_path / "fake.py"), on_usr1],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        started.append(child)
        word, pid = child.stdout.readline().split()
        assert word == "rank"
        gone.append(os.pidfd_open(int(pid)))
        return child, gone[-1]

    yield begin
    for handle in gone:
        os.close(handle)
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def ended(child, rank):
    """Wait for the supervisor; its rank must be gone when it is."""
    rest, _ = child.communicate(timeout=60)
    assert not alive(rank, timeout=30)
    return child.returncode, rest.split("\n")[:-1]


def alive(rank, timeout=0):
    """Whether a process runs; a handle on it turns readable when it ends."""
    return not select.select([rank], [], [], timeout)[0]


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 143),
        (signal.SIGUSR1, 143),
        (signal.SIGUSR2, 143),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_becomes_sigusr1_and_a_status(stand_in, number, status):
    child, rank = stand_in("143")
    child.send_signal(number)
    assert ended(child, rank) == (status, ["mpiexec SIGUSR1", "done"])


def test_a_status_of_the_ranks_own_is_kept(stand_in):
    child, rank = stand_in("75")
    child.send_signal(signal.SIGTERM)
    assert ended(child, rank)[0] == 75


def test_a_second_interrupt_kills_everything(stand_in):
    child, rank = stand_in("stay")
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "mpiexec SIGUSR1\n"
    assert alive(rank)
    child.send_signal(signal.SIGINT)
    assert ended(child, rank) == (130, ["done"])


def test_sigquit_reaches_the_ranks_and_ends_nothing(stand_in):
    child, rank = stand_in("143")
    child.send_signal(signal.SIGQUIT)
    assert child.stdout.readline() == "rank SIGQUIT\n"
    assert alive(rank)
    child.send_signal(signal.SIGTERM)
    assert ended(child, rank)[0] == 143


def test_members_tells_ranks_from_what_they_start(tmp_path):
    def process(pid, parent, *words):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "environ").write_bytes(b"\0".join([*words, b""]))
        (folder / "stat").write_bytes(b"%d (a ) b) S %d 1 1" % (pid, parent))

    mine, other = b"MPIML_LAUNCHER_PID=7", b"MPIML_LAUNCHER_PID=70"
    process(7, 1, mine, b"PMI_RANK=0")  # the starter itself, nested in another job
    process(8, 7, mine)
    process(9, 8, mine, b"PMI_RANK=0")
    process(10, 9, mine, b"PMI_RANK=0")
    process(11, 8, other, b"PMI_RANK=1")
    (tmp_path / "12").mkdir()  # gone meanwhile
    (tmp_path / "self").mkdir()
    assert members(7, tmp_path) == {8: False, 9: True, 10: False}


@pytest.mark.parametrize(
    ("status", "asked", "killed", "expected"),
    [
        (0, None, False, 0),
        (1, None, False, 1),
        (-9, None, False, 137),
        (143, signal.SIGTERM, False, 143),
        (143, signal.SIGINT, False, 130),
        (138, signal.SIGINT, False, 130),  # Open MPI: a rank died of it before it could listen
        (10, signal.SIGTERM, False, 143),  # MPICH: the same
        (-10, signal.SIGTERM, False, 143),  # mpiexec itself did
        (0, signal.SIGTERM, False, 0),  # the program had ended by itself
        (75, signal.SIGTERM, False, 75),
        (1, signal.SIGTERM, False, 1),  # a straggler
        (-9, signal.SIGINT, True, 130),
    ],
)
def test_exit_status(status, asked, killed, expected):
    assert exit_status(status, asked, killed) == expected


def test_the_ranks_get_the_same_python_and_options():
    launcher = Launcher(Path("/x/mpiexec"), Mpi("openmpi", (5,)))
    options = Options(n=4, seed=3, file="a.py", build="make", build_args=("--k", "1"))
    assert command(launcher, options, "/x/python") == [
        "/x/mpiexec", "--stdin", "none", "-n", "4", "/x/python", "-m", "mpiml.run", "--seed", "3", "a.py:make",
        "--k", "1",
    ]  # fmt: skip


def test_a_missing_file_is_one_error_before_anything_starts(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        start(Options(n=2, file=tmp_path / "absent.py"))
