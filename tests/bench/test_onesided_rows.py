"""What the benchmark of one-sided memory makes of samples: ratios, growth, goals."""

import pytest

from mpiml.bench.onesided import WAYS, alone_rows, apart_rows, racing_rows
from mpiml.bench.onesided_inside import ROWS, rows_of
from tests.bench.test_allreduce_rows import row
from tests.bench.test_command import APART


@pytest.mark.parametrize(
    ("key", "model", "racy", "fast", "cheap"),
    [("rcv1", 9e-9, 2e-9, True, True), ("rcv1", 11e-9, 1e-9, False, False),
     ("64MiB", 11e-9, 1e-9, None, None)],
)  # fmt: skip
def test_components_of_one_rank(key, model, racy, fast, cheap):
    rows = alone_rows(key, {"model": [model], "racy": [racy]})
    assert row(rows, f"alone_{key}").value == pytest.approx(1e-6 / model)
    assert row(rows, f"alone_{key}").reached is fast
    assert row(rows, f"alone_{key}_cost").ratio == pytest.approx(model / racy)
    assert row(rows, f"alone_{key}_cost").reached is cheap


def test_growth_is_of_all_ranks_over_one_alone():
    """3 ranks, each at half the speed of one alone: 1.5 times the updates."""
    one = {way: [1e-6] for way in WAYS}
    rows = racing_rows("rcv1_zipf", 3, one, {way: [2e-6] for way in WAYS})
    for way in WAYS:
        assert row(rows, f"racing_rcv1_zipf_{way}").value == pytest.approx(1.5)
        assert row(rows, f"racing_rcv1_zipf_{way}_grown").value == pytest.approx(1.5)


def test_what_goes_to_another_host_is_compared_with_the_faster_window():
    took = {way: [8.0] for way in APART} | {
        "accumulate_given": [5.0],
        "get": [4.0],
        "push": [10.0],
    }
    rows = apart_rows("hosts", "2 hosts", {"took": took})
    assert row(rows, "hosts_push").ratio == pytest.approx(2)
    assert row(rows, "hosts_push").reached
    assert row(rows, "hosts_pull").ratio == pytest.approx(2)
    assert row(rows, "hosts_snapshot").reached
    assert row(rows, "hosts_pull_1MiB").reached


@pytest.mark.parametrize("skew", [0.0, 1.1])
def test_rows_are_a_csr_block(skew):
    rows = rows_of(1000, 7, skew, 1)
    assert rows.shape == (ROWS, 1000)
    assert rows.indptr.tolist() == list(range(0, 7 * ROWS + 1, 7))
    assert rows.indices.min() >= 0
    assert rows.indices.max() < 1000
    counts = sorted(map((rows.indices.tolist()).count, range(1000)))
    assert (counts[-1] > 20 * counts[500]) == (skew > 0)
