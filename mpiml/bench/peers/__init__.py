"""Other systems, measured by the same questions: each in a small script of its own.

A script runs in a child process with a time limit, by the Python that has the peer, and needs
nothing of mpiml: it prints samples, and the statistics are made here. Peers are never
dependencies; one that is not installed is said to be so.
"""

import json
import os
import sys
from collections.abc import Sequence
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


class Peer(NamedTuple):
    """A system to compare with.

    Attributes
    ----------
    title
        How it is called.
    module
        What is imported to see whether it is there.
    script
        The file that measures it.
    pip
        What installs it.
    before
        What stands between Python and the script on the command line; it replaces the Python
        where it begins with a path. ``{bin}`` is the folder of the Python.
    """

    title: str
    module: str
    script: str
    pip: str
    before: tuple[str, ...] = ()


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
}  # fmt: skip
#: Benchmark -> what of the samples is shown: key, words, unit, and the row of raw beside it.
ROWS = {
    "rpc": [
        ("small", "small call", "µs", "raw_small"),
        ("flight", "64 in flight", "/s", "raw_flight"),
    ],
    "arrays": [
        ("small_array", "result of 1 KiB", "µs", "1KiB_raw_result"),
        ("array", "result of 16 MiB", "ms", "16MiB_raw_result"),
    ],
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
    raw = {row.key: row.value for row in beside}
    wanted = ROWS.get(options.name)
    if wanted is None:
        return [], [f"{options.name} has no figure that other systems share."]
    rows: list[Row] = []
    notes: list[str] = []
    for name, peer in PEERS.items():
        python = options.pythons.get(name, sys.executable)
        found = _run(peer, python, options)
        if isinstance(found, str):
            notes.append(f"{peer.title}: {found}")
            continue
        title = f"{peer.title} {found['version']}"
        for key, what, unit, other in wanted:
            if key in found:
                row = sampled(f"peer_{name}_{key}", f"{title}: {what}", unit, found[key])
                rows.append(row._replace(ratio=row.value / raw[other]))
    return rows, notes


def _run(peer: Peer, python: str, options: Options) -> dict[str, Any] | str:
    """Return the samples of a peer, or why there are none."""
    if not os.access(python, os.X_OK):
        return f"no Python at {python}"
    # find_spec of a submodule imports its parent, so the parent is looked for
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({_top(peer)!r}) is None)"
    if attempt([python, "-c", look], 60.0).status != 0:
        return f"not installed (pip install {peer.pip})"
    folder = str(Path(python).parent)
    environ = inner_environ()
    environ["PATH"] = os.pathsep.join([folder, environ.get("PATH", "")])
    environ["BENCH_PLAN"] = json.dumps(PLANS[options.quick] | {"what": options.name})
    environ.setdefault("OMP_NUM_THREADS", "1")
    environ["MPIML_LAUNCHER_PID"] = str(os.getpid())  # by which `sweep` finds its daemons
    words = [word.replace("{bin}", folder) for word in peer.before]
    start = [] if words and words[0].startswith("/") else [python]
    try:
        outcome = attempt([*start, *words, str(HERE / peer.script)], LIMIT_S, environ, 15.0)
    finally:
        sweep(os.getpid())
    for line in outcome.stdout.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            samples: dict[str, Any] = json.loads(text)
            return samples
    return f"installed, but it gave no figures: {outcome.why()}"


def _top(peer: Peer) -> str:
    return peer.module.partition(".")[0]
