"""The parameter server: pulls and pushes beside copies and raw mpi4py, and many workers.

Pulls: on one host beside ``memcpy``, and from another beside ``Send``. Pushes of 1 KiB beside
pickled messages there and back. Updates per second by workers and servers, with the staleness of
the gradients; and how soon digits are learnt where one worker is slow, by consistency.
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
from mpiml.bench.ps_links import SlowLinks
from mpiml.bench.several_hosts import SeveralHosts
from mpiml.bench.spawn import BenchError, Options, Ranks
from mpiml.bench.two_hosts import TwoHosts
from mpiml.errors import UsageError

__all__ = [
    "away_rows",
    "cases_of",
    "crowd_rows",
    "grown_rows",
    "here_rows",
    "measure",
    "push_rows",
    "training_rows",
]

MIB = 1 << 20
SIZES = {"64KiB": 1 << 16, "1MiB": MIB, "16MiB": 16 * MIB}
#: Repetitions of a round, by size.
REPEATS = {
    False: {"64KiB": 200, "1MiB": 60, "16MiB": 15},
    True: {"64KiB": 3, "1MiB": 3, "16MiB": 2},
}
PUSH = {
    False: {"rounds": 8, "batches": 100, "warm": 100},
    True: {"rounds": 1, "batches": 5, "warm": 10},
}
CROWD: dict[bool, dict[str, Any]] = {
    False: {"nbytes": MIB, "rounds": 5, "seconds": 1.0},
    True: {"nbytes": MIB, "rounds": 1, "seconds": 0.1},
}
MBIT = 200
LINKS: dict[bool, dict[str, Any]] = {
    False: {"nbytes": MIB, "rounds": 5, "seconds": 2.0},
    True: {"nbytes": MIB, "rounds": 1, "seconds": 0.3},
}
TRAINING: dict[bool, dict[str, Any]] = {
    False: {"step": 3e-3, "slower": 3, "target": 0.3, "limit": 3.0, "search": [100, 101],
            "rates": [0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2], "seeds": list(range(7))},
    True: {"step": 3e-3, "slower": 3, "target": 2.2, "limit": 1.0, "search": [100],
           "rates": [0.2], "seeds": [0]},
}  # fmt: skip
MODES = {
    "bsp": "BSP",
    "delay": "  BoundedDelay(2)",
    "ssp": "  SSP(3)",
    "async": "  Async",
}
HIGH = 3  # staleness from here on is one row
SOONER = 1.5
GROWS = Goal(">= 1.3 x", lambda value, ratio: value >= 1.3)  # clear of noise
_Rows = list[Row]
_Said = tuple[_Rows, list[str]]
_Found = dict[str, list[float]]


def measure(options: Options, ranks: Ranks) -> _Said:
    """Return the rows and notes of ``mpiml bench ps``.

    Local: starts ranks; no MPI in this process.
    """
    n = 4 if options.ranks is None else options.ranks
    if n < 3:
        raise UsageError(f"--ranks {n}: ps has a server and two workers; expected 3 or more")
    quick = options.quick
    parts = [
        _alone(quick, ranks),
        _pretended(quick, ranks),
        _hosts(quick, ranks),
        _links(quick, ranks),
        _many(n, quick, ranks),
    ]
    rows = [row for more, _ in parts for row in more]
    return rows, [note for _, said in parts for note in said]


def _title(size: str) -> tuple[str, str]:
    """Return how a size is written, and the unit of its times."""
    return size.replace("K", " K").replace("M", " M"), "ms" if size == "16MiB" else "µs"


# -- one worker --------------------------------------------------------------------------------


def _pulls(quick: bool) -> dict[str, Any]:
    sizes = {size: (nbytes, REPEATS[quick][size]) for size, nbytes in SIZES.items()}
    return {"rounds": 1 if quick else 8, "warm": 1 if quick else 3, "sizes": sizes}


def _alone(quick: bool, ranks: Ranks) -> _Said:
    plan = {"pulls": _pulls(quick), "pushes": PUSH[quick]}
    found = ranks.scenario("ps_inside:alone", 2, plan)
    rows = [row for size in SIZES for row in here_rows(size, found["pulls"][size])]
    rows += push_rows(found["pushes"])
    return rows, [
        "Before each pull, and memcpy, the worker pushes one number: a pull is of a new version."
    ]


def here_rows(size: str, found: _Found) -> _Rows:
    """Return the rows of pulls by a worker of the server's host. Local: a pure function."""
    title, unit = _title(size)
    goal = ratio_at_most(1.1) if size == "16MiB" else None
    copy = found["memcpy"]
    return [
        sampled(f"here_{size}_memcpy", f"{title} on one host: memcpy, warm", unit, copy),
        sampled(f"here_{size}", "  pull", unit, found["pull"], copy, goal),
    ]


def _pretended(quick: bool, ranks: Ranks) -> _Said:
    found = ranks.scenario(
        "ps_inside:pulls", 2, _pulls(quick), environ={"MPIML_HOST_SIZE": "1"}
    )
    return away_rows("pretended", "pretended hosts", found), [
        "pretended hosts: two ranks of this machine that take each other for other hosts, so MPI "
        "moves data through memory, raw and ours."
    ]


def away_rows(key: str, where: str, found: dict[str, _Found]) -> _Rows:
    """Return the rows of pulls by a worker of another host. Local: a pure function."""
    rows = []
    for size in SIZES:
        title, unit = _title(size)
        goal = ratio_at_most(1.3) if size == "16MiB" else None
        raw = found[size]["raw"]
        what = f"{title}, {where}: raw request and Recv"
        rows.append(sampled(f"{key}_{size}_raw", what, unit, raw))
        rows.append(sampled(f"{key}_{size}", "  pull", unit, found[size]["pull"], raw, goal))
    return rows


def push_rows(found: _Found) -> _Rows:
    """Return the rows of pushes of 1 KiB. Local: a pure function."""
    raw = found["raw"]
    return [
        sampled("push_raw", "1 KiB: raw send, and recv of an answer", "µs", raw),
        sampled("push", "  push, acknowledged", "µs", found["push"], raw, ratio_at_most(3)),
        sampled("push_pull", "  push_pull", "µs", found["push_pull"], raw),
        sampled("pull_small", "  pull, on one host", "µs", found["pull"], raw),
    ]


# -- many workers ------------------------------------------------------------------------------


def cases_of(n: int) -> list[tuple[int, int]]:
    """Return numbers of workers and servers, powers of two, that `n` ranks can be.

    Local: a pure function. The last one has the most workers, then the most servers.
    """
    powers = [1 << i for i in range(n.bit_length())]
    return [(w, s) for w in powers for s in powers if w + s <= n]


def _many(n: int, quick: bool, ranks: Ranks) -> _Said:
    cases, plan = cases_of(n), TRAINING[quick]
    parts = {"crowd": CROWD[quick] | {"cases": cases}, "training": plan}
    found = ranks.scenario("ps_training:many", n, parts)
    rows, notes = crowd_rows(cases, found["crowd"])
    if not found["training"]:
        return rows, [*notes, "digits: not measured, scikit-learn is not installed"]
    more, said = training_rows(n, found["training"], plan)
    return rows + more, notes + said


def crowd_rows(cases: list[tuple[int, int]], found: dict[str, Any]) -> _Said:
    """Return the rows of updates per second, and of staleness. Local: a pure function."""
    rows: _Rows = []
    for (workers, servers), rates in zip(cases, found["rates"], strict=True):
        key, title = f"{workers}w{servers}s", f"workers: {workers}, servers: {servers}, async"
        rows.append(sampled(f"rate_{key}", f"{title}: updates of 1 MiB", "/s", rates))
        passed = [2 * MIB * rate for rate in rates]
        rows.append(sampled(f"bytes_{key}", "  pulled and pushed", "GB/s", passed))
    staleness = found["staleness"]
    count = sum(many for _, many in staleness)
    shares = [0] * (HIGH + 1)
    for late, many in staleness:
        shares[min(late, HIGH)] += many
    for late, many in enumerate(shares):
        what = f"{late}{' and more' if late == HIGH else ''} updates late"
        what = f"{title}: gradients {what}" if late == 0 else f"  {what}"
        rows.append(figure(f"staleness_{late}", what, "%", many / count, count))
    most = max(late for late, _ in staleness)
    rows.append(figure("staleness_max", "  the latest", "updates", most, count))
    counts = ", ".join(f"{late}: {many}" for late, many in staleness)
    return rows, [f"staleness, {title}: updates late: gradients: {counts}."]


def _hosts(quick: bool, ranks: Ranks) -> _Said:
    crowd = CROWD[quick] | {"cases": [(2, 1), (2, 2)]}
    plan = {"pulls": _pulls(quick), "crowd": crowd}
    hosts = TwoHosts(ranks, programs=True)
    found, why = _elsewhere(hosts, "two hosts", "ps_crowd:apart", plan)
    if not found:
        return [], why
    rows = away_rows("hosts", "2 hosts", found["pulls"])
    rows += grown_rows("hosts", "2 hosts", *found["crowd"]["rates"])
    return rows, [
        "2 hosts: network namespaces joined by a bridge, servers on one, workers on the other, all on "
        "this machine."
    ]


def _links(quick: bool, ranks: Ranks) -> _Said:
    plan = LINKS[quick] | {"cases": [(2, 1), (2, 2)]}
    links = SlowLinks(ranks, 4, 2, MBIT)
    found, why = _elsewhere(links, "slow cards", "ps_crowd:crowd", plan)
    if not found:
        return [], why
    one, both = found["rates"]
    return grown_rows("links", "slow cards", one, both, GROWS), [
        f"slow cards: network namespaces with a rank each; those of the servers pass {MBIT} Mbit/s "
        "each way."
    ]


def _elsewhere(
    hosts: SeveralHosts, name: str, where: str, plan: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Run a scenario on hosts; return what it found, or nothing and why it was not measured.

    That MPI does not run there is told apart from a measurement that fails, which is an error.
    """
    with hosts:
        why = hosts.why_not()
        if not why:
            try:
                hosts.scenario("allreduce_apart:houses", {})
            except BenchError as error:
                last = str(error).strip().splitlines()[-1]
                why = f"MPI does not run on them: {last}"
        if why:
            return {}, [f"{name}: not measured, {why}"]
        return hosts.scenario(where, plan), []


def grown_rows(
    key: str, where: str, one: list[float], both: list[float], goal: Goal | None = None
) -> _Rows:
    """Return the rows of updates by one server and by two. Local: a pure function."""
    more = summarize(both).median / summarize(one).median
    what = f"{where}, 2 workers, 1 server: updates of 1 MiB"
    return [
        sampled(f"{key}_rate_1s", what, "/s", one),
        sampled(f"{key}_rate_2s", "  2 servers", "/s", both),
        figure(f"{key}_grown", "  2 servers / 1", "x", more, len(both), goal),
    ]


# -- a slow worker -----------------------------------------------------------------------------


def training_rows(n: int, found: dict[str, Any], plan: dict[str, Any]) -> _Said:
    """Return the rows of seconds to a loss. Local: a pure function."""
    rates, seconds = found["rates"], found["seconds"]
    rows: _Rows = []
    for mode, title in MODES.items():
        head = (
            ""
            if rows
            else f"digits, loss {plan['target']:g}, a worker {plan['slower']} times slower: "
        )
        what = f"{head}{title}, rate {rates[mode]:g}"
        raw = seconds["bsp"] if rows else None
        rows.append(sampled(f"digits_{mode}", what, "s", seconds[mode], raw))
    medians = {mode: summarize(took).median for mode, took in seconds.items()}
    sooner = medians["bsp"] / min(medians["ssp"], medians["async"])
    what = "  BSP / the sooner of SSP and Async"
    count = len(seconds["bsp"])
    rows.append(figure("digits_sooner", what, "x", sooner, count, at_least(SOONER, "x")))
    return rows, [
        f"digits: {n - 1} workers, a server; x raw: BSP. A simulation of separate machines: an "
        f"iteration of a worker lasts {1e3 * plan['step']:g} ms from its pull on, {plan['slower']} "
        "times as long at the last one, in which it computes its gradient and waits. The rate of "
        f"each is the best of {', '.join(f'{rate:g}' for rate in plan['rates'])}, of "
        f"{len(plan['search'])} other seeds; {count} seeds, of which "
        f"{found['missed']} runs of all did not come to the loss in {plan['limit']:g} s and "
        "count as that."
    ]  # fmt: skip
