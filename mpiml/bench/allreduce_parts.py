"""What parts of the allreduce cost: many arrays, the check, half precision, memory, a fused step."""

from typing import Any

from mpiml.bench.measure import Goal, Row, at_most, figure, ratio_at_most, sampled
from mpiml.bench.spawn import Ranks

__all__ = ["part_rows", "parts"]

#: Rounds, repetitions of a block, and those before them.
PLANS: dict[bool, dict[str, Any]] = {
    False: {
        "many": {"1 MiB": (12, 20, 3), "16 MiB": (8, 6, 2)}, "check": (20, 40, 3),
        "halves": (8, 6, 2), "fused": (6, 4, 1), "memory": 64 << 20,
    },
    True: {
        "many": {"1 MiB": (1, 2, 1), "16 MiB": (1, 1, 1)}, "check": (1, 3, 1),
        "halves": (1, 1, 1), "fused": (1, 1, 1), "memory": 16 << 20,
    },
}  # fmt: skip


def parts(n: int, quick: bool, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes on the parts.

    Local: starts ranks; no MPI in this process.
    """
    found = ranks.scenario("allreduce_inside:inside", n, PLANS[quick])
    return part_rows(found, n)


def part_rows(found: dict[str, Any], n: int) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of what `inside` has found on `n` ranks. Local: pure."""
    rows: list[Row] = []
    for size, took in found["many"].items():
        key = size.replace(" ", "")
        rows += [
            sampled(f"one_{key}", f"{size} in one array", "ms", took["one"]),
            sampled(f"many_{key}", "  in 500 arrays", "ms", took["many"], took["one"],
                    ratio_at_most(1.1)),
        ]  # fmt: skip
    check, fused, halves = found["check"], found["fused"], found["halves"]
    rows += [
        sampled("check_off", "1 MiB, check=False", "µs", check["off"]),
        sampled("check_on", "  check=True", "µs", check["on"], check["off"],
                ratio_at_most(1.03)),
        sampled("halves_float32", "4 Mi elements: float32", "ms", halves["float32"]),
        *(
            sampled(f"halves_{name}", f"  {name}", "ms", took, halves["float32"])
            for name, took in halves.items() if name != "float32"
        ),
        *(row for name, took in fused.items() for row in _fused_rows(name, took)),
        figure("memory_own", "arena: bytes per rank, of the data", "%", found["memory"]["own"],
               goal=at_most(101, "%")),
        figure("memory_shared", "  with a shared result", "%", found["memory"]["shared"],
               goal=at_most(101 + 100 / n, "%", f"<= {101 + 100 / n:.4g} %")),
    ]  # fmt: skip
    notes = []
    if "bfloat16" not in halves:
        notes.append(
            "bfloat16: not measured, ml_dtypes is not installed (pip install ml_dtypes)"
        )
    return rows, notes


def _fused_rows(name: str, took: dict[str, list[float]]) -> list[Row]:
    goal = Goal("1.7 times faster", lambda value, ratio: (ratio or 1) * 1.7 <= 1)
    title = {"sgd": "SGD", "adam": "Adam"}[name]
    return [
        sampled(f"apart_{name}", f"64 MiB: in place, then {title} on every rank", "ms",
                took["apart"]),
        sampled(f"fused_{name}", f"  {title} fused", "ms", took["fused"], took["apart"], goal),
    ]  # fmt: skip
