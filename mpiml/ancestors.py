"""The processes above a rank, and which of them are its launcher."""

import os
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["LAUNCHERS", "Process", "launcher_chain", "look_up", "orphaned"]

#: Names of processes that start ranks. The kernel keeps 15 characters of a name.
LAUNCHERS = frozenset(
    name[:15]
    for name in (
        "mpirun", "mpiexec", "orterun", "prterun", "prte", "prted", "orted",
        "mpiexec.hydra", "mpirun.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy", "pmi_proxy",
        "mpiexec.openmpi", "mpirun.openmpi", "mpiexec.mpich", "mpirun.mpich",
        "srun", "slurmstepd", "flux-shell", "palsd", "jsmd",
    )
)  # fmt: skip

_BORN_UNDER = os.getppid()  # before MPI starts, and all that takes long
_OUTERMOST = 0xEFFFFFFC  # what Linux numbers the process ids of the machine itself by

_DEPTH = 6  # ancestors looked at: launcher, its daemon or proxy, wrappers between


class Process(NamedTuple):
    """A process as ``/proc`` shows it; `start` tells it from a later one of the same number."""

    pid: int
    name: str
    parent: int
    start: int


def look_up(pid: int) -> Process | None:
    """Return a process, or None if there is none of that number (any more).

    Local: no MPI.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            head, _, tail = file.read().rpartition(b")")
    except OSError:
        return None
    fields = tail.split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    name = head.partition(b"(")[2].decode(errors="replace")
    return Process(pid, name, int(fields[1]), int(fields[19]))


def orphaned(parent: int) -> bool:
    """Tell whether whoever started this process is gone, by its `parent` now.

    Local: no MPI. Orphans go to process 1. In a container with process ids of its own that
    may also be what runs the rank; there a parent counts that was another one before.
    """
    return parent == 1 and (_BORN_UNDER != 1 or not _own_numbers())


def _own_numbers() -> bool:
    """Tell whether process ids are those of a container, not of the machine."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino != _OUTERMOST
    except OSError:
        return True


def launcher_chain(pid: int, look: Callable[[int], Process | None] = look_up) -> list[Process]:
    """Return process `pid` and those above it, up to the topmost launcher among them.

    Local: no MPI. Wrappers between launcher and rank are part of it. Empty without a launcher.

    Parameters
    ----------
    pid
        The parent of the rank.
    look
        Returns what there is about a process.
    """
    chain: list[Process] = []
    length = 0
    while pid > 0 and len(chain) < _DEPTH:
        process = look(pid)
        if process is None:
            break
        chain.append(process)
        if process.name in LAUNCHERS:
            length = len(chain)
        pid = process.parent
    return chain[:length]
