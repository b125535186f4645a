"""One-sided memory: additions within a host and to another one, beside MPI's windows.

Within a host: components added per second by one rank, atomically and without; what contention
does to four ways of adding; how updates grow with the ranks. To another host: single elements
and 1 MiB, beside ``Accumulate``, ``Put`` and ``Get`` with ``Flush`` in the same run.
"""

from typing import Any

from mpiml.bench.measure import (
    Goal,
    Row,
    at_least,
    figure,
    ratio_at_most,
    sampled,
    summarize,
)
from mpiml.bench.onesided_inside import ROWS
from mpiml.bench.spawn import BenchError, Options, Ranks
from mpiml.bench.two_hosts import TwoHosts

__all__ = ["measure"]

_Found = dict[str, list[float]]
_Rows = list[Row]
MIB = 1 << 20
WAYS = ("atomic", "racy", "spinlock", "mutex")
#: Case -> columns, nonzeros of a row, exponent of Zipf's law.
CASES = {
    "RCV1's shape, Zipf 1.1": (47_236, 75, 1.1),
    "RCV1's shape, uniform": (47_236, 75, 0.0),
    "1000 columns, uniform": (1000, 75, 0.0),
    "64 MiB, uniform": (16 * MIB, 75, 0.0),
    "RCV1's shape, 5 nonzeros, Zipf": (47_236, 5, 1.1),
}


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench onesided``.

    Local: starts ranks; no MPI in this process.
    """
    n = 2 if options.ranks is None else max(2, options.ranks)
    quick = options.quick
    rows: _Rows = []
    notes: list[str] = []
    for part in (_alone, _single, _racing, _scaling):
        rows += part(n, quick, ranks)
    for away in (_pretended, _hosts):
        more, said = away(quick, ranks)
        rows, notes = rows + more, notes + said
    notes.append(
        "components: float32; rows: sparse updates given as CSR blocks of "
        f"{ROWS}; n ranks / 1: updates per second of all ranks, over those of one alone."
    )
    return rows, notes


# -- within a host -----------------------------------------------------------------------------


def _alone(n: int, quick: bool, ranks: Ranks) -> _Rows:
    models = {"47,236 columns": (47_236, 75), "64 MiB": (16 * MIB, 75)}
    plan = {"models": models, "rounds": 2 if quick else 15, "calls": 2 if quick else 20}
    found = ranks.scenario("onesided_inside:alone", 1, plan)
    rows: _Rows = []
    for name, took in found.items():
        goals: tuple[Goal | None, Goal | None] = (None, None)
        if "columns" in name:
            goals = at_least(100, "M/s"), ratio_at_most(6)
        rows += [
            _rate(f"alone_{name}", f"{name}, 75 a row: components added", took["model"], goals[0]),
            _rate(f"racy_{name}", "  without atomics", took["racy"]),
            sampled(
                f"alone_ratio_{name}", "  a component, x raw: the loop without atomics", "ns",
                took["model"], took["racy"], goals[1],
            ),
        ]  # fmt: skip
    return rows


def _rate(key: str, what: str, took: list[float], goal: Goal | None = None) -> Row:
    found = summarize(took)
    return figure(key, what, "M/s", 1 / found.median, found.n, goal)


def _single(n: int, quick: bool, ranks: Ranks) -> _Rows:
    plan = {"rounds": 2 if quick else 15, "calls": 50 if quick else 3000}
    found = ranks.scenario("onesided_inside:single", 2, plan)
    return [
        sampled("in_accumulate", "one element, in a host: Accumulate+Flush", "µs", found["accumulate"]),
        sampled("in_add_at", "  SharedModel.add_at", "µs", found["add_at"], found["accumulate"]),
        sampled("in_get", "  Get+Flush", "µs", found["get"]),
        sampled("in_read", "  model[...], read in place", "µs", found["read"], found["get"]),
        sampled("in_snapshot", "  snapshot of 4 KiB", "µs", found["snapshot"], found["get"]),
    ]  # fmt: skip


def _racing(n: int, quick: bool, ranks: Ranks) -> _Rows:
    cases = dict(list(CASES.items())[: 1 if quick else None])
    plan = {
        "cases": cases,
        "ways": WAYS,
        "rounds": 2 if quick else 9,
        "calls": 2 if quick else 10,
    }
    one = ranks.scenario("onesided_inside:racing", 1, plan)
    all_ = ranks.scenario("onesided_inside:racing", n, plan)
    rows: _Rows = []
    for name in cases:
        for way in WAYS:
            alone, together = summarize(one[name][way]), summarize(all_[name][way])
            what = f"{name}: {way}" if way == WAYS[0] else f"  {way}"
            key = f"racing_{name}_{way}"
            rows.append(
                figure(
                    key, f"{what}, updates by {n} ranks", "M/s", n / together.median, together.n
                )
            )
            grown = n * alone.median / together.median
            rows.append(figure(f"{key}_grown", f"    {n} ranks / 1", "x", grown, together.n))
    return rows


def _scaling(n: int, quick: bool, ranks: Ranks) -> _Rows:
    plan = {
        "columns": MIB if quick else 16 * MIB, "nonzeros": 75, "ring_columns": 47_236,
        "ring_skew": 1.1, "rounds": 2 if quick else 15, "calls": 2 if quick else 10,
    }  # fmt: skip
    one = ranks.scenario("onesided_inside:scaling", 1, plan)
    all_ = ranks.scenario("onesided_inside:scaling", n, plan)
    goal = at_least(1.8, "x") if n == 2 else None
    titles = {
        "shared": "SharedModel, 64 MiB, uniform columns",
        "ring": "RingModel, a cluster for each rank, RCV1's shape, Zipf 1.1",
    }
    rows: _Rows = []
    for key, title in titles.items():
        alone, together = summarize(one[key]), summarize(all_[key])
        rows += [
            figure(key, f"{title}: updates by {n} ranks", "M/s", n / together.median, together.n),
            figure(
                f"{key}_grown", f"    {n} ranks / 1", "x", n * alone.median / together.median,
                together.n, goal,
            ),
        ]  # fmt: skip
    return rows


# -- to another host ---------------------------------------------------------------------------


def _plan(quick: bool) -> dict[str, Any]:
    repeats = {"small": 20, "large": 3} if quick else {"small": 300, "large": 20}
    return {"rounds": 1 if quick else 9, "repeats": repeats}


def _pretended(quick: bool, ranks: Ranks) -> tuple[_Rows, list[str]]:
    found = ranks.scenario(
        "onesided_apart:apart", 2, _plan(quick), environ={"MPIML_HOST_SIZE": "1"}
    )
    return apart_rows("pretended", found), [
        "pretended hosts: two ranks of this machine that take each other for other hosts, so MPI "
        f"moves data through memory; read by {found['way']}."
    ]


def _hosts(quick: bool, ranks: Ranks) -> tuple[_Rows, list[str]]:
    with TwoHosts(ranks) as two:
        why = two.why_not()
        if why:
            return [], [f"two hosts: not measured, {why}"]
        try:
            found = two.scenario("onesided_apart:apart", _plan(quick))
        except BenchError as error:
            why = str(error).strip().splitlines()[-1]
            return [], [f"two hosts: not measured, MPI's windows do not run on them: {why}"]
    if found["hosts"] != 2:
        return [], [f"two hosts: not measured, MPI sees {found['hosts']}"]
    return apart_rows("2 hosts", found), [
        "2 hosts: network namespaces joined by veth, 2 ranks each, all on this machine; read by "
        f"{found['way']}."
    ]


def apart_rows(where: str, found: dict[str, Any]) -> _Rows:
    """Return the rows of memory on another host. Local: a pure function."""
    took: _Found = found["took"]
    key = where.replace(" ", "_")
    accumulate, get, big = (
        _best(took, name) for name in ("accumulate", "get", "get_1MiB")
    )  # fmt: skip

    def row(name: str, what: str, raw: list[float] | None, goal: Goal | None = None) -> Row:
        unit = "ms" if "MiB" in name else "µs"
        return sampled(f"{key}_{name}", what, unit, took[name], raw, goal)

    return [
        row("accumulate", f"{where}, one element: Accumulate+Flush, Win_allocate", None),
        row("accumulate_given", "  Accumulate+Flush, Win_create", None),
        row("push", "  push: SharedModel.add_at", accumulate, ratio_at_most(2)),
        row("push_flush", "  push and flush", accumulate),
        row("window_flush", "  Window.accumulate_at and flush", accumulate),
        row("put", "  Put+Flush, Win_allocate", None),
        row("get", "  Get+Flush, Win_allocate", None),
        row("get_given", "  Get+Flush, Win_create", None),
        row("pull", "  pull: SharedModel.pull", get, ratio_at_most(2)),
        row("snapshot", "  snapshot: version, data, version", get, ratio_at_most(3.5)),
        row("get_1MiB", f"{where}, 1 MiB: Get+Flush, Win_allocate", None),
        row("get_1MiB_given", "  Get+Flush, Win_create", None),
        row("pull_1MiB", "  pull", big, ratio_at_most(1.2)),
        row("snapshot_1MiB", "  snapshot", big),
        row("accumulate_1MiB", "  Accumulate+Flush, Win_allocate", None),
        row("push_1MiB", "  push", took["accumulate_1MiB"]),
    ]


def _best(took: _Found, name: str) -> list[float]:
    """Return the samples of the faster of MPI's two windows."""
    return min(
        (took[name], took[f"{name}_given"]), key=lambda samples: summarize(samples).median
    )
