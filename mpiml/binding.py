"""What the cores of ranks tell of how they were bound, as notes with the cure. Pure.

Open MPI binds one or two ranks to one core each, and more to a whole socket; Slurm gives a task
one core unless asked for more. A rank has more threads than one: those of NumPy, of PyTorch, and
mpiml's own. Nobody sees the loss, since all goes on, at a fraction of the speed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mpiml.hosts import Facts, cores_available

__all__ = ["binding_notes"]


class _Finding(NamedTuple):
    """What is wrong on a host; equal findings of several hosts are one note."""

    kind: str  # "crowd", "threads" or "narrow"
    ranks: int
    cores: int  # in the mask of a rank
    around: int  # of the launcher, on this host
    threads: int


def binding_notes(
    facts: Sequence[Facts], launcher: str | None = None, ours: bool = False, whole: bool = True
) -> list[str]:
    """Return a line for each kind of host on which ranks are bound too tightly. Local.

    Parameters
    ----------
    facts
        Of each rank.
    launcher
        As `Config.launcher` has it: whose options are named.
    ours
        ``OMP_NUM_THREADS`` was set by mpiml, not by the user. Who set it knows how many threads
        a rank has, and is not told that it could have more.
    whole
        These are all ranks of the launcher, so that what they leave idle is idle.
    """
    hosts: dict[tuple[str, int], list[Facts]] = {}
    for fact in facts:
        hosts.setdefault((fact.name, fact.machine), []).append(fact)
    kinds: dict[_Finding, list[str]] = {}
    for (name, _), here in hosts.items():
        found = _look(here, ours, whole)
        if found is not None:
            kinds.setdefault(found, []).append(name)
    return [_say(found, names, launcher) for found, names in kinds.items()]


def _look(here: Sequence[Facts], ours: bool, whole: bool) -> _Finding | None:
    """Return the worst thing about one host's ranks."""
    around = max(fact.around for fact in here)
    smallest = min(len(fact.cores) for fact in here)
    masks = [fact.cores for fact in here if len(fact.cores) == 1]
    crowd = max((masks.count(mask) for mask in set(masks)), default=0)
    if crowd > 1 and around > 1:
        return _Finding("crowd", crowd, 1, around, 0)
    over = [fact for fact in here if fact.threads > len(fact.cores)]
    if over and not ours:
        worst = max(over, key=lambda fact: fact.threads / max(1, len(fact.cores)))
        return _Finding("threads", len(here), len(worst.cores), around, worst.threads)
    chosen = not ours and any(fact.threads for fact in here)
    if smallest > 1 or chosen or not whole or any(fact.given for fact in here):
        return None
    quota = min((fact.quota for fact in here if fact.quota), default=None)
    share = cores_available(around, quota) // len(here)
    return _Finding("narrow", len(here), 1, around, share) if share > 1 else None


def _say(found: _Finding, names: Sequence[str], launcher: str | None) -> str:
    where = f"host {names[0]}" if len(names) == 1 else f"{len(names)} hosts ({names[0]}, ...)"
    room = f", of {found.around} that the launcher has there" if found.around > 1 else ""
    if found.kind == "crowd":
        return (
            f"{where}: {found.ranks} ranks are bound to the same core{room}, and take turns on "
            f"it. {_cure(launcher, 1)}."
        )
    cores = "1 core" if found.cores == 1 else f"{found.cores} cores"
    if found.kind == "threads":
        return (
            f"{where}: OMP_NUM_THREADS={found.threads}, but a rank may use {cores}{room}: its "
            f"threads take turns. {_cure(launcher, found.threads)}; or set "
            f"OMP_NUM_THREADS={found.cores}."
        )
    each = "the rank is bound to 1 core" if found.ranks == 1 else "each rank is bound to 1 core"
    return (
        f"{where}: {each}{room}, so its NumPy and its threads have that one only. "
        f"{_cure(launcher, found.threads)}; or set OMP_NUM_THREADS=1 to say that one is enough."
    )


def _cure(launcher: str | None, cores: int) -> str:
    if launcher == "openmpi":
        text = "Start with `mpirun --bind-to none`"
        return text if cores == 1 else f"{text}, or `--map-by slot:PE={cores}`"
    if launcher == "mpich":
        text = "Start with `mpiexec -bind-to none`"
        return text if cores == 1 else f"{text}, or `-bind-to core:{cores}`"
    if launcher == "slurm":
        text = "Start with `srun --cpu-bind=none`"
        return text if cores == 1 else f"Start with `srun --cpus-per-task={cores}`"
    return "Start without binding (taskset, numactl)"
