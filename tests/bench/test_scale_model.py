"""The model of docs/scale.md: its limits, and what grows how."""

import pytest

from mpiml.bench.scale import fitted, sizes
from mpiml.bench.scale_model import Machine, launch, levels

OWN = Machine(
    L=2e-6, o=1e-6, g=1e-6, G=1e-10, frame=5e-6, duplicate=1e-4, work=5e-3, placing=5e-6
)


def test_levels_are_those_of_the_tree():
    assert levels(1) == [1]
    assert levels(9) == [1, 8]
    assert levels(10) == [1, 8, 1]
    assert levels(1000) == [1, 8, 64, 512, 415]
    assert all(sum(levels(n)) == n for n in range(1, 200))


def test_one_rank_pays_for_its_own_work_only():
    assert launch(OWN, 1) == (OWN.work, OWN.placing, 0, 0, 0)


def test_with_a_core_each_trees_and_collectives_grow_with_the_logarithm():
    few, many = launch(OWN, 100), launch(OWN, 10_000)
    assert many.work == few.work
    assert many.trees < 3 * few.trees
    assert many.collectives < 4 * few.collectives
    assert many.placing == pytest.approx(100 * few.placing)
    assert many.results == pytest.approx(100 * few.results, rel=0.1)
    assert many.total == pytest.approx(sum(many))


def test_ranks_that_share_cores_wait_for_each_other():
    two = OWN._replace(cores=2)
    assert launch(two, 2) == launch(OWN, 2)
    assert launch(two, 64).work == 32 * OWN.work
    assert launch(two, 64).collectives > 10 * launch(OWN, 64).collectives


def test_parameters_are_those_that_were_measured():
    found = {
        "pingpong": [3e-6], "send": [1e-6], "receive": [0.5e-6], "gap": [0.9e-6],
        "byte": [1e-10], "reduction": [4e-6], "duplicate": [5e-5], "call": [12e-6],
    }  # fmt: skip
    machine = fitted(found, 4e-6)
    assert machine.o == pytest.approx(0.75e-6)
    latency = machine.L
    assert latency == pytest.approx(1.5e-6)
    assert (
        pytest.approx(5.25e-6) == machine.frame
    )  # a half call is a way and a frame at each end
    assert fitted(found | {"send": [1.0]}, 0.0).L == 0.0  # an overhead is no more than the way


def test_sizes_are_powers_of_two_and_the_last():
    assert sizes(2) == [2]
    assert sizes(128) == [2, 4, 8, 16, 32, 64, 128]
    assert sizes(12) == [2, 4, 8, 12]
