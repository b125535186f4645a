"""What the first server decides: entries for all, rates, and what is counted."""

import pytest

from mpiml.consistency import BSP, SSP, Async, Backup, DropStale
from mpiml.errors import UsageError
from mpiml.roles.parameter_server.deciding import Decider
from mpiml.roles.parameter_server.following import Apply, Drop


def test_gradients_become_entries_in_their_order():
    decider = Decider(BSP(), ["w/0", "w/1"])
    assert decider.push(1, 7, 0) == (True, [])
    assert decider.push(0, 3, 0) == (True, [Apply(((0, 3), (1, 7)), (0, 1), (0, 0))])
    assert decider.readable(0)
    assert not decider.open_to_all


def test_a_stale_gradient_is_dropped_and_counted():
    decider = Decider(DropStale(0), ["w/0"])
    decider.push(0, 0, 0)
    assert decider.push(0, 1, 0) == (False, [Drop((0, 1))])
    assert decider.statistics()["dropped"] == 1
    with pytest.raises(UsageError, match="0 to 1, got 2"):
        decider.push(0, 2, 2)


def test_rates_are_by_staleness():
    decider = Decider(Async(by_staleness=True), ["w/0", "w/1"])
    for number, rate in enumerate([1, 1 / 2, 1 / 3]):
        _, (entry,) = decider.push(0, number, 0)
        assert entry.rate == rate


def test_the_histogram_is_exact_where_it_matters_and_never_long():
    decider = Decider(Async(), ["w/0"])
    for number in range(1000):
        decider.push(0, number, 0)
    found = decider.statistics()["staleness"]
    assert {i: found.pop(i) for i in range(16)} == dict.fromkeys(range(16), 1)
    assert found == {16: 16, 32: 32, 64: 64, 128: 128, 256: 256, 512: 488}


def test_a_gradient_that_is_not_finite_is_an_iteration_without_one():
    decider = Decider(BSP(), ["w/0", "w/1"])
    decider.push(0, 0, 0)
    (entry,) = decider.skip(1)
    assert entry.workers == (0,)
    assert decider.statistics()["nonfinite"] == 1
    stale = Decider(SSP(0), ["w/0", "w/1"])
    stale.skip(0)
    assert stale.statistics()["clocks"] == [0, 0]  # that is told by `clock`


def test_who_is_waited_for_is_named():
    names = [f"worker/{i}" for i in range(7)]
    for consistency in (BSP(), SSP(0), Backup(0)):
        decider = Decider(consistency, names)
        decider.push(0, 0, 0)
        if isinstance(consistency, SSP):
            decider.clock(0)
        said = decider.lagging(0, "a pull")
        assert said.startswith(
            f"a pull of worker/0, by {consistency!r}, waits for worker/1, worker/2,"
        )
        assert "worker/4, ..." in said
        assert "handle.reader()" in said


def test_a_clock_that_was_never_told_is_said():
    decider = Decider(SSP(3), ["w/0", "w/1"])
    for number in range(5):
        decider.push(0, number, 0)
        decider.push(1, number, 0)
        decider.clock(1)
    assert decider.forgotten(0).startswith(
        "w/0 has pushed 5 gradients and never called clock()"
    )
    assert decider.forgotten(1) == ""
