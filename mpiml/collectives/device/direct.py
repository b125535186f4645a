"""Whether MPI may be given device memory: decided once for a team, by all members alike.

An MPI that is not made for it reads the address as one of host memory and ends with a
segmentation fault, or worse. So: the switch ``MPIML_GPU_DIRECT=on|off`` if it is set; else the
library is asked on every rank (``MPIX_Query_cuda_support``); and where all say yes, one rank of
each host lets two child processes exchange device arrays. A child that crashes is an answer, and
so is one that cannot be started: then arrays go through host memory.
"""

import ctypes
import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from mpiml.collectives.team import Team
from mpiml.config import Config, inner_environ
from mpiml.errors import UsageError

__all__ = [
    "Direct",
    "agree_direct",
    "ask_library",
    "decide",
    "loaded_libraries",
    "try_exchange",
]

_CUDA: Final = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH
_LIMIT: Final = 90.0  # seconds for the two children


class Direct(NamedTuple):
    """The decision, and what it rests on."""

    allowed: bool
    why: str


def loaded_libraries(maps: Iterable[str] | None = None) -> list[str]:
    """Return the MPI libraries that this process has loaded, by path.

    Local: reads ``/proc/self/maps``.
    """
    if maps is None:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            maps = file.readlines()
    found: dict[str, None] = {}
    for line in maps:
        path = "".join(line.split(maxsplit=5)[5:]).rstrip("\n")
        name = path.rpartition("/")[2]
        if name.startswith(("libmpi.so", "libmpich.so", "libmpi_cray.so")):
            found[path] = None
    return list(found)


def ask_library(
    paths: Iterable[str] | None = None, load: Callable[[str], Any] = ctypes.CDLL
) -> Direct:
    """Ask the loaded MPI whether it takes device memory.

    Local: MPI must have been started, and MPICH may look for devices now.

    Parameters
    ----------
    paths
        Of the libraries; those that are loaded by default.
    load
        Opens one; given by tests.
    """
    for path in loaded_libraries() if paths is None else paths:
        try:
            library = load(path)
        except OSError:
            continue
        name = path.rpartition("/")[2]
        if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI, MPICH, MVAPICH
            if library.MPIX_Query_cuda_support() == 1:
                return Direct(True, f"{name} says that it takes CUDA memory")
            return Direct(False, f"{name} says that it takes no CUDA memory")
        if hasattr(library, "MPIX_GPU_query_support"):
            answer = ctypes.c_int(0)
            status = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer))
            yes = status == 0 and answer.value != 0
            return Direct(yes, f"{name} says that it takes {'' if yes else 'no '}CUDA memory")
    return Direct(False, "the MPI library does not say whether it takes CUDA memory")


@functools.cache
def try_exchange(timeout: float = _LIMIT) -> Direct:
    """Let two child processes exchange device arrays by MPI. Once for this process.

    Local: the children are a job of their own.
    """
    import subprocess

    environ = inner_environ()
    # The package may lie beside the current folder only, as in a checkout.
    here = str(Path(__file__).resolve().parents[2])
    environ["PYTHONPATH"] = ":".join(filter(None, [here, environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "mpiml.doctor.direct", str(timeout * 0.8)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environ,
            start_new_session=True,
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        return Direct(bool(found["allowed"]), str(found["why"]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, KeyError) as error:
        return Direct(False, f"the trial exchange could not be made ({type(error).__name__})")


def decide(setting: str, asked: list[Direct], tried: list[Direct]) -> Direct:
    """Return the decision for a team.

    Local: a pure function.

    Parameters
    ----------
    setting : {"on", "off", "auto"}
        ``MPIML_GPU_DIRECT``.
    asked
        What each member's library says.
    tried
        What came of the trials; empty before there were any.
    """
    if setting != "auto":
        return Direct(setting == "on", f"MPIML_GPU_DIRECT={setting}")
    for found in (*asked, *tried):
        if not found.allowed:
            return found
    if not tried:
        return Direct(False, "nobody has tried it")
    return Direct(True, f"{asked[0].why}, and a trial exchange worked")


_agreed: WeakKeyDictionary[Team, Direct] = WeakKeyDictionary()


def agree_direct(
    team: Team,
    label: Any,
    setting: str | None = None,
    ask: Callable[[], Direct] = ask_library,
    attempt: Callable[[], Direct] = try_exchange,
) -> Direct:
    """Decide whether this team's device arrays go straight to MPI.

    Collective over the members, the first time; the same answer on all.

    Parameters
    ----------
    team
        The members.
    label
        What this is for, in messages.
    setting, ask, attempt
        The switch and the two questions; found by themselves, given by tests.

    Raises
    ------
    UsageError
        The members' switches differ. On all of them.
    """
    known = _agreed.get(team)
    if known is not None:
        return known
    if team.comm is None or len(set(team.ranks)) < team.size:
        # Members that share a process cannot each take part in one MPI operation.
        found = Direct(False, "members share a process")
    else:
        found = _agree(team, label, setting or Config.read().gpu_direct, ask, attempt)
    _agreed[team] = found
    return found


def _agree(
    team: Team,
    label: Any,
    setting: str,
    ask: Callable[[], Direct],
    attempt: Callable[[], Direct],
) -> Direct:
    mine = ask() if setting == "auto" else Direct(False, "")
    said = [json.loads(text) for text in team.exchange(_text(setting, mine), label)]
    settings = {one[0] for one in said}
    if len(settings) > 1:
        raise UsageError(
            f"{team.title}: MPIML_GPU_DIRECT: expected one value on all ranks, got "
            f"{' and '.join(sorted(settings))}. Export it by the launcher (mpirun -x, "
            "srun --export=ALL)."
        )
    asked = [Direct(bool(one[1]), one[2]) for one in said]
    if setting != "auto" or not all(one.allowed for one in asked):
        return decide(setting, asked, [])
    leads = team.index == team.local[0]
    mine = attempt() if leads else Direct(True, "")
    said = [json.loads(text) for text in team.exchange(_text(setting, mine), label)]
    return decide(setting, asked, [Direct(bool(one[1]), one[2]) for one in said])


def _text(setting: str, found: Direct) -> bytes:
    return json.dumps([setting, found.allowed, found.why]).encode()
