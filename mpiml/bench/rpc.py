"""Calls: one after the other, in flight, to a service that computes, from a crowd, to a group."""

from typing import Any

from mpiml.bench.measure import (
    Row,
    at_least,
    at_most,
    figure,
    ratio_at_most,
    sampled,
    summarize,
)
from mpiml.bench.spawn import Options, Ranks
from mpiml.errors import UsageError

__all__ = ["measure"]

CALLS = {
    False: {"rounds": 10, "batches": 200, "flights": 10_000, "warm": 300, "deep": 64},
    True: {"rounds": 2, "batches": 10, "flights": 200, "warm": 50, "deep": 64},
}
BUSY = {
    False: {"rounds": 3, "calls": 20_000, "warm": 100, "quiet_s": 1.5},
    True: {"rounds": 1, "calls": 100, "warm": 10, "quiet_s": 0.2},
}
CROWD = {
    False: {"rounds": 5, "seconds": 2.0, "warm_s": 0.5},
    True: {"rounds": 1, "seconds": 0.3, "warm_s": 0.2},
}
GROUP = {
    False: {"nbytes": 1 << 20, "repeats": 50},
    True: {"nbytes": 1 << 20, "repeats": 3},
}
KINDS = {
    "matmul": "NumPy products",
    "elementwise": "NumPy, element-wise",
    "python": "pure Python",
}


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench rpc``.

    Local: starts ranks; no MPI in this process.
    """
    many = 8 if options.ranks is None else options.ranks
    if many < 4:
        raise UsageError(f"--ranks {many}: rpc compares them with 3 ranks; expected 4 or more")
    rows = _calls(ranks.scenario("rpc_calls:calls", 2, CALLS[options.quick]))
    for kind, title in KINDS.items():
        plan = BUSY[options.quick] | {"kind": kind}
        rows += _busy(kind, title, ranks.scenario("rpc_busy:busy", 2, plan))
    rows += _crowd(many, options, ranks)
    rows += _group(many - 1, ranks.scenario("rpc_group:group", many, GROUP[options.quick]))
    return rows, [
        "Small calls are timed ten at a time, all others one by one.",
        "run(): its speed is a share of that of the same loop in the same process with no "
        "program running.",
    ]


def _calls(found: dict[str, Any]) -> list[Row]:
    return [
        sampled("raw_small", "raw send/recv, small tuple, there and back", "µs", found["raw_small"]),
        sampled(
            "small", "blocking call, small arguments", "µs", found["small"], found["raw_small"],
            ratio_at_most(3),
        ),
        sampled("raw_flight", "raw, 64 in flight", "/s", found["raw_flight"]),
        sampled(
            "flight", "futures, 64 in flight", "/s", found["flight"], found["raw_flight"],
            at_least(100_000, "/s"),
        ),
    ]  # fmt: skip


def _busy(kind: str, title: str, found: dict[str, Any]) -> list[Row]:
    calls = summarize(found["calls"])
    count = calls.n
    return [
        sampled(f"busy_{kind}", f"run() in {title}: call", "ms", found["calls"]),
        figure(f"busy_{kind}_mean", "  mean", "ms", calls.mean, count, at_most(0.5, "ms")),
        figure(f"busy_{kind}_p99", "  99th percentile", "ms", calls.p99, count, at_most(10, "ms")),
        sampled(
            f"busy_{kind}_called", "  speed of run() with calls", "%", found["called"], None,
            at_least(50, "%"),
        ),
        sampled(
            f"busy_{kind}_quiet", "  speed of run() without calls", "%", found["quiet"], None,
            at_least(95, "%"),
        ),
        sampled(f"busy_{kind}_body", "  speed in a body, no service", "%", found["body"]),
    ]  # fmt: skip


def _crowd(many: int, options: Options, ranks: Ranks) -> list[Row]:
    """Compare `many` ranks with 3, one start of each in turn."""
    plan = CROWD[options.quick]
    found: dict[int, list[dict[str, Any]]] = {many: [], 3: []}
    for _ in range(int(plan["rounds"])):
        for size, seen in found.items():
            seen.append(ranks.scenario("rpc_crowd:crowd", size, plan))
    rates = {
        size: [len(one["calls"]) / one["seconds"] for one in seen]
        for size, seen in found.items()
    }
    raw_rates = [len(one["raw"]) / one["seconds"] for one in found[many]]
    calls = [s for one in found[many] for s in one["calls"]]
    raw = [s for one in found[many] for s in one["raw"]]
    least = min(min(one["each"]) for one in found[many])
    few = summarize(rates[3]).median
    who = f"{many - 1} clients"
    return [
        sampled("crowd_raw", f"raw, {who}: call", "µs", raw),
        sampled("crowd", f"{who} on 1 service: call", "µs", calls, raw),
        figure("crowd_max", "  longest call", "ms", max(calls), len(calls), at_most(50, "ms")),
        figure("crowd_raw_max", "  longest of raw", "ms", max(raw), len(raw)),
        sampled("crowd_few_rate", "  throughput with 2 clients", "/s", rates[3]),
        sampled(
            "crowd_rate", f"  throughput with {who}", "/s", rates[many], raw_rates,
            at_least(few, "/s", ">= with 2 clients"),
        ),
        figure("crowd_least", "  calls of the least served client", "calls", least, len(calls)),
    ]  # fmt: skip


def _group(replicas: int, found: dict[str, Any]) -> list[Row]:
    """Compare the sum of all replicas' arrays by the caller with that by `reduced`."""
    return [
        sampled(
            "group_gathered", f"1 MiB of {replicas} replicas: gathered, summed", "ms",
            found["gathered"],
        ),
        sampled("group_reduced", '  the same by reduced("sum")', "ms", found["reduced"]),
        figure("group_gathered_bytes", "  received when gathered", "MiB", found["gathered_bytes"]),
        figure(
            "group_reduced_bytes", "  received by reduced", "MiB", found["reduced_bytes"], 1,
            at_most(1.001, "MiB"),
        ),
    ]  # fmt: skip
