"""Ending a launcher that waits for a host it has lost.

After `MPI_Abort` a launcher waits until the daemons of all hosts say that their ranks are gone.
One that is cut off says nothing, and mpirun or mpiexec would wait for as long as TCP does. So a
rank that ends a program over several hosts leaves a shell behind, which ends the launcher too:

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


def _of_job(chain: Sequence[Process]) -> Sequence[Process]:
    """Return the chain up to the launcher that started these very ranks: the lowest, no daemon.

    What stands above it may be the launcher of another program, in which this one was started.
    """
    for i, process in enumerate(chain):
        if process.name in LAUNCHERS and process.name not in _DAEMONS:
            return chain[: i + 1]
    return chain


def script(chain: Sequence[Process], started: Sequence[int]) -> str:
    """Return what a shell does to end a launcher; empty where it is to be left alone.

    Local: a pure function.

    Parameters
    ----------
    chain
        From the rank's parent up, as far as a launcher is among them.
    started
        Further processes that this one has started: the ways to other hosts.
    """
    chain = _of_job(chain)
    if not chain or chain[-1].name in _BATCH:
        return ""
    top = chain[-1]
    # by its start too: the number alone may have gone to another process meanwhile
    start = f"sed 's/.*) //' /proc/{top.pid}/stat 2>/dev/null | cut -d' ' -f20"
    alive = f'[ "$({start})" = {top.start} ] || exit 0; '
    last = f"{alive}kill -KILL {top.pid}"
    if top.name in _DAEMONS:
        return f"sleep 2; {last}"
    if any(process.name in _HYDRA for process in chain):
        ways = " ".join(map(str, started))
        return f"sleep 0.5; {alive}kill -KILL {ways or top.pid}; sleep 3; {last}"
    if top.name in _OPEN_MPI:
        return f"sleep 1; for i in 1 2 3 4 5; do {alive}kill -TERM {top.pid}; sleep 0.5; done; {last}"
    return ""


def bury(patience: float = 0.0) -> bool:
    """Let the launcher end soon, whatever it waits for; whether it is MPICH's.

    Local: starts a shell in a session of its own, which ends within 5 s after `patience`, in
    seconds, which the launcher gets to end by itself.
    """
    import subprocess  # only here: it is slow to import, and every rank starts through here

    chain = _of_job(launcher_chain(os.getppid()))
    text = script(chain, _children(chain) if chain else ())
    if not text:
        return False
    environ = {
        "PATH": os.environ.get("PATH", os.defpath)
    }  # not found by what sweeps ranks away
    try:
        subprocess.run(  # the shell leaves another one behind
            ["/bin/sh", "-c", f"(sleep {patience:g}; {text}) &"],
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
            if not started:
                os.write(fd, b"cmd=init pmi_version=1 pmi_subversion=1\n")
                answer = select.poll()
                answer.register(fd, select.POLLIN)
                answer.poll(1000)  # Slurm drops what comes before its answer
            os.write(fd, f"cmd=abort exitcode={status}\n".encode())
        time.sleep(1.0)  # else the manager takes the end of this rank for the news
    os._exit(status)


def _children(chain: Sequence[Process]) -> list[int]:
    """Return the processes that the launcher has started, without those above us."""
    known = {process.pid for process in chain}
    found = [look_up(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    top = chain[-1].pid
    return [p.pid for p in found if p is not None and p.parent == top and p.pid not in known]
