"""Topics: one way of a message, messages in a row, and one array to several, beside raw mpi4py."""

from mpiml.bench.measure import Row, ratio_at_most, sampled
from mpiml.bench.spawn import Options, Ranks
from mpiml.errors import UsageError

__all__ = ["measure"]

SIZES = {"1MiB": 1 << 20, "16MiB": 16 << 20}
ONE_WAY = {
    False: {"rounds": 6, "batches": 200, "arrays": 20, "warm": 20, "sizes": SIZES},
    True: {"rounds": 2, "batches": 10, "arrays": 2, "warm": 2, "sizes": SIZES},
}
RATE = {
    False: {"rounds": 6, "messages": 20_000},
    True: {"rounds": 2, "messages": 500},
}
FAN_OUT = {
    False: {"rounds": 4, "arrays": 20, "warm": 3, "nbytes": 1 << 20},
    True: {"rounds": 1, "arrays": 2, "warm": 1, "nbytes": 1 << 20},
}
CLOSE = 2


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench pubsub``.

    Local: starts ranks; no MPI in this process.
    """
    many = 4 if options.ranks is None else options.ranks
    if many < 3:
        raise UsageError(
            f"--ranks {many}: pubsub sends to several subscribers; expected 3 or more"
        )
    quick = options.quick
    found = ranks.scenario("pubsub_inside:one_way", 2, ONE_WAY[quick])
    rates = ranks.scenario("pubsub_inside:rate", 2, RATE[quick])
    wide = ranks.scenario("pubsub_inside:fan_out", many, FAN_OUT[quick])
    close = ratio_at_most(CLOSE)
    raw = found["raw_small"]
    rows = [
        sampled("raw_small", "raw send/recv, small tuple, one way", "µs", raw),
        sampled("small", "topic, Keep(100)", "µs", found["small"], raw, close),
        sampled("small_latest", "topic, latest", "µs", found["small_latest"], raw, close),
    ]
    for name in SIZES:
        unit = "ms" if name == "16MiB" else "µs"
        title, raw = name.replace("MiB", " MiB"), found[f"raw_{name}"]
        rows += [
            sampled(f"raw_{name}", f"raw Send/Recv, {title}, one way", unit, raw),
            sampled(name, "  topic", unit, found[name], raw, close),
            sampled(
                f"{name}_given", "  topic, handed over with give", unit, found[f"{name}_given"],
                raw, close,
            ),
        ]  # fmt: skip
    others = many - 1
    rows += [
        sampled("raw_rate", "raw, 1 KiB in a row", "/s", rates["raw_rate"]),
        sampled("rate", "topic, Keep(100), 1 KiB in a row", "/s", rates["rate"], rates["raw_rate"]),
        sampled(
            "raw_fan_out", f"raw, 1 MiB to {others} ranks, and their answers", "ms",
            wide["raw_fan_out"],
        ),
        sampled(
            "fan_out", f"topic, 1 MiB to {others} subscribers, and answers", "ms",
            wide["fan_out"], wide["raw_fan_out"], close,
        ),
    ]  # fmt: skip
    return rows, [
        "One way is half of there and back. Small messages are timed ten at a time.",
        "The raw receiver of an array has one buffer for all; a subscriber gets its own memory.",
    ]
