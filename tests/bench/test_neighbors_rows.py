"""Rows of averages with neighbours: which are compared with which, and their goals."""

import pytest

from mpiml.bench.neighbors import size_rows, slow_rows


def found(**changed):
    ways = ("raw_ring", "ring", "raw_one_peer", "one_peer", "mpi", "allreduce")
    return {way: [1e-5] for way in ways} | changed


@pytest.mark.parametrize(
    ("size", "factor", "reached"),
    [("8 B", 2.9, True), ("64 KiB", 3.1, False), ("1 MiB", 1.05, True), ("16 MiB", 1.2, False)],
)
def test_averages_are_compared_with_raw_messages_on_the_same_edges(size, factor, reached):
    rows = {
        row.key.partition("_")[2]: row
        for row in size_rows(size, found(ring=[factor * 1e-5], raw_one_peer=[1e-6], mpi=[2e-5]))
    }
    assert rows["ring"].ratio == pytest.approx(factor)
    assert rows["ring"].reached is reached
    assert rows["one_peer"].ratio == pytest.approx(10)
    assert rows["one_peer"].reached is False
    assert rows["allreduce"].ratio == pytest.approx(0.5)
    assert all(row.ratio is None and row.reached is None for row in map(rows.get, rows) if
               row.key.endswith(("raw_ring", "raw_one_peer", "mpi")))  # fmt: skip


def test_steps_beside_a_slow_rank_are_compared_with_the_work_alone():
    took = {"work": [2e-3], "all": [8e-3], "neighbours": [9e-3], "adpsgd": [3e-3]}
    work, *others = slow_rows(took, 4)
    assert "4 times slower" in work.what
    assert work.ratio is None
    assert [row.ratio for row in others] == pytest.approx([4, 4.5, 1.5])
