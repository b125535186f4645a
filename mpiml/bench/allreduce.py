"""Allreduce: in place, shared, copying, of 8 B to 256 MiB, beside both forms of MPI's.

Every rank refills its buffer before each repetition, which lasts from a barrier to the end on the
slowest rank; all ways have blocks in turn, in one run. ``x raw`` compares with the faster of
``Allreduce(a, b)`` and ``Allreduce(IN_PLACE, a)``. The bound is a stream copy: each of n ranks
copies S bytes at the same time, which moves the 2nS bytes that n separate results need.
"""

from typing import Any

from mpiml.bench.allreduce_hosts import hosts
from mpiml.bench.allreduce_parts import parts
from mpiml.bench.allreduce_rounds import KIB, MIB, SIZES
from mpiml.bench.measure import Goal, Row, at_least, figure, ratio_at_most, sampled, summarize
from mpiml.bench.spawn import Options, Ranks
from mpiml.errors import UsageError

__all__ = ["best_of", "measure", "size_rows"]

#: Size -> rounds, repetitions of a block, and those before them that do not count.
PLANS = {
    False: {
        "8 B": (20, 50, 10), "1 KiB": (20, 50, 10), "4 KiB": (20, 50, 10),
        "64 KiB": (12, 40, 5), "1 MiB": (12, 20, 3), "16 MiB": (8, 8, 2),
        "64 MiB": (6, 4, 1), "256 MiB": (4, 2, 1),
    },
    True: {
        "8 B": (1, 3, 1), "1 KiB": (1, 3, 1), "4 KiB": (1, 3, 1), "64 KiB": (1, 3, 1),
        "1 MiB": (1, 2, 1), "16 MiB": (1, 2, 1), "64 MiB": (1, 1, 1),
    },
}  # fmt: skip
TITLES = {
    "mpi": "Allreduce(a, b)",
    "mpi_in_place": "  Allreduce(IN_PLACE, a)",
    "mpi_new": "  Allreduce(a, new array)",
    "bucket": "  Bucket, in place",
    "shared": '  Bucket(result="shared")',
    "outside": "  allreduce(x, out=x)",
    "new": "  allreduce(x), a new array",
}
RAW = ("mpi", "mpi_in_place")

_Found = dict[str, list[float]]


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench allreduce``.

    Local: starts ranks; no MPI in this process.
    """
    n = 2 if options.ranks is None else options.ranks
    if n < 2:
        raise UsageError(f"--ranks {n}: expected 2 or more")
    plan = {"sizes": PLANS[options.quick]}
    found = ranks.scenario("allreduce_sizes:sizes", n, plan)
    intel = ranks.launcher.mpi.kind == "intel"
    rows = [row for size in found for row in size_rows(size, found[size], n, intel)]
    notes = [
        f"{n} ranks, float32; x raw: over the faster of the first two lines (a new array: over "
        "the third)."
    ]
    missing = plan["sizes"].keys() - found.keys()
    notes += [f"{size}: not measured, it does not fit into the free memory" for size in missing]
    for part in (parts, hosts):
        more, said = part(n, options.quick, ranks)
        rows, notes = rows + more, notes + said
    return rows, notes


def best_of(found: _Found) -> _Found:
    """Return the samples of the faster of MPI's two forms, as the only item."""
    name = min(RAW, key=lambda way: summarize(found[way]).median)
    return {name: found[name]}


def size_rows(size: str, found: _Found, n: int, intel: bool = False) -> list[Row]:
    """Return the rows of one size.

    Local: a pure function.

    Parameters
    ----------
    size
        Its name, a key of `SIZES`.
    found
        Way -> seconds.
    n
        How many ranks there were.
    intel
        Whether the MPI is Intel's, for which the goals are others.
    """
    nbytes = SIZES[size]
    unit = "µs" if nbytes < MIB else "ms"
    key = size.replace(" ", "")
    (raw,) = best_of(found).values()
    goals = {
        "bucket": _bucket_goal(nbytes, n, intel),
        "outside": _copying_goal(nbytes, summarize(raw).median),
        "new": _copying_goal(nbytes, summarize(found["mpi_new"]).median),
    }
    rows = []
    for way, title in TITLES.items():
        beside = found["mpi_new"] if way == "new" else raw
        what = title if title.startswith(" ") else f"{size}: {title}"
        rows.append(sampled(f"{key}_{way}", what, unit, found[way], beside, goals.get(way)))
    if "copy" in found:
        rows += _bound_rows(key, found, n * nbytes)
    return rows


def _bucket_goal(nbytes: int, n: int, intel: bool) -> Goal | None:
    if nbytes <= 4 * KIB:
        return ratio_at_most(1.2)
    if nbytes > 64 * MIB or (intel and nbytes < MIB):
        return None
    factor = 5 if n == 2 and not intel else 3
    return Goal(f"{factor} times faster", lambda value, ratio: (ratio or 1) * factor <= 1)


def _copying_goal(nbytes: int, raw: float) -> Goal:
    if nbytes >= MIB:
        return ratio_at_most(1.05)
    return Goal("<= raw + 5 µs", lambda value, ratio: value <= raw + 5e-6)


def _bound_rows(key: str, found: dict[str, list[float]], total: int) -> list[Row]:
    """Return the rows on the bound of memory; `total`: the bytes of all ranks together."""
    copy = summarize(found["copy"]).median
    samples = len(found["copy"])

    def share(way: str, title: str, goal: Goal | None = None) -> Row:
        value = copy / summarize(found[way]).median
        return figure(f"{key}_{way}_bound", title, "%", value, samples, goal)

    speed: Any = 2 * total / copy
    return [
        sampled(f"{key}_copy", "  stream copy by all ranks", "ms", found["copy"]),
        figure(f"{key}_speed", "    bytes moved by it", "GB/s", speed, samples),
        share("bucket", "    Bucket, of the bound", at_least(70, "%")),
        share("shared", "    Bucket(shared), of it"),
    ]
