"""Samples and their statistics, rows with their goals, and a report as text and as JSON.

Every figure is the median of samples with its quartiles unless the row names another
statistic; warm-up is left out by whoever takes the samples. Raw MPI is sampled in blocks that
alternate with ours, so that a ratio compares the same minutes of the same machine.
"""

import json
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

__all__ = [
    "BATCH",
    "Goal",
    "Report",
    "Row",
    "Summary",
    "at_least",
    "at_most",
    "batches",
    "figure",
    "percentile",
    "ratio_at_most",
    "render",
    "sampled",
    "summarize",
    "timed",
    "to_json",
]

#: Units of rows, and how many of them are one of what was measured (seconds, bytes, shares).
UNITS = {
    "µs": 1e6,
    "ms": 1e3,
    "s": 1.0,
    "%": 100.0,
    "MiB": 1 / (1 << 20),
    "/s": 1.0,
    "GB/s": 1e-9,
    "calls": 1.0,
    "updates": 1.0,
    "M/s": 1e-6,
    "ns": 1e9,
    "x": 1.0,
}
#: Small calls are timed so many at a time: reading the clock costs a tenth of one.
BATCH = 10
TITLES = ("what", "value", "quartiles", "x raw", "goal", "reached")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of ``call()``, and what it returned. Local: reads the clock."""
    began = perf_counter()
    result = call()
    return perf_counter() - began, result


def batches(call: Callable[[], Any], count: int, warm: int, batch: int = BATCH) -> list[float]:
    """Return the seconds of a call, from `count` batches, after `warm` calls.

    Local: reads the clock.
    """
    for _ in range(warm):
        call()
    seconds = []
    for _ in range(count):
        began = perf_counter()
        for _ in range(batch):
            call()
        seconds.append((perf_counter() - began) / batch)
    return seconds


class Summary(NamedTuple):
    """What is said of a set of samples, in their unit."""

    n: int
    median: float
    q1: float
    q3: float
    mean: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the sorted samples lie, linear between two."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(samples: Sequence[float]) -> Summary:
    """Return the statistics of at least one sample.

    Raises
    ------
    ValueError
        There are no samples, or one is not finite: something was not measured.
    """
    ordered = sorted(samples)
    if not ordered or not all(map(math.isfinite, ordered)):
        raise ValueError(f"expected finite samples, got {len(ordered)}: {ordered[:3]}")
    return Summary(
        len(ordered),
        percentile(ordered, 0.5),
        percentile(ordered, 0.25),
        percentile(ordered, 0.75),
        math.fsum(ordered) / len(ordered),
        percentile(ordered, 0.99),
        ordered[-1],
    )


class Goal(NamedTuple):
    """What a row must reach: its text, and the test on value and ratio (base units)."""

    text: str
    test: Callable[[float, float | None], bool]


def at_most(limit: float, unit: str, text: str | None = None) -> Goal:
    """Return the goal of a value of at most `limit`, a number of `unit`."""
    scale = UNITS[unit]
    return Goal(text or f"<= {limit:g} {unit}", lambda value, ratio: value * scale <= limit)


def at_least(limit: float, unit: str, text: str | None = None) -> Goal:
    """Return the goal of a value of at least `limit`, a number of `unit`."""
    scale = UNITS[unit]
    return Goal(text or f">= {limit:,g} {unit}", lambda value, ratio: value * scale >= limit)


def ratio_at_most(limit: float) -> Goal:
    """Return the goal of a value of at most `limit` times the raw one."""
    return Goal(
        f"<= {limit:g} x raw", lambda value, ratio: ratio is not None and ratio <= limit
    )


class Row(NamedTuple):
    """One line of a report; `value`, `low` and `high` in `unit`."""

    key: str
    what: str
    unit: str
    value: float
    low: float | None = None
    high: float | None = None
    samples: int = 1
    ratio: float | None = None
    goal: str = ""
    reached: bool | None = None


def sampled(
    key: str,
    what: str,
    unit: str,
    samples: Sequence[float],
    raw: Sequence[float] | None = None,
    goal: Goal | None = None,
) -> Row:
    """Return the row of the median of `samples` (base units), beside that of `raw`."""
    found = summarize(samples)
    ratio = None if raw is None else found.median / summarize(raw).median
    scale = UNITS[unit]
    row = figure(key, what, unit, found.median, found.n, goal, ratio)
    return row._replace(low=found.q1 * scale, high=found.q3 * scale)


def figure(
    key: str,
    what: str,
    unit: str,
    value: float,
    samples: int = 1,
    goal: Goal | None = None,
    ratio: float | None = None,
) -> Row:
    """Return the row of one value (base units) that is no median: a maximum, a share."""
    reached = None if goal is None else bool(goal.test(value, ratio))
    text = "" if goal is None else goal.text
    return Row(
        key, what, unit, value * UNITS[unit], None, None, samples, ratio, text, reached
    )  # fmt: skip


class Report(NamedTuple):
    """What a benchmark found."""

    name: str
    facts: dict[str, Any]
    rows: list[Row]
    notes: list[str]


def to_json(report: Report) -> str:
    """Return the report as JSON; a value that is not finite is an error."""
    found = {
        "bench": report.name,
        "facts": report.facts,
        "rows": [row._asdict() for row in report.rows],
        "notes": report.notes,
    }
    return json.dumps(found, indent=2, allow_nan=False, ensure_ascii=False)


def render(report: Report) -> str:
    """Return the report as aligned text: facts, rows, notes."""
    width = max(map(len, report.facts))
    lines = [f"mpiml bench {report.name}"]
    lines += [f"  {key:<{width}}  {value}" for key, value in report.facts.items()]
    table = [TITLES, *map(_cells, report.rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(TITLES))]
    lines.append("")
    for cells in table:
        # words to the left, numbers to the right
        padded = [
            cell.rjust(widths[i]) if i in (1, 3) else cell.ljust(widths[i])
            for i, cell in enumerate(cells)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.append("")
    lines.append("value: the median of the samples unless the row says otherwise.")
    lines += report.notes
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    between = "" if row.low is None or row.high is None else f"{_n(row.low)} .. {_n(row.high)}"
    return (
        row.what,
        f"{_n(row.value)} {row.unit}",
        between,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.goal,
        "" if row.reached is None else ("yes" if row.reached else "NO"),
    )


def _n(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
