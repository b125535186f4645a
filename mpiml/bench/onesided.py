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

__all__ = [
    "CASES",
    "DELAYS",
    "MIB",
    "MODELS",
    "NONZEROS",
    "WAYS",
    "alone_rows",
    "apart_rows",
    "measure",
    "racing_rows",
]

_Found = dict[str, list[float]]
_Rows = list[Row]
MIB = 1 << 20
WAYS = ("atomic", "racy", "spinlock", "mutex")
#: Model -> what it is called, its columns.
MODELS = {"rcv1": ("47,236 columns", 47_236), "64MiB": ("64 MiB", 16 * MIB)}
NONZEROS = 75  # of a row, as RCV1 has on average
#: Own updates of a member between its turns: a turn costs a pass over three models, as much as
#: some hundred updates of 75 components; the authors' 64 are for clusters of ten threads.
DELAYS = {"ring": 4096, "ring_64": 64}
#: Case -> what it is called, columns, nonzeros of a row, exponent of Zipf's law.
CASES = {
    "rcv1_zipf": ("RCV1's shape, Zipf 1.1", 47_236, NONZEROS, 1.1),
    "rcv1": ("RCV1's shape, uniform", 47_236, NONZEROS, 0.0),
    "1000": ("1000 columns, uniform", 1000, NONZEROS, 0.0),
    "64MiB": ("64 MiB, uniform", 16 * MIB, NONZEROS, 0.0),
    "rcv1_zipf_5": ("RCV1's columns, 5 nonzeros, Zipf 1.1", 47_236, 5, 1.1),
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
    plan = {
        "models": {key: (columns, NONZEROS) for key, (_, columns) in MODELS.items()},
        "rounds": 2 if quick else 15,
        "calls": 2 if quick else 20,
    }
    found = ranks.scenario("onesided_inside:alone", 1, plan)
    return [row for key in MODELS for row in alone_rows(key, found[key])]


def alone_rows(key: str, took: _Found) -> _Rows:
    """Return the rows of one rank alone, of seconds for a component. Local: a pure function."""
    goals: tuple[Goal | None, Goal | None] = (None, None)
    if key == "rcv1":
        goals = at_least(100, "M/s"), ratio_at_most(6)
    title = f"{MODELS[key][0]}, {NONZEROS} a row: components added"
    return [
        _rate(f"alone_{key}", title, took["model"], goals[0]),
        _rate(f"alone_{key}_racy", "  without atomics", took["racy"]),
        sampled(
            f"alone_{key}_cost", "  a component; x raw: without atomics", "ns", took["model"],
            took["racy"], goals[1],
        ),
    ]  # fmt: skip


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
    keys = list(CASES)[: 1 if quick else None]
    plan = {
        "cases": {key: CASES[key][1:] for key in keys},
        "ways": WAYS,
        "rounds": 2 if quick else 9,
        "calls": 2 if quick else 10,
    }
    one = ranks.scenario("onesided_inside:racing", 1, plan)
    all_ = ranks.scenario("onesided_inside:racing", n, plan)
    return [row for key in keys for row in racing_rows(key, n, one[key], all_[key])]


def racing_rows(key: str, n: int, one: _Found, all_: _Found) -> _Rows:
    """Return the rows of one case, of seconds for an update. Local: a pure function."""
    rows: _Rows = []
    for way in WAYS:
        together = summarize(all_[way])
        title = f"{CASES[key][0]}: {way}" if way == WAYS[0] else f"  {way}"
        name = f"racing_{key}_{way}"
        rows.append(_updates(name, f"{title}, updates by {n} ranks", n, all_[way]))
        grown = n * summarize(one[way]).median / together.median
        rows.append(figure(f"{name}_grown", f"    {n} ranks / 1", "x", grown, together.n))
    return rows


def _updates(key: str, what: str, n: int, took: list[float]) -> Row:
    found = summarize(took)
    return figure(key, what, "M/s", n / found.median, found.n)


def _scaling(n: int, quick: bool, ranks: Ranks) -> _Rows:
    plan = {
        "columns": MIB if quick else 16 * MIB, "nonzeros": NONZEROS, "ring_columns": 47_236,
        "ring_skew": 1.1, "delays": DELAYS, "rounds": 2 if quick else 15, "calls": 2 if quick else 10,
    }  # fmt: skip
    one = ranks.scenario("onesided_inside:scaling", 1, plan)
    all_ = ranks.scenario("onesided_inside:scaling", n, plan)
    goals = {} if n > 2 else dict.fromkeys(("shared", "ring"), at_least(1.8, "x"))
    titles = {
        "shared": "SharedModel, 64 MiB, uniform columns",
        "ring": f"RingModel, a cluster for each rank, RCV1's shape, delay {DELAYS['ring']}",
        "ring_64": "  the same, delay 64",
    }
    rows: _Rows = []
    for key, title in titles.items():
        grown = n * summarize(one[key]).median / summarize(all_[key]).median
        count = len(all_[key])
        rows += [
            _updates(key, f"{title}: updates by {n} ranks", n, all_[key]),
            figure(f"{key}_grown", f"    {n} ranks / 1", "x", grown, count, goals.get(key)),
        ]
    return rows


# -- to another host ---------------------------------------------------------------------------


def _plan(quick: bool) -> dict[str, Any]:
    repeats = {"small": 20, "large": 3} if quick else {"small": 300, "large": 20}
    return {"rounds": 1 if quick else 9, "repeats": repeats}


def _pretended(quick: bool, ranks: Ranks) -> tuple[_Rows, list[str]]:
    found = ranks.scenario(
        "onesided_apart:apart", 2, _plan(quick), environ={"MPIML_HOST_SIZE": "1"}
    )
    return apart_rows("pretended", "pretended hosts", found), [
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
    return apart_rows("hosts", "2 hosts", found), [
        "2 hosts: network namespaces joined by a bridge, 2 ranks each, all on this machine; read by "
        f"{found['way']}."
    ]


def apart_rows(key: str, where: str, found: dict[str, Any]) -> _Rows:
    """Return the rows of memory on another host. Local: a pure function."""
    took: _Found = found["took"]
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
