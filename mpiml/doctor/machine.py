"""What the doctor finds without ranks: packages, memory, cores, container, Slurm, GPU, HDF5."""

import ctypes
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mpiml.config import Config, inner_environ
from mpiml.doctor.check import Check, attempt
from mpiml.doctor.copying import CURE as COPY_CURE
from mpiml.doctor.copying import allow_reading
from mpiml.errors import UsageError
from mpiml.hosts import Facts, cores_available, local_facts
from mpiml.mpiexec import in_container
from mpiml.started import trapped

__all__ = [
    "check_container",
    "check_cores",
    "check_gpu",
    "check_hdf5",
    "check_packages",
    "check_shared_memory",
    "check_single_copy",
    "check_slurm",
    "machine_checks",
]

SHM_WANTED = 256 << 20
SHM_TRIED = 16 << 20
PIP = f"{sys.executable} -m pip install"

HDF5 = """
import json, sys, h5py, numpy
with h5py.File(sys.argv[1], "w") as file:
    file["x"] = numpy.arange(1000.0)
with h5py.File(sys.argv[1], "r") as file:
    assert file["x"][-1] == 999
print(json.dumps([h5py.__version__, h5py.version.hdf5_version, bool(h5py.get_config().mpi)]))
"""
COPY = """
import json, sys
from mpiml.doctor.copying import read_of
print(json.dumps([read_of(int(sys.argv[1]), int(sys.argv[2]), b"mpiml")]))
"""
GPU = """
import json, cupy
x = cupy.arange(1000.0)
assert float(x.sum()) == 499500
print(json.dumps([cupy.__version__, cupy.cuda.runtime.getDeviceCount()]))
"""


def machine_checks(timeout: float) -> list[Check]:
    """Run every check that needs no ranks.

    Local: no MPI in this process.

    Parameters
    ----------
    timeout
        Seconds that each child process may take.
    """
    try:
        config = Config.read()
        mine = []
    except UsageError as error:
        config = Config()
        mine = [Check("settings", "fail", str(error), "Correct or unset the variable.")]
    return [
        *mine,
        *check_packages(timeout),
        check_shared_memory(Path("/dev/shm")),
        check_cores(local_facts(config), os.environ, os.cpu_count() or 1),
        check_container(os.geteuid() == 0, in_container(os.environ)),
        check_single_copy(timeout),
        check_slurm(config, timeout),
        check_gpu(Path("/dev"), timeout),
        *check_hdf5(timeout),
    ]


def _python(code: str, timeout: float, *args: str) -> tuple[list[object] | None, str]:
    """Return the list that a child Python prints as JSON, or None and why not."""
    outcome = attempt([sys.executable, "-c", code, *args], timeout, inner_environ())
    if outcome.status == 0:
        found = json.loads(outcome.stdout.splitlines()[-1])
        assert isinstance(found, list)
        return found, ""
    return None, outcome.why()


def check_packages(timeout: float) -> list[Check]:
    """Import what mpiml needs, each in a child process."""
    checks = []
    for name, cure in [
        ("numpy", f"`{PIP} numpy`"),
        ("mpi4py", f"`{PIP} mpi4py`"),
        ("mpiml._native", "Install mpiml with a C++ compiler at hand: `pip install -e .`"),
    ]:
        code = (
            f"import json, {name}\nprint(json.dumps([getattr({name}, '__version__', 'there')]))"
        )
        found, why = _python(code, timeout)
        if found is None:
            checks.append(Check(name, "fail", why, cure))
        else:
            checks.append(Check(name, "ok", str(found[0])))
    return checks


def check_shared_memory(folder: Path) -> Check:
    """Look at the size of the memory that ranks of a host can share, and take some of it."""
    name = "shared memory"
    cure = (
        "Start the container with --shm-size=2g (Kubernetes: an emptyDir of medium Memory on "
        "/dev/shm), or remount: `mount -o remount,size=50% /dev/shm`."
    )
    try:
        free = os.statvfs(folder)
        size, left = free.f_blocks * free.f_frsize, free.f_bavail * free.f_frsize
        with tempfile.TemporaryFile(dir=folder, prefix="mpiml-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, min(SHM_TRIED, max(size, 1)))
    except OSError as error:
        return Check(name, "warn", f"{folder}: {error.strerror}", cure)
    found = f"{folder}: {left >> 20} MiB free of {size >> 20}"
    if left < SHM_WANTED:
        return Check(name, "warn", f"{found}; arrays beyond that would crash ranks", cure)
    return Check(name, "ok", found)


def check_cores(facts: Facts, environ: Mapping[str, str], machine: int) -> Check:
    """Compare the cores that may be used with those of the machine and with the threads set."""
    cores = cores_available(len(facts.cores), facts.quota, facts.given)
    limits = [f"affinity mask {len(facts.cores)}", f"machine {machine}"]
    if facts.quota:
        limits.insert(1, f"control group {facts.quota:g}")
    if facts.given:
        limits.insert(1, f"launcher {facts.given}")
    found = f"{cores} for this process ({', '.join(limits)})"
    threads = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads.isdigit() and int(threads) > cores:
        return Check(
            "cores",
            "warn",
            f"{found}, but OMP_NUM_THREADS={threads}",
            "Unset OMP_NUM_THREADS (mpiml sets it to the cores of a rank), or give ranks more cores.",
        )
    return Check("cores", "ok", found)


def check_container(root: bool, container: bool) -> Check:
    """Say whether Open MPI would refuse the user."""
    allow = "OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    if root and container:
        return Check(
            "user", "ok", f"root in a container; `mpiml run -n` sets {allow} for Open MPI"
        )
    if root:
        return Check(
            "user",
            "warn",
            "root, and not in a container: Open MPI does not start",
            f"Run as an ordinary user, or set {allow}.",
        )
    return Check("user", "ok", "in a container" if container else "an ordinary one")


def check_single_copy(timeout: float) -> Check:
    """Let a child read this process's memory, as ranks of a host do for long messages."""
    word = ctypes.create_string_buffer(b"mpiml", 5)
    allow_reading()
    found, why = _python(COPY, timeout, str(os.getpid()), str(ctypes.addressof(word)))
    why = why if found is None else str(found[0])
    if why:
        return Check("single copy", "warn", why, COPY_CURE)
    return Check("single copy", "ok", "a process of the user can read another's memory")


def check_slurm(config: Config, timeout: float) -> Check:
    """Look for Slurm, for the ways in which its srun starts MPI, and for the singleton trap."""
    if config.singleton_trap:
        found, _, cure = trapped(config.slurm_step_tasks).partition(" Use ")
        return Check("slurm", "fail", found, f"Use {cure}")
    if shutil.which("srun") is None:
        return Check("slurm", "note", "no srun on PATH")
    outcome = attempt(["srun", "--mpi=list"], timeout, inner_environ())
    kinds = [word.strip(",") for word in (outcome.stdout + outcome.stderr).split()]
    useful = sorted({kind for kind in kinds if kind.startswith(("pmi", "cray_shasta"))})
    if outcome.status != 0 or not useful:
        return Check(
            "slurm",
            "warn",
            f"srun offers no PMI ({outcome.why()})",
            "Start ranks with mpirun inside sbatch, not with srun.",
        )
    return Check(
        "slurm", "ok", f"srun starts MPI by {', '.join(useful)}: srun --mpi={useful[0]}"
    )


def check_gpu(devices: Path, timeout: float) -> Check:
    """Count the GPU device files and add a thousand numbers on one by CuPy.

    Local: no MPI. Where there is no device file nothing is tried. State "ok" is what tests
    ask for that need a device.
    """
    cards = sorted(p.name for p in devices.glob("nvidia[0-9]*") if p.name[6:].isdigit())
    cards += sorted(p.name for p in devices.glob("dxg"))  # the Windows Subsystem for Linux
    if not cards:
        return Check("gpu", "note", "no NVIDIA device")
    found, why = _python(GPU, timeout)
    if found is None:
        return Check(
            "gpu",
            "warn",
            f"{len(cards)} devices, but CuPy does not compute on them: {why}",
            f"`{PIP} cupy-cuda12x` for the driver's CUDA version (`nvidia-smi` shows it).",
        )
    return Check("gpu", "ok", f"{found[1]} of {len(cards)} devices by CuPy {found[0]}")


def check_hdf5(timeout: float) -> list[Check]:
    """Write and read a file; say whether HDF5 can write from several ranks at once."""
    with tempfile.TemporaryDirectory() as folder:
        found, why = _python(HDF5, timeout, f"{folder}/doctor.h5")
    if found is None and "No module named" in why:
        return [
            Check("hdf5", "note", "h5py is not installed", f"`{PIP} h5py` for checkpoints.")
        ]
    if found is None:
        cure = "If it is about locks: HDF5_USE_FILE_LOCKING=BEST_EFFORT (or FALSE)."
        return [Check("hdf5", "warn", why, cure)]
    version = f"h5py {found[0]}, HDF5 {found[1]}"
    if not found[2]:
        cure = "Needed only for driver='mpio': build h5py with HDF5_MPI=ON against an MPI HDF5."
        serial = Check("hdf5 parallel", "note", "no: one rank writes a file", cure)
        return [Check("hdf5", "ok", version), serial]
    return [Check("hdf5", "ok", version), Check("hdf5 parallel", "ok", "built with MPI")]
