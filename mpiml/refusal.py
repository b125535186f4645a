"""A rank that is refused before MPI has started: who says so, and how the others hear of it.

The others, whose launcher may suit them, sit in MPI_Init and wait for this rank for ever. Ranks
cannot compare yet, so each speaks in its turn: rank 0 at once, then one rank of each host, then
the rest. Who has spoken ends the job, and with it those that would only repeat it.

A step of srun's is ended by a signal to all its ranks: those in MPI_Init die of it, and those that
wait for their turn leave, so the status is that of the refusal where all are refused.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpiml.config import Config
from mpiml.errors import UsageError

__all__ = ["end_job", "lonely", "turn"]

_STEP = 2.0  # s, between turns
_CONNECTS = 0.5  # s, in which other ranks have connected to mpirun
_ARRIVE = 1.0  # s, in which others that are refused wait for their turn
_PATIENCE = 5.0  # s, until mpirun, which should be gone by then, is ended; and for scancel
_SPOKEN = signal.SIGALRM  # nobody else's: it ends what does not know it, and leaves no core


def turn(config: Config) -> float | None:
    """Return after how many seconds this rank says why it is refused; None: others do. Local.

    Where all ranks are in the srun trap they are all alike, so rank 0 is enough; and without a
    way to end srun's step, one of each host.
    """
    rank, local = config.rank_hint or 0, config.local_rank_hint
    if rank == 0:
        return 0.0
    if config.singleton_trap:
        return None
    if local == 0:
        return _STEP
    if config.launcher == "slurm" and config.pmi_fd is None and not _scancel(config):
        return None
    return 2 * _STEP


@contextmanager
def lonely(config: Config) -> Iterator[None]:
    """Give errors of this rank alone its place, and let the end of this process end the job.

    Local: no MPI. `mpiml_turn` of the error says when it is to be shown, `mpiml_rank` by whom.
    """
    try:
        yield
    except UsageError as error:
        if config.singleton_trap:  # all ranks are in it, and none waits
            raise
        rank, wait = config.rank_hint or 0, turn(config)
        here = UsageError(f"{error} Said by rank {rank} on host {os.uname().nodename}.")
        here.mpiml_rank = -1 if wait is None else rank  # type: ignore[attr-defined]
        here.mpiml_turn = wait or 0.0  # type: ignore[attr-defined]
        atexit.register(end_job, 1)
        main = threading.current_thread() is threading.main_thread()
        if main and wait and config.slurm_steps:
            signal.signal(_SPOKEN, lambda *_: os._exit(1))  # before it has had its turn
        raise here from None


def end_job(status: int) -> None:
    """End the job of a rank that leaves before MPI_Init; returns where that ends it anyhow.

    Local. Open MPI's mpirun ends a job when a rank has left with another status than 0; but 5.0
    waits for ever if it ends a rank that is just connecting to it.
    """
    from mpiml.undertaker import bury, resign

    config = Config.read_foreign()
    sys.stdout.flush()
    sys.stderr.flush()
    if config.launcher == "slurm" and _end_step(config):
        return
    if config.pmi_fd is not None:
        resign(status, started=False)
    elif config.launcher == "openmpi" and not config.rank_hint:
        time.sleep(_CONNECTS)
        bury(_PATIENCE)


def _scancel(config: Config) -> str | None:
    import shutil  # only here: every rank starts through this module

    return shutil.which("scancel") if config.slurm_steps else None


def _end_step(config: Config) -> bool:
    """Tell all ranks of srun's step that one has spoken; whether Slurm took it."""
    import subprocess

    command = _scancel(config)
    if command is None or threading.current_thread() is not threading.main_thread():
        return False
    signal.signal(_SPOKEN, signal.SIG_IGN)
    time.sleep(_ARRIVE)
    words = [command, f"--signal={_SPOKEN.name[3:]}", *config.slurm_steps]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
