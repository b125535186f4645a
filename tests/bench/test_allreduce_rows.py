"""What the benchmark of allreduce makes of samples: which form of MPI it compares with, its goals."""

import pytest

from mpiml.bench.allreduce import best_of, size_rows
from mpiml.bench.allreduce_hosts import host_rows
from mpiml.bench.allreduce_parts import part_rows

WAYS = ("mpi", "mpi_in_place", "mpi_new", "bucket", "shared", "outside", "new")


def samples(**seconds):
    return {way: [seconds.get(way, 1.0)] for way in WAYS} | {
        way: [value] for way, value in seconds.items()
    }


def row(rows, key):
    (found,) = [row for row in rows if row.key == key]
    return found


def test_the_faster_of_both_forms_is_what_ratios_refer_to():
    assert best_of(samples(mpi=2.0, mpi_in_place=3.0)) == {"mpi": [2.0]}
    assert best_of(samples(mpi=2.0, mpi_in_place=1.5)) == {"mpi_in_place": [1.5]}
    rows = size_rows("1 MiB", samples(mpi=2.0, mpi_in_place=3.0, bucket=0.5), 2)
    assert row(rows, "1MiB_bucket").ratio == pytest.approx(0.25)
    assert row(rows, "1MiB_mpi_in_place").ratio == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("size", "n", "intel", "bucket", "reached"),
    [
        ("8 B", 2, False, 1.19, True),
        ("4 KiB", 2, False, 1.21, False),
        ("64 KiB", 2, False, 0.199, True),
        ("64 MiB", 2, False, 0.201, False),
        ("64 KiB", 4, False, 0.33, True),
        ("16 MiB", 4, False, 0.34, False),
        ("64 KiB", 2, True, 0.1, None),
        ("1 MiB", 2, True, 0.33, True),
        ("1 MiB", 2, True, 0.34, False),
        ("256 MiB", 2, False, 0.1, None),
    ],
)
def test_the_goal_of_a_bucket_depends_on_size_ranks_and_mpi(size, n, intel, bucket, reached):
    rows = size_rows(size, samples(bucket=bucket, mpi_in_place=1.5), n, intel)
    assert row(rows, f"{size.replace(' ', '')}_bucket").reached is reached


def test_copying_may_cost_5_microseconds_more_below_1_mib_and_5_percent_from_there():
    def reached(size, way, **seconds):
        rows = size_rows(size, samples(**seconds), 2)
        return row(rows, f"{size.replace(' ', '')}_{way}").reached

    near = {"mpi": 10e-6, "mpi_in_place": 20e-6}
    assert reached("64 KiB", "outside", outside=14.9e-6, **near)
    assert not reached("64 KiB", "outside", outside=15.1e-6, **near)
    assert reached("1 MiB", "outside", outside=10.4e-6, **near)
    assert not reached("1 MiB", "outside", outside=10.6e-6, **near)
    # a new array is compared with MPI into a new array
    assert reached("1 MiB", "new", new=2.0, mpi_new=1.95)
    assert not reached("1 MiB", "new", new=2.0, mpi_new=1.9)


def test_the_bound_is_the_copy_over_the_sum():
    found = samples(bucket=10e-3, shared=5e-3) | {"copy": [7.1e-3]}
    rows = size_rows("64 MiB", found, 2)
    assert row(rows, "64MiB_bucket_bound").value == pytest.approx(71)
    assert row(rows, "64MiB_bucket_bound").reached
    assert row(rows, "64MiB_shared_bound").value == pytest.approx(142)
    assert row(rows, "64MiB_speed").value == pytest.approx(2 * 2 * (64 << 20) / 7.1e-3 / 1e9)
    slow = size_rows("64 MiB", found | {"bucket": [10.2e-3]}, 2)
    assert not row(slow, "64MiB_bucket_bound").reached


def parts(**changed):
    found = {
        "many": {"1 MiB": {"one": [1.0], "many": [1.0]}},
        "check": {"off": [1.0], "on": [1.0]},
        "halves": {"float32": [1.0], "float16": [0.5]},
        "fused": {"adam": {"apart": [1.7], "fused": [1.0]}},
        "memory": {"own": 1.0, "shared": 1.5},
    }
    return part_rows(found | changed, 2)


def test_parts_that_cost_no_more_than_they_may_reach_their_goals():
    rows, notes = parts()
    assert all(row.reached is not False for row in rows)
    assert sum(row.reached is True for row in rows) == 5
    assert notes == [
        "bfloat16: not measured, ml_dtypes is not installed (pip install ml_dtypes)"
    ]


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("many_1MiB", {"many": {"1 MiB": {"one": [1.0], "many": [1.11]}}}),
        ("check_on", {"check": {"off": [1.0], "on": [1.04]}}),
        ("fused_sgd", {"fused": {"sgd": {"apart": [1.6], "fused": [1.0]}}}),
        ("memory_own", {"memory": {"own": 2.0, "shared": 1.5}}),
        ("memory_shared", {"memory": {"own": 1.0, "shared": 2.0}}),
    ],
)
def test_a_part_that_costs_too_much_does_not_reach_its_goal(key, changed):
    rows, _ = parts(**changed)
    assert [row.key for row in rows if row.reached is False] == [key]


@pytest.mark.parametrize(("bucket", "reached"), [(2.01, True), (2.1, False)])
def test_no_more_bytes_between_hosts_than_among_leaders(bucket, reached):
    passed = {"mpi": 4e6, "mpi_in_place": 4e6, "leaders": 2e6, "bucket": bucket * 1e6}
    took = {"mpi": [4.0], "mpi_in_place": [3.0], "leaders": [2.0], "bucket": [1.5]}
    rows = host_rows("1 MiB", took, passed)
    assert row(rows, "hosts_1MiB_bucket").ratio == pytest.approx(0.5)
    link = row(rows, "hosts_1MiB_bucket_link")
    assert link.reached is reached
    assert link.value == pytest.approx(bucket * 1e6 / (1 << 20))
