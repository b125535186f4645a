"""Starting ``mpiexec`` for ``mpiml run -n N``, and standing in for it towards the user.

Open MPI's mpirun answers SIGTERM and SIGINT by killing the ranks within half a second, so
``mpiexec`` gets a session of its own, where no key of the terminal reaches it, and this
process turns the signals that ask for an end into SIGUSR1, which every launcher hands on:

=========================================  ================================================
SIGTERM, SIGHUP, SIGUSR1, SIGUSR2          the program stops in order; status 143, or 75
SIGINT                                     the same; status 130
a second SIGINT                            everything is killed at once; status 130
SIGQUIT                                    sent to one rank of this host, which prints who
                                           waits for whom; the program goes on
=========================================  ================================================

Ranks of other hosts end with their own daemon, and every rank watches this process, whose
number is in ``MPIML_LAUNCHER_PID``. Whatever a rank has started and left behind on this host
is killed when this process ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from mpiml import early
from mpiml.cmdline import Options, rank_argv
from mpiml.loading import check_file
from mpiml.mpiexec import Launcher, find_mpiexec, in_container, launch_environ

__all__ = ["Supervisor", "command", "exit_status", "members", "prepare", "start", "sweep"]

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPPED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
#: mpiexec's statuses for ranks that the SIGUSR1 ended: in order, or before they could handle
#: it (Open MPI adds 128 to the number of the signal, MPICH does not).
ENDED = {STOPPED, 128 + signal.SIGUSR1, int(signal.SIGUSR1)}
RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")


def command(launcher: Launcher, options: Options, python: str = sys.executable) -> list[str]:
    """Return the command line that starts the ranks: the same Python, file and options.

    Local: no MPI.
    """
    assert options.n is not None
    ranks = [python, "-m", "mpiml.run", *rank_argv(options)]
    # Open MPI would hold rank 0's stdin open after the end of our /dev/null: reading it hangs.
    stdin = ["--stdin", "none"] if launcher.mpi.kind == "openmpi" else []
    return [str(launcher.path), *stdin, "-n", str(options.n), *ranks]


def prepare(options: Options) -> tuple[Launcher, dict[str, str], list[str]]:
    """Return the launcher, its environment, and what to tell the user.

    Local: no MPI in this process; starts nothing that stays.

    Raises
    ------
    UsageError
        There is no launcher that fits, or it would refuse to run.
    """
    launcher = find_mpiexec(options.mpi)
    environ, notes = launch_environ(
        launcher.mpi, os.environ, root=os.geteuid() == 0, container=in_container(os.environ)
    )
    environ["MPIML_LAUNCHER_PID"] = str(os.getpid())
    environ["MPIML_LAUNCHER_HOST"] = os.uname().nodename
    return launcher, environ, notes


def start(options: Options) -> int:
    """Start ``mpiexec`` with ``options.n`` ranks, wait for it, and return the exit status.

    Local: this process never loads MPI. Its signal handlers are put back at the end.

    Raises
    ------
    UsageError
        The file does not exist, or there is no launcher that fits.
    """
    assert options.file is not None
    check_file(options.file)  # one message at once, instead of one from N ranks
    launcher, environ, notes = prepare(options)
    for note in notes:
        print(f"mpiml run: {note}", file=sys.stderr, flush=True)
    return Supervisor(command(launcher, options), environ).run()


def exit_status(status: int, asked: signal.Signals | None, killed: bool) -> int:
    """Return the status of ``mpiml run -n``.

    Local: a pure function.

    Parameters
    ----------
    status
        What `subprocess.Popen.wait` says of mpiexec: negative for a signal.
    asked
        The first signal that asked for an end, if any.
    killed
        Whether a second SIGINT killed everything.
    """
    if killed:
        return INTERRUPTED
    if status < 0:
        status = 128 - status
    if asked is None or status not in ENDED:
        return status
    return INTERRUPTED if asked == signal.SIGINT else STOPPED


def members(starter: int, proc: Path = Path("/proc")) -> dict[int, bool]:
    """Find the processes of this host that a starter has started, by what their environment says.

    Local: reads ``/proc``. Open MPI gives ranks a process group of their own and MPICH a
    session of their own, so neither would find them all.

    Returns
    -------
    dict of int to bool
        Process numbers, and whether each is a rank: has a rank variable and a parent without.
    """
    mark = f"MPIML_LAUNCHER_PID={starter}".encode()
    found: dict[int, tuple[int, bool]] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # another user's, or gone
            words = (folder / "environ").read_bytes().split(b"\0")
            if mark in words:
                parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
                found[int(folder.name)] = (
                    parent,
                    any(w.startswith(RANK_VARIABLES) for w in words),
                )
    return {
        pid: ranked and not found.get(parent, (0, False))[1]
        for pid, (parent, ranked) in found.items()
        if pid != starter
    }


def sweep(starter: int) -> None:
    """Kill what is left of what a starter has started on this host. Local: no MPI."""
    for pid in members(starter):
        _kill(pid, signal.SIGKILL)


class Supervisor:
    """One mpiexec and the signals of the process that stands in for it.

    Local: no MPI.

    Parameters
    ----------
    command
        The command line of mpiexec.
    environ
        Its environment; has ``MPIML_LAUNCHER_PID``, by which its processes are found.
    """

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self.command = command
        self.environ = environ
        self.asked: signal.Signals | None = None
        self.killed = False
        self._interrupts = 0
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start, wait, clean up; returns the exit status."""
        before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGQUIT, *ENDING)
            # nohup and background shells have some ignored on purpose
            if number == signal.SIGQUIT or signal.getsignal(number) is not signal.SIG_IGN
        }
        noted = early.take()
        for number in noted:  # nothing has been started yet, so nothing is lost
            self._handle(number, None)
        try:
            if noted and self.asked is not None:
                return exit_status(STOPPED, self.asked, self.killed)
            child = subprocess.Popen(
                self.command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._child = child
            if self.asked is not None:  # asked while it was being started
                self._send(signal.SIGUSR1)
            status = child.wait()
        finally:
            self._sweep()
            early.give_back()
            for number, handler in before.items():
                signal.signal(number, handler)
        return exit_status(status, self.asked, self.killed)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGQUIT:
            ranks = [pid for pid, is_rank in members(os.getpid()).items() if is_rank]
            for pid in sorted(ranks)[:1]:  # it asks the others, so one report is enough
                _kill(pid, signal.SIGQUIT)
            return
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self.killed = True
            self._sweep()
        else:
            self.asked = self.asked or signal.Signals(number)
            self._send(signal.SIGUSR1)

    def _send(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.returncode is None:
            _kill(self._child.pid, number)

    def _sweep(self) -> None:
        """Kill what is left: mpiexec, its daemons, ranks, and what they started."""
        self._send(signal.SIGKILL)
        sweep(os.getpid())


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # gone meanwhile
        os.kill(pid, number)
