"""Ending a launcher that waits for a host it has lost.

After `MPI_Abort` a launcher waits until the daemons of all hosts say that their ranks are gone.
One that is cut off says nothing, and mpirun or mpiexec would wait for as long as TCP does. So a
rank that ends a program over several hosts leaves a shell behind, which ends the launcher too,
unless that ends by itself in time, as it does where all hosts are there:

==================  ==============================================================================
Open MPI's mpirun   gives up at the third SIGTERM within a few seconds; status 1
MPICH's mpiexec     ends once what it has started is gone, with the status of the rank that ended
a daemon            what a rank on another host has above it: is killed, with all that it started
==================  ==============================================================================

A batch system's (srun, slurmstepd) is left alone, and with it an mpirun that has started its
daemons by it and stands above them: the system knows which nodes are down.
"""

import os
import select
import stat
import time
from collections.abc import Sequence
from contextlib import suppress

from mpiml.ancestors import LAUNCHERS, Process, launcher_chain, look_up
from mpiml.config import Config

__all__ = ["bury", "resign", "script"]

_HYDRA = ("hydra_pmi_proxy", "pmi_proxy", "hydra_bstrap_pr")
_OPEN_MPI = (
    "mpirun",
    "orterun",
    "prterun",
    "prte",
    "mpirun.openmpi",
    "mpiexec.openmpi",
    "mpiexec",
)
_BATCH = ("srun", "slurmstepd", "flux-shell", "palsd", "jsmd")
_DAEMONS = ("prted", "orted", *_HYDRA)
#: Whether a process is there: by its start too, as its number alone may have gone to another one.
_IS = (
    "is() { read -r line </proc/$1/stat || return 1; rest=${line##*\\) }; set -- $2 $rest; "
    '[ "$2" != Z ] && [ "${21}" = "$1" ]; }; '
)


def _of_job(chain: Sequence[Process]) -> Sequence[Process]:
    """Return the chain up to the launcher that started these very ranks: the lowest, no daemon.

    What stands above it may be the launcher of another program, in which this one was started.
    """
    for i, process in enumerate(chain):
        if process.name in LAUNCHERS and process.name not in _DAEMONS:
            return chain[: i + 1]
    return chain


def script(chain: Sequence[Process], started: Sequence[Process], patience: float = 0.0) -> str:
    """Return what a shell does to end a launcher; empty where it is to be left alone.

    Local: a pure function.

    Parameters
    ----------
    chain
        From the rank's parent up, as far as a launcher is among them.
    started
        Further processes that this one has started: the ways to other hosts.
    patience
        Seconds that the launcher gets to end by itself.
    """
    chain = _of_job(chain)
    if not chain or chain[-1].name in _BATCH:
        return ""
    top = chain[-1]
    alive = f"is {top.pid} {top.start} || exit 0; "
    last = f"{alive}kill -KILL {top.pid}"
    waits = f"for i in {'. ' * round(2 * patience)}; do {alive}sleep 0.5; done; "
    begin = _IS + (waits if patience else "")
    if top.name in _DAEMONS:
        return f"{begin}sleep 2; {last}"
    if any(process.name in _HYDRA for process in chain):
        ways = " ".join(f"{process.pid}:{process.start}" for process in started)
        cut = f"for w in {ways}; do is ${{w%:*}} ${{w#*:}} && kill -KILL ${{w%:*}}; done"
        blow = cut if ways else f"kill -KILL {top.pid}"
        return f"{begin}sleep 0.5; {alive}{blow}; sleep 3; {last}"
    if top.name in _OPEN_MPI:
        blow = f"{alive}kill -TERM {top.pid}; sleep 0.5"
        return f"{begin}sleep 1; for i in 1 2 3 4 5; do {blow}; done; {last}"
    return ""


def bury(patience: float = 0.0) -> bool:
    """Let the launcher end soon, whatever it waits for; whether it is MPICH's.

    Local: starts a shell in a session of its own. It ends once the launcher has ended, and within
    5 s after `patience`, in seconds, which that gets to end by itself.
    """
    import subprocess  # only here: it is slow to import, and every rank starts through here

    chain = _of_job(launcher_chain(os.getppid()))
    text = script(chain, _ways(chain) if chain else (), patience)
    if not text:
        return False
    environ = {
        "PATH": os.environ.get("PATH", os.defpath)
    }  # not found by what sweeps ranks away
    try:
        subprocess.run(  # the shell leaves another one behind
            ["/bin/sh", "-c", f"({text}) &"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
            check=False,
        )
    except OSError:
        return False
    return any(process.name in _HYDRA for process in chain)


def resign(status: int, started: bool = True) -> None:
    """Leave MPICH's job with `status` and end it, as `MPI_Abort` would; never returns.

    Local. `MPI_Abort` itself would wait here for a host that is cut off, holding Python's lock.

    Parameters
    ----------
    status
        Of this process, and of the launcher.
    started
        MPI has been initialised, so the process manager knows this rank; Slurm's wants to be
        told first which PMI is spoken.
    """
    fd = Config.read_foreign().pmi_fd
    if fd is not None:
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # of a job around this one
                os._exit(status)
            if not started:
                os.write(fd, b"cmd=init pmi_version=1 pmi_subversion=1\n")
                answer = select.poll()
                answer.register(fd, select.POLLIN)
                answer.poll(1000)  # Slurm drops what comes before its answer
            os.write(fd, f"cmd=abort exitcode={status}\n".encode())
            time.sleep(1.0)  # else the manager takes the end of this rank for the news
    os._exit(status)


def _ways(chain: Sequence[Process]) -> list[Process]:
    """Return the ways to other hosts' proxies that the launcher has started, without those above us.

    A script that has become the launcher may have started others.
    """
    known = {process.pid for process in chain}
    found = [look_up(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    top = chain[-1].pid
    return [
        p
        for p in found
        if p is not None and p.parent == top and p.pid not in known and _leads_to_proxy(p.pid)
    ]


def _leads_to_proxy(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"_proxy" in file.read()
    except OSError:  # it has ended
        return False
