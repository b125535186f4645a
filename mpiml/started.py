"""How this process was started, and whether MPI agrees: errors that name the cure. Pure.

A launcher tells a process by variables that it is one rank of several. A library that does
not understand this launcher starts the process as rank 0 of 1 (Open MPI, Intel MPI), or ends it
(MPICH under a PMIx server). Then N copies of the program would run and overwrite each other's
files. `refuse_start` looks before MPI is initialised, `refuse_world` after it.
"""

from mpiml.config import Config
from mpiml.errors import UsageError
from mpiml.vendors import TITLES, family, speaks_pmi, speaks_pmix, title

__all__ = ["alone", "doubt", "launcher_of", "refuse_start", "refuse_world", "trapped"]

_TRAP = (
    "srun started {tasks} tasks without the PMI of their MPI, so each would be rank 0 of 1. "
    "Use `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH, Intel MPI); or, in the batch "
    "script and without srun, `mpirun python -m mpiml.run ...` or `mpiml run -n N ...`."
)
_SRUN = {
    "openmpi": "`srun --mpi=pmix`",
    "mpich": "`srun --mpi=pmi2`",
    "intel": "`srun --mpi=pmi2` with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so",
}


def trapped(tasks: int | None) -> str:
    """Return what is said where srun started several tasks without a PMI. Local."""
    return _TRAP.format(tasks=tasks)


def launcher_of(config: Config) -> str:
    """Return what started this process, in words. Local."""
    return {
        "openmpi": "Open MPI's mpirun",
        "mpich": "a PMI launcher such as MPICH's mpiexec",
        "slurm": "srun",
        None: "no launcher",
    }[config.launcher]


def alone(config: Config, library: str) -> bool:
    """Tell whether this is one process, under a launcher where this MPI would end it. Local.

    A shell by ``srun --pty`` where PMIx is the default: MPICH does not come up in it, and a
    program of one process needs no MPI.
    """
    unknown = config.pmix and not config.pmi and not speaks_pmix(library)
    return unknown and config.size_hint == 1


def refuse_start(config: Config, library: str) -> None:
    """Refuse a launcher under which this MPI library would not come up. Local: no MPI yet.

    Parameters
    ----------
    config
        What the launcher's variables say.
    library
        What ``MPI_Get_library_version`` says.

    Raises
    ------
    UsageError
        srun without a PMI, or a launcher whose PMI the library has not; names the cure.
    """
    if config.singleton_trap:
        raise UsageError(trapped(config.slurm_step_tasks))
    if config.pmix and not config.pmi and not speaks_pmix(library):
        offered = "PMIx"
    elif config.pmi and not config.pmix and not speaks_pmi(library):
        offered = "PMI-1 and PMI-2"
        if (config.size_hint or 1) == 1:  # alone it is, and alone it would be
            return
    else:
        return
    raise UsageError(
        f"{launcher_of(config)} started {_ranks(config)}, but mpi4py loads {title(library)}, "
        f"which it cannot start: it offers {offered}, and this {_kind(library)} has none of it. "
        f"{_cure(config, library)}"
    )


def doubt(config: Config, library: str) -> str:
    """Return what is said, by one rank of a host, where MPI_Init will probably fail; or nothing.

    Local. Open MPI 5 looks for the ranks of its host under the host's name; where it finds
    none, it takes the third rank for an error. Open MPI 4 does not.
    """
    names = config.slurm_host or "", config.pmix_host or ""
    if config.local_rank_hint != 2 or not all(names) or family(library) != "openmpi":
        return ""
    slurm, pmix = (name.lower().partition(".")[0] for name in names)
    if slurm == pmix or title(library).startswith("Open MPI v4"):
        return ""
    return (
        f"Slurm calls this host {names[0]}, and its PMIx calls it {names[1]}. So {title(library)} "
        "may fail in MPI_Init with more than 2 ranks on a host. Whoever runs this Slurm can "
        f"start slurmd with PMIX_HOSTNAME={names[0]} in its environment, or let `hostname` be "
        "the NodeName; else use `mpirun` inside sbatch, without srun."
    )


def refuse_world(config: Config, library: str, size: int) -> None:
    """Refuse a world of one rank where the launcher says there are more. Local.

    Parameters
    ----------
    config, library
        As for `refuse_start`.
    size
        Of COMM_WORLD.

    Raises
    ------
    UsageError
        Each process is alone; names the cure.
    """
    if config.singleton_trap and size == 1:
        raise UsageError(trapped(config.slurm_step_tasks))
    expected = config.size_hint or 1
    if size > 1 or expected == 1:
        return
    raise UsageError(
        f"{launcher_of(config)} started {expected} ranks, but {title(library)}, which mpi4py "
        f"loads, did not find the others: each is rank 0 of 1. {_cure(config, library)}"
    )


def _kind(library: str) -> str:
    return TITLES.get(family(library) or "", "MPI")


def _ranks(config: Config) -> str:
    if config.size_hint is None or config.size_hint < 2:
        return "this process"
    return f"{config.size_hint} ranks"


def _cure(config: Config, library: str) -> str:
    kind = family(library) or ""
    if config.launcher == "slurm":
        return (
            f"Use {_SRUN.get(kind, 'the --mpi= that your MPI wants')} (`srun --mpi=list` shows "
            f"what there is), or {_kind(library)}'s own mpirun inside sbatch, without srun."
        )
    return (
        f"Use the mpirun of {_kind(library)}: `mpiml run -n N ...` finds it, and `python -m mpiml.doctor` "
        "compares the two; or let mpi4py load the launcher's MPI (MPI4PY_LIBMPI, `module load`, "
        "or another environment)."
    )
