"""What the environment says: the only reader of launcher and ``MPIML_*`` variables.

A foreign variable that is malformed counts as unset, since it is not ours to judge; an
``MPIML_*`` one that is unknown or malformed is a `UsageError`, since a typing error would
otherwise be a setting silently ignored.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpiml.errors import UsageError

__all__ = ["BUILD_VARIABLES", "VARIABLES", "Config", "inner_environ"]

BUILD_VARIABLES = frozenset({"MPIML_CUDA", "MPIML_NATIVE_ARCH", "MPIML_SANITIZE"})
"""Read by CMake when mpiml is built: known, and without meaning at run time.

So are those that begin with ``MPIML_TEST_``, which steer mpiml's own test scripts.
"""

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers its batch, extern and interactive steps from the top of 32 bits down."""

_BINDING = {"GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
_SWITCH = {"1": True, "on": True, "true": True, "yes": True}
_SWITCH |= {"0": False, "off": False, "false": False, "no": False}
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _number(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < low:
            raise ValueError(f"a whole number of at least {low}")
        return value

    return read


def _size(text: str) -> int:
    unit = _UNITS.get(text[-1:].lower(), 1)
    value = int(text[:-1] if unit > 1 else text) * unit
    if value < 1:
        raise ValueError("at least 1 byte")
    return value


def _switch(text: str) -> bool:
    return _SWITCH[text.lower()]


def _one_of(*words: str) -> Callable[[str], str]:
    return lambda text: words[words.index(text.lower())]


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


VARIABLES: dict[str, tuple[str, Callable[[str], object], str]] = {
    "MPIML_ALLREDUCE": (
        "allreduce",
        _one_of("auto", "memory", "messages"),
        "memory, messages or auto",
    ),
    "MPIML_BETWEEN": (
        "between",
        _one_of("auto", "leaders", "stripes"),
        "leaders, stripes or auto",
    ),
    "MPIML_BETWEEN_CHUNK": ("between_chunk", _size, "a number of bytes such as 1048576 or 1M"),
    "MPIML_CHECK": ("check", _switch, "on or off"),
    "MPIML_DOORBELL": ("doorbell", _switch, "on or off"),
    "MPIML_GPU_DIRECT": ("gpu_direct", _one_of("auto", "on", "off"), "on, off or auto"),
    "MPIML_HOST_SIZE": ("host_size", _number(1), "a whole number of at least 1"),
    "MPIML_LAUNCHER_HOST": ("launcher_host", _text, "a host name"),
    "MPIML_LAUNCHER_PID": ("launcher_pid", _number(1), "a process id"),
    "MPIML_ONESIDED": (
        "onesided",
        _one_of("auto", "windows", "messages"),
        "windows, messages or auto",
    ),
    "MPIML_STALL_WARNING": (
        "stall_warning",
        _number(1),
        "a whole number of seconds, 1 or more",
    ),
    "MPIML_SPIN_US": ("spin_us", _number(0), "a whole number of microseconds, 0 or more"),
    "MPIML_WINDOW_BYTES": ("window_bytes", _size, "a number of bytes such as 16777216 or 16M"),
    "MPIML_WINDOW_MESSAGES": ("window_messages", _number(1), "a whole number of at least 1"),
}
"""Every ``MPIML_*`` variable: the field of `Config` it sets, its reader, what it may be."""


class Config(NamedTuple):
    """The environment of this process, read once and frozen.

    Attributes
    ----------
    launcher
        Who started this rank: ``"openmpi"``, ``"mpich"``, ``"slurm"`` (srun with a PMI), or
        None. Its hints are None without it, and where it does not say; MPI has the last word.
    slurm_step_tasks
        Tasks of the job step this process runs in; None outside a step.
    slurm_steps
        What ``scancel`` calls the step that srun started, once for each part of a heterogeneous
        job; empty where that is not known, or a shell of its user's is in it.
    slurm_host, pmix_host
        What Slurm and the PMIx that starts ranks call this host, where they say so.
    singleton_trap
        srun started several tasks without a PMI: each would be "rank 0 of 1".
    pmi, pmix
        Whether the launcher's variables are those of PMI-1 or PMI-2, and those of PMIx.
    cpus_per_task
        Cores that Slurm gave each task, where the user asked for a number.
    cpus_on_node
        Cores of this host that are the job's, where Slurm says so.
    gpus_private
        Slurm shows each task only its own GPUs, so equal device numbers of two ranks of a
        host are different devices.
    cuda_visible_devices, omp_set, omp_threads
        ``CUDA_VISIBLE_DEVICES`` as it stands; whether ``OMP_NUM_THREADS`` is set, and the first
        number in it.
    omp_bind
        The user asks OpenMP to bind its threads.
    mpich_netmod
        How MPICH is told to send between hosts, if it is.
    pmi_fd
        The file descriptor of MPICH's process manager.
    launcher_pid, launcher_host
        The process that mpiml's own starter says to watch, and the host where it runs.
    spin_us, window_messages, window_bytes, doorbell
        Tunables of the engine, each overridden by the variable of its name in `VARIABLES`.
    stall_warning
        Seconds after which a collective outside of a program names the ranks it waits for.
    host_size
        For tests: pretend that a host has so many ranks.
    allreduce
        How arrays outside of a bucket are reduced within a host: ``"memory"``,
        ``"messages"`` or ``"auto"``, by rule.
    check
        Whether members of a collective compare what they are about to do.
    between, between_chunk
        Who sends in collectives between hosts: ``"leaders"``, ``"stripes"`` or ``"auto"``, by
        rule; the bytes of a chunk, None: by rule.
    onesided
        How the memory of another host is read: by ``"windows"`` of MPI, by ``"messages"``, or
        ``"auto"``, by trying.
    gpu_direct
        Whether MPI may be given device memory: ``"on"``, ``"off"``, or ``"auto"``, by trying.
    """

    rank_hint: int | None = None
    size_hint: int | None = None
    local_rank_hint: int | None = None
    local_size_hint: int | None = None
    launcher: str | None = None
    slurm_step_tasks: int | None = None
    slurm_steps: tuple[str, ...] = ()
    slurm_host: str | None = None
    pmix_host: str | None = None
    singleton_trap: bool = False
    pmi: bool = False
    pmix: bool = False
    cpus_per_task: int | None = None
    cpus_on_node: int | None = None
    gpus_private: bool = False
    cuda_visible_devices: str | None = None
    omp_set: bool = False
    omp_threads: int | None = None
    omp_bind: bool = False
    mpich_netmod: str | None = None
    pmi_fd: int | None = None
    launcher_pid: int | None = None
    launcher_host: str | None = None
    spin_us: int = 50
    window_messages: int = 128
    window_bytes: int = 16 << 20
    doorbell: bool = True
    stall_warning: int = 60
    host_size: int | None = None
    gpu_direct: str = "auto"
    allreduce: str = "auto"
    check: bool = True
    between: str = "auto"
    between_chunk: int | None = None
    onesided: str = "auto"

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> "Config":
        """Read the environment.

        Local: no MPI.

        Parameters
        ----------
        environ
            The variables; those of this process by default.

        Raises
        ------
        UsageError
            An ``MPIML_*`` variable is unknown or its value is not one; names it.
        """
        environ = os.environ if environ is None else environ
        base = cls(
            cpus_per_task=_whole(environ, "SLURM_CPUS_PER_TASK"),
            cpus_on_node=_whole(environ, "SLURM_CPUS_ON_NODE"),
            cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
            omp_set="OMP_NUM_THREADS" in environ,
            mpich_netmod=environ.get("MPIR_CVAR_CH4_NETMOD"),
            pmi_fd=_whole(environ, "PMI_FD"),
            omp_threads=_first(environ.get("OMP_NUM_THREADS", "")),
            omp_bind=not _BINDING.isdisjoint(environ)
            or environ.get("OMP_PROC_BIND", "false").lower() != "false",
        )
        return base._replace(**_launched(environ), **_own(environ))

    @classmethod
    def read_foreign(cls) -> "Config":
        """Read the environment of this process without its ``MPIML_*`` variables.

        Local: no MPI. One that is wrong is an error for all ranks to hear of, which takes
        this rank's part in the handshake.
        """
        return cls.read({k: v for k, v in os.environ.items() if not k.startswith("MPIML_")})


def inner_environ(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a copy of the environment that is fit to start another MPI job from.

    Local: no MPI. An outer job's rank variables would make the inner ranks believe that they
    belong to it, and the task layout of a Slurm script (``SLURM_NTASKS_PER_NODE`` and the
    like) would bend the inner launcher's srun. What describes the allocation stays.
    """
    environ = os.environ if environ is None else environ
    return {key: value for key, value in environ.items() if not _outer(key)}


def _outer(key: str) -> bool:
    if key.startswith(("OMPI_MCA_", "PMIX_MCA_")):
        return False
    return (
        key.startswith(
            ("OMPI_COMM_WORLD_", "PALS_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_STEP")
        )
        or key.startswith("SLURM_NTASKS")
        or key in ("SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_DISTRIBUTION")
        or key in ("MPIML_LAUNCHER_PID", "MPIML_LAUNCHER_HOST")
    )


def _own(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in environ:
        if not name.startswith("MPIML_") or name.startswith("MPIML_TEST_"):
            continue
        if name in BUILD_VARIABLES:
            continue
        if name not in VARIABLES:
            known = ", ".join(sorted(VARIABLES))
            raise UsageError(
                f"environment: {name} is not a variable of mpiml; those are {known}."
            )
        field, read, wanted = VARIABLES[name]
        try:
            found[field] = read(environ[name].strip())
        except (ValueError, KeyError):
            raise UsageError(
                f"environment: {name}: expected {wanted}, got {environ[name]!r}. "
                "Set it to such a value, or unset it."
            ) from None
    return found


def _whole(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a whole number, 0 or more."""
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
    return None


def _first(text: str) -> int | None:
    """Read the first number of a list by nesting level, such as ``4,2``."""
    digits = text.partition(",")[0].strip()
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _launched(environ: Mapping[str, str]) -> dict[str, Any]:
    """Tell the launcher and its hints, from the most specific sign to the least."""
    step = _whole(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    in_step = step is not None and step < _FIRST_SPECIAL_STEP
    tasks = _whole(environ, "SLURM_STEP_NUM_TASKS") if in_step else None
    ompi = _whole(environ, "OMPI_COMM_WORLD_RANK")
    # the step of an older Slurm on Cray EX has no other sign of its PMI (cray_shasta)
    pmi = _whole(environ, "PMI_RANK", *(("PALS_RANKID",) if in_step else ()))
    pmix = _whole(environ, "PMIX_RANK")
    facts: dict[str, Any] = {"slurm_step_tasks": tasks, "pmi": pmi is not None}
    facts["pmix"] = pmix is not None or ompi is not None
    # Inside an allocation mpirun starts its daemons by srun, so its ranks inherit a step:
    # what mpirun itself says goes before anything of Slurm's.
    if ompi is not None:
        facts |= {
            "launcher": "openmpi",
            "rank_hint": ompi,
            "size_hint": _whole(environ, "OMPI_COMM_WORLD_SIZE"),
            "local_rank_hint": _whole(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
            "local_size_hint": _whole(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        }
    elif pmi is not None and (not in_step or "MPI_LOCALRANKID" in environ):
        facts |= {
            "launcher": "mpich",
            "rank_hint": pmi,
            "size_hint": _whole(environ, "PMI_SIZE"),
            "local_rank_hint": _whole(environ, "MPI_LOCALRANKID"),
            "local_size_hint": _whole(environ, "MPI_LOCALNRANKS"),
        }
    elif pmi is not None or pmix is not None:
        facts |= _srun(environ, tasks, pmi if pmi is not None else pmix, in_step)
    elif tasks is not None and tasks > 1 and not _terminal(environ):
        facts |= _srun(environ, tasks, _whole(environ, "SLURM_PROCID"), in_step)
        facts["singleton_trap"] = True
    return facts


def _terminal(environ: Mapping[str, str]) -> bool:
    """Tell whether srun runs one shell, for its user: with ``--pty`` only the first task is."""
    return "SLURM_PTY_PORT" in environ and _whole(environ, "SLURM_PROCID") == 0


def _srun(
    environ: Mapping[str, str], tasks: int | None, rank: int | None, in_step: bool
) -> dict[str, Any]:
    if not in_step:  # a PMIx server of something else: only the rank is known
        return {"launcher": "openmpi", "rank_hint": rank}
    bound = environ.get("SLURM_GPU_BIND", "").removeprefix("verbose,")
    return {
        "launcher": "slurm",
        "rank_hint": rank,
        "size_hint": tasks,
        "local_rank_hint": _whole(environ, "SLURM_LOCALID"),
        "local_size_hint": _tasks_here(environ),
        "slurm_steps": _steps(environ),
        "slurm_host": environ.get("SLURMD_NODENAME"),
        "pmix_host": environ.get("PMIX_HOSTNAME"),
        "gpus_private": "SLURM_GPUS_PER_TASK" in environ
        or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        or bound.startswith(("single", "per_task")),
    }


def _steps(environ: Mapping[str, str]) -> tuple[str, ...]:
    parts = [f"_HET_GROUP_{k}" for k in range(_whole(environ, "SLURM_HET_SIZE") or 0)]
    jobs = [_whole(environ, f"SLURM_JOB_ID{part}") for part in parts or ("",)]
    if None in jobs or "SLURM_PTY_PORT" in environ:
        return ()
    nodes = sum(_whole(environ, f"SLURM_JOB_NUM_NODES{part}") or 0 for part in parts)
    if parts and nodes != _whole(environ, "SLURM_STEP_NUM_NODES"):  # of which parts?
        return ()
    step = _whole(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return tuple(f"{job}.{step}" for job in jobs)


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Read this host's entry in Slurm's run-length list, such as ``4(x2),3``."""
    here = _whole(environ, "SLURM_NODEID")
    if here is None:
        return None
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = entry.partition("(x")
        times = times.removesuffix(")") or "1"
        if not (count.isdigit() and times.isdigit()):
            return None
        here -= int(times)
        if here < 0:
            return int(count)
    return None
