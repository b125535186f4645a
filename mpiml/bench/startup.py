"""Starting: the cost of the import, of a rank's memory, and of many ranks on few cores."""

import os
import re
import sys
from pathlib import Path
from time import perf_counter

from mpiml.bench.measure import Goal, Row, at_most, figure, ratio_at_most, sampled, summarize
from mpiml.bench.resident import MARK
from mpiml.bench.spawn import BenchError, Options, Ranks
from mpiml.doctor.check import attempt
from mpiml.errors import UsageError

__all__ = ["measure"]

PLANS = {
    False: {"imports": 21, "memory": 3, "starts": 3, "ranks": 64},
    True: {"imports": 2, "memory": 1, "starts": 1, "ranks": 4},
}
NUMPY = "import numpy"
IMPORTS = {
    "numpy": NUMPY,
    "mpiml": f"{NUMPY}; import mpiml",
    "names": f"{NUMPY}; import mpiml; "
    "mpiml.Program, mpiml.ServiceNode, mpiml.PyNode, mpiml.FILL, mpiml.context, mpiml.give",
}
BARRIER = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"
HERE = Path(__file__).parent


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench startup``.

    Local: starts interpreters and ranks; no MPI in this process.
    """
    plan = PLANS[options.quick]
    many = plan["ranks"] if options.ranks is None else options.ranks
    if many < 2:
        raise UsageError(f"--ranks {many}: expected 2 or more")
    rows = [
        *_imports(plan["imports"], ranks),
        *_memory(plan["memory"], ranks),
        *_starts(plan["starts"], many, ranks),
    ]
    return rows, [
        "Imports: whole interpreters, one of each in turn; what mpiml adds is the difference of "
        "medians."
    ]


def _imports(count: int, ranks: Ranks) -> list[Row]:
    took: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for turn in range(count + 1):
        for name, code in IMPORTS.items():
            began = perf_counter()
            outcome = attempt([sys.executable, "-c", code], 60.0, ranks.environ)
            if outcome.status != 0:
                raise BenchError(f"`{code}`: expected status 0; {outcome.why()}")
            if turn:  # the first writes bytecode and fills the page cache
                took[name].append(perf_counter() - began)
    base = summarize(took["numpy"]).median
    return [
        sampled("import_numpy", "python -c 'import numpy'", "ms", took["numpy"]),
        _over("import_mpiml", "  import mpiml over it", "ms", took["mpiml"], base,
              at_most(50, "ms")),
        _over("import_names", "  import mpiml and use its names over it", "ms", took["names"],
              base),
    ]  # fmt: skip


def _over(
    key: str, what: str, unit: str, samples: list[float], base: float, goal: Goal | None = None
) -> Row:
    """Return the row of what is above `base`."""
    return sampled(key, what, unit, [sample - base for sample in samples], None, goal)


def _memory(count: int, ranks: Ranks) -> list[Row]:
    plain: list[tuple[int, int]] = []
    ours: list[tuple[int, int]] = []
    script = str(HERE / "resident.py")
    for _ in range(count):
        plain += _held(ranks, [script])
        ours += _held(ranks, ["-m", "mpiml.run", script])
    base = summarize([rss for rss, _ in plain]).median
    anonymous = summarize([private for _, private in plain]).median
    most = max(rss for rss, _ in ours)
    return [
        sampled("memory_plain", "memory of a rank of numpy and mpi4py", "MiB",
                [rss for rss, _ in plain]),
        _over("memory", "  a rank of mpiml over it", "MiB", [rss for rss, _ in ours], base,
              at_most(25, "MiB")),
        figure("memory_max", "  the largest of them", "MiB", most - base, len(ours),
               at_most(25, "MiB")),
        _over("memory_private", "  the same, without mapped files", "MiB",
              [private for _, private in ours], anonymous),
    ]  # fmt: skip


def _held(ranks: Ranks, argv: list[str]) -> list[tuple[int, int]]:
    """Start two ranks and return the memory that each says it holds."""
    said = ranks.run(2, argv).stdout
    found = re.findall(rf"{re.escape(MARK)} (\d+) (\d+)", said)
    if len(found) != 2:
        raise BenchError(f"{argv}: expected 2 lines with {MARK!r}, got {len(found)}: {said!r}")
    return [(int(rss), int(private)) for rss, private in found]


def _starts(count: int, many: int, ranks: Ranks) -> list[Row]:
    took: dict[str, list[float]] = {"plain": [], "hello": []}
    for _ in range(count):
        for name, argv in [
            ("plain", ["-c", BARRIER]),
            ("hello", ["-m", "mpiml.run", str(HERE / "hello.py")]),
        ]:
            began = perf_counter()
            ranks.run(many, argv)
            took[name].append(perf_counter() - began)
    cores = len(os.sched_getaffinity(0))
    title = f"{many} ranks on {cores} cores"
    return [
        sampled("start_plain", f"{title}: mpi4py and a barrier", "s", took["plain"]),
        sampled("start_hello", "  mpiml, hello", "s", took["hello"], took["plain"],
                ratio_at_most(2)),
    ]  # fmt: skip
