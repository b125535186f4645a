"""The statistics of the benchmarks, their goals, and both ways to show them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.bench.measure import (
    Report,
    at_least,
    at_most,
    figure,
    ratio_at_most,
    render,
    sampled,
    summarize,
    to_json,
)


def test_quartiles_lie_between_samples():
    found = summarize([4.0, 1.0, 3.0, 2.0])
    assert (found.n, found.median, found.q1, found.q3) == (4, 2.5, 1.75, 3.25)
    assert (found.mean, found.max) == (2.5, 4.0)
    assert found.p99 == pytest.approx(3.97)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1))
def test_statistics_are_in_order(samples):
    found = summarize(samples)
    low, high = min(samples), max(samples)
    assert low <= found.q1 <= found.median <= found.q3 <= found.max == high
    assert found.q3 <= found.p99 * (1 + 1e-12) or len(samples) == 1
    assert low * (1 - 1e-12) <= found.mean <= high * (1 + 1e-12)


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_what_was_not_measured_is_an_error(samples):
    with pytest.raises(ValueError, match="expected finite samples"):
        summarize(samples)


def test_units_scale_values_and_quartiles_but_not_ratios():
    row = sampled("k", "call", "µs", [1e-6, 3e-6, 2e-6], [1e-6, 1e-6], ratio_at_most(2))
    assert row.value == pytest.approx(2)
    assert (row.low, row.high) == (pytest.approx(1.5), pytest.approx(2.5))
    assert row.ratio == pytest.approx(2)
    assert row.samples == 3


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [
        (at_most(10, "ms"), 0.010, True),
        (at_most(10, "ms"), 0.011, False),
        (at_least(95, "%"), 0.95, True),
        (at_least(95, "%"), 0.94, False),
        (at_least(100, "/s"), 99.0, False),
    ],
)
def test_goals_are_in_the_unit_of_their_text(goal, value, reached):
    assert figure("k", "x", "ms", value, goal=goal).reached is reached


def test_a_ratio_decides_a_goal_of_a_ratio():
    assert sampled("k", "x", "s", [3.0], [1.0], ratio_at_most(3)).reached is True
    assert sampled("k", "x", "s", [3.1], [1.0], ratio_at_most(3)).reached is False


def report():
    rows = [
        sampled("raw", "raw", "µs", [1e-6]),
        sampled("small", "a call", "µs", [12e-6, 14e-6], [2e-6], ratio_at_most(3)),
        figure("most", "  longest", "ms", 12345.0, 2, at_least(1, "ms")),
    ]
    return Report("rpc", {"cpu": "some", "cores": "2 of 2"}, rows, ["a note"])


def test_the_table_is_aligned_and_says_what_was_reached():
    lines = render(report()).splitlines()
    head = next(line for line in lines if line.startswith("what"))
    small = next(line for line in lines if line.startswith("a call"))
    most = next(line for line in lines if line.startswith("  longest"))
    assert small.split() == [
        "a", "call", "13", "µs", "12.5", "..", "13.5", "6.50", "<=", "3", "x", "raw", "NO",
    ]  # fmt: skip
    assert "12,345,000 ms" in most
    assert most.endswith("yes")
    column = head.index("reached")
    assert small[column:] == "NO"
    assert most[column:] == "yes"
    assert lines[-1] == "a note"
    assert all(line == line.rstrip() for line in lines)


def test_json_has_the_same_rows():
    found = json.loads(to_json(report()))
    assert found["bench"] == "rpc"
    assert found["facts"]["cpu"] == "some"
    assert [row["key"] for row in found["rows"]] == ["raw", "small", "most"]
    assert found["rows"][1]["reached"] is False
    assert found["rows"][0]["goal"] == ""


def test_json_refuses_a_value_that_is_no_number():
    broken = report()
    broken.rows.append(broken.rows[0]._replace(value=math.nan))
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(broken)
