"""Other systems, measured by the same questions: each in a small script of its own.

A script runs in a child process with a time limit, by the Python that has the peer, and needs
nothing of mpiml: it prints samples, and the statistics are made here. Peers are never
dependencies; one that is not installed is said to be so.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiml.bench.measure import Row, sampled
from mpiml.bench.spawn import Options
from mpiml.config import inner_environ
from mpiml.doctor.check import attempt
from mpiml.starter import sweep

__all__ = ["MARK", "PEERS", "Peer", "measure"]

HERE = Path(__file__).parent
MARK = "BENCH RESULT "
LIMIT_S = 180.0
PLANS = {
    False: {"calls": 1000, "warm": 100, "flights": 2000, "deep": 64, "repeats": 20},
    True: {"calls": 20, "warm": 5, "flights": 100, "deep": 64, "repeats": 2},
}
#: Of allreduce: bytes and repetitions of each size, in ``rounds`` blocks.
SIZES = {
    "4KiB": (4 << 10, 50), "64KiB": (64 << 10, 40), "1MiB": (1 << 20, 20),
    "16MiB": (16 << 20, 8), "64MiB": (64 << 20, 4),
}  # fmt: skip
ALLREDUCE_PLANS = {
    False: {"sizes": SIZES, "rounds": 6, "warm": 3},
    True: {"sizes": {key: (n, 1) for key, (n, _) in SIZES.items()}, "rounds": 1, "warm": 1},
}


class Peer(NamedTuple):
    """A system to compare with.

    Attributes
    ----------
    title
        How it is called.
    module
        What is imported to see whether it is there.
    script
        The file that measures it, and its arguments.
    pip
        What installs it.
    before
        What stands between Python and the script on the command line; it replaces the Python
        where it begins with a path. ``{bin}`` is the folder of the Python, ``{python}`` itself,
        ``{ranks}`` the number of ranks.
    benches
        The benchmarks that it has figures for.
    slower
        How many times faster than it allreduce shall be from 1 MiB up; 0 for no goal.
    beside
        A program that stands beside the Python where the peer is installed.
    """

    title: str
    module: str
    script: str
    pip: str
    before: tuple[str, ...] = ()
    benches: tuple[str, ...] = ("rpc", "arrays")
    slower: float = 0.0
    beside: str = ""


PEERS = {
    "ray": Peer("Ray actor", "ray", "ray_actor.py", "ray"),
    "dask": Peer("Dask actor, worker to worker", "distributed", "dask_actor.py", "distributed"),
    "torch": Peer("torch.distributed.rpc", "torch.distributed", "torch_rpc.py", "torch"),
    "charm4py": Peer(
        "charm4py", "charm4py", "charm4py_chare.py", "charm4py",
        ("-m", "charmrun.start", "+p2", "++local"),
    ),
    "dragon": Peer(
        "Dragon, two queues", "dragon", "dragon_queue.py", "dragonhpc",
        # through a shell, since it hangs as the first process of a session
        ("/bin/sh", "-c", '"$0" -s "$1"; exit $?', "{bin}/dragon"),
    ),
    "monarch": Peer("Monarch actor", "monarch", "monarch_actor.py", "torchmonarch"),
    "gloo": Peer(
        "gloo all_reduce of torch", "torch.distributed", "torch_allreduce.py", "torch",
        benches=("allreduce",),
    ),
    "impi": Peer(
        "Intel MPI", "mpi4py", "impi_allreduce.py", "impi-rt mpi4py, in an environment of its own",
        ("{bin}/mpiexec", "-launcher", "fork", "-genv", "I_MPI_FABRICS", "shm", "-n", "{ranks}",
         "{python}"),
        ("allreduce",), 3.0, "impi_info",
    ),
    "deepspeed": Peer(
        "DeepSpeed, shared memory", "deepspeed", "torch_allreduce.py deepspeed", "deepspeed",
        benches=("allreduce",),
    ),
}  # fmt: skip


class Shown(NamedTuple):
    """What of a peer's samples is shown.

    Attributes
    ----------
    key, what, unit
        Of the row.
    raw
        Rows of raw MPI: the smallest stands beside it.
    ours
        The row of mpiml that goals compare with.
    """

    key: str
    what: str
    unit: str
    raw: tuple[str, ...]
    ours: str = ""


def _sums() -> list[Shown]:
    shown = []
    for key, (nbytes, _) in SIZES.items():
        unit = "µs" if nbytes < 1 << 20 else "ms"
        raw = (f"{key}_mpi", f"{key}_mpi_in_place")
        ours = f"{key}_bucket" if nbytes >= 1 << 20 else ""
        title = key.replace("KiB", " KiB").replace("MiB", " MiB")
        shown.append(Shown(key, title, unit, raw, ours))
        shown.append(Shown(f"{key}_in_place", f"{title}, in place", unit, raw, ours))
    return shown


ROWS = {
    "rpc": [
        Shown("small", "small call", "µs", ("raw_small",)),
        Shown("flight", "64 in flight", "/s", ("raw_flight",)),
    ],
    "arrays": [
        Shown("small_array", "result of 1 KiB", "µs", ("1KiB_raw_result",)),
        Shown("array", "result of 16 MiB", "ms", ("16MiB_raw_result",)),
    ],
    "allreduce": _sums(),
}


def measure(options: Options, beside: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Measure every peer that is installed; return rows, and notes on the others.

    Local: starts child processes; no MPI in this process.

    Parameters
    ----------
    options
        The command line.
    beside
        The rows of mpiml, with raw MPI among them.
    """
    values = {row.key: row.value for row in beside}
    wanted = ROWS.get(options.name)
    if wanted is None:
        return [], [f"{options.name} has no figure that other systems share."]
    rows: list[Row] = []
    notes: list[str] = []
    for name, peer in PEERS.items():
        if options.name not in peer.benches:
            continue
        python = options.pythons.get(name, sys.executable)
        found = _run(peer, python, options)
        if isinstance(found, str):
            notes.append(f"{peer.title}: {found}")
            continue
        title = f"{peer.title} {found['version']}"
        for shown in wanted:
            if shown.key in found:
                what = f"{title}: {shown.what}"
                row = sampled(f"peer_{name}_{shown.key}", what, shown.unit, found[shown.key])
                rows.append(_beside(row, peer, shown, values))
    return rows, notes


def _beside(row: Row, peer: Peer, shown: Shown, values: Mapping[str, float]) -> Row:
    """Return the row with its ratio to raw MPI, and the goal of ours beside it."""
    row = row._replace(ratio=row.value / min(values[key] for key in shown.raw))
    if not peer.slower or not shown.ours:
        return row
    reached = row.value >= peer.slower * values[shown.ours]
    return row._replace(goal=f">= {peer.slower:g} x Bucket", reached=reached)


def _run(peer: Peer, python: str, options: Options) -> dict[str, Any] | str:
    """Return the samples of a peer, or why there are none."""
    if not os.access(python, os.X_OK):
        return f"no Python at {python}"
    folder = str(Path(python).parent)
    ranks = 2 if options.ranks is None else options.ranks
    names = {"{bin}": folder, "{python}": python, "{ranks}": str(ranks)}
    if not _installed(peer, python):
        return f"not installed (pip install {peer.pip})"
    environ = inner_environ()
    environ["PATH"] = os.pathsep.join([folder, environ.get("PATH", "")])
    plans = ALLREDUCE_PLANS if options.name == "allreduce" else PLANS
    plan = {**plans[options.quick], "what": options.name, "ranks": ranks}
    environ["BENCH_PLAN"] = json.dumps(plan)
    environ.setdefault("OMP_NUM_THREADS", "1")
    environ["MPIML_LAUNCHER_PID"] = str(os.getpid())  # by which `sweep` finds its daemons
    words = [_filled(word, names) for word in peer.before]
    start = [] if words and words[0].startswith("/") else [python]
    file, *arguments = peer.script.split()
    command = [*start, *words, str(HERE / file), *arguments]
    try:
        outcome = attempt(command, LIMIT_S, environ, 15.0)
    finally:
        sweep(os.getpid())
    for line in outcome.stdout.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            samples: dict[str, Any] = json.loads(text)
            return samples
    return f"installed, but it gave no figures: {outcome.why()}"


def _installed(peer: Peer, python: str) -> bool:
    if peer.beside and not (Path(python).parent / peer.beside).exists():
        return False
    # find_spec of a submodule imports its parent, so the parent is looked for
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({_top(peer)!r}) is None)"
    return attempt([python, "-c", look], 60.0).status == 0


def _filled(word: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        word = word.replace(name, value)
    return word


def _top(peer: Peer) -> str:
    return peer.module.partition(".")[0]
