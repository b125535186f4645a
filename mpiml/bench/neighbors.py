"""Averages with neighbours, beside raw messages and beside sums over all; and one slow rank.

Every rank refills its array before each repetition, which lasts from a barrier to the end on the
slowest rank; all ways have blocks in turn, in one run. ``x raw`` compares with ``Isend``,
``Irecv`` and NumPy on the same edges.

Of a slow rank it is told how long a step of the others takes, which do a piece of work in each:
with sums over all, with averages over neighbours, and with AD-PSGD, where nobody waits for it.
"""

from typing import Any

from mpiml.bench.allreduce_rounds import KIB, SIZES
from mpiml.bench.measure import Goal, Row, ratio_at_most, sampled
from mpiml.bench.spawn import Options, Ranks
from mpiml.errors import UsageError

__all__ = ["measure", "size_rows", "slow_rows"]

#: Size -> rounds, repetitions of a block, and those before them that do not count.
PLANS = {
    False: {
        "8 B": (20, 50, 10), "1 KiB": (20, 50, 10), "64 KiB": (12, 40, 5), "1 MiB": (12, 20, 3),
        "16 MiB": (8, 8, 2),
    },
    True: {
        "8 B": (1, 3, 1), "1 KiB": (1, 3, 1), "64 KiB": (1, 3, 1), "1 MiB": (1, 2, 1),
        "16 MiB": (1, 2, 1),
    },
}  # fmt: skip
TITLES = {
    "raw_ring": "Isend, Irecv, NumPy on a ring",
    "ring": "  neighbor_allreduce",
    "raw_one_peer": "  Isend, Irecv, NumPy, one-peer exponential",
    "one_peer": "  neighbor_allreduce",
    "mpi": "  Allreduce and division, all ranks",
    "allreduce": '  allreduce(x, "mean")',
}
SLOW = {
    "work": "the others' work alone",
    "all": "  and allreduce",
    "neighbours": "  and neighbor_allreduce on a ring",
    "adpsgd": "  and ADPSGD.step",
}
_Found = dict[str, list[float]]


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench neighbors``.

    Local: starts ranks; no MPI in this process.
    """
    n = 2 if options.ranks is None else options.ranks
    if n < 2:
        raise UsageError(f"--ranks {n}: expected 2 or more")
    found = ranks.scenario("neighbors_inside:sizes", n, {"sizes": PLANS[options.quick]})
    rows = [row for size in found for row in size_rows(size, found[size])]
    plan: dict[str, Any] = {
        "count": 1 << 16, "work": 2e-3, "pieces": 4,
        "steps": 3 if options.quick else 40, "rounds": 1 if options.quick else 7,
    }  # fmt: skip
    rows += slow_rows(ranks.scenario("neighbors_inside:slow", n, plan), plan["pieces"])
    return rows, [
        f"{n} ranks, float32. A slow rank: the last one of {n}, whose steps are "
        f"{plan['pieces']} pieces of work of about {1e3 * plan['work']:g} ms, those of the others "
        "one; 256 KiB are averaged. Who averages with a slow rank in each step keeps its pace, "
        "neighbour or not, once the delay has spread over the graph."
    ]


def size_rows(size: str, found: _Found) -> list[Row]:
    """Return the rows of one size, a key of `SIZES`. Local: a pure function."""
    nbytes = SIZES[size]
    unit = "µs" if nbytes < 1024 * KIB else "ms"
    key = size.replace(" ", "")
    rows = []
    for way, title in TITLES.items():
        raw = found.get(f"raw_{way}") or (found["mpi"] if way == "allreduce" else None)
        goal: Goal | None = None
        if way in ("ring", "one_peer"):
            goal = ratio_at_most(3 if nbytes <= 64 * KIB else 1.1)
        what = title if title.startswith(" ") else f"{size}: {title}"
        rows.append(sampled(f"{key}_{way}", what, unit, found[way], raw, goal))
    return rows


def slow_rows(found: _Found, pieces: int) -> list[Row]:
    """Return the rows of steps beside a slow rank. Local: a pure function."""
    return [
        sampled(
            f"slow_{way}",
            title if title.startswith(" ") else f"a rank is {pieces} times slower: {title}",
            "ms", found[way], None if way == "work" else found["work"],
        )
        for way, title in SLOW.items()
    ]  # fmt: skip
