"""Rows of the parameter server: what is compared with what, and the goals; learning, by hand."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import mpiml
from mpiml.bench import ps, ps_crowd
from mpiml.bench.ps import (
    GROWS,
    TRAINING,
    away_rows,
    cases_of,
    crowd_rows,
    grown_rows,
    here_rows,
    push_rows,
    training_rows,
)
from mpiml.bench.ps_crowd import within
from mpiml.bench.ps_links import SlowLinks
from mpiml.bench.ps_training import best_rate, gradient, initial, loss
from mpiml.bench.spawn import BenchError
from mpiml.bench.two_hosts import TwoHosts


@pytest.mark.parametrize(("seconds", "reached"), [(1.05e-3, True), (1.2e-3, False)])
def test_a_pull_on_one_host_is_compared_with_memcpy(seconds, reached):
    found = {"memcpy": [1e-3], "pull": [seconds], "raw": [9.0]}
    copy, pull = here_rows("16MiB", found)
    assert pull.ratio == pytest.approx(1000 * seconds)
    assert pull.reached is reached
    assert copy.unit == "ms"
    assert [row.goal for row in here_rows("1MiB", found)] == ["", ""]


@pytest.mark.parametrize(("seconds", "reached"), [(1.2e-3, True), (1.4e-3, False)])
def test_a_pull_from_elsewhere_is_compared_with_raw_messages(seconds, reached):
    found = {
        size: {"raw": [1e-3], "pull": [seconds], "memcpy": [9.0]}
        for size in ("64KiB", "1MiB", "16MiB")
    }
    rows = {row.key: row for row in away_rows("hosts", "2 hosts", found)}
    assert rows["hosts_16MiB"].reached is reached
    assert rows["hosts_64KiB"].ratio == pytest.approx(1000 * seconds)
    assert [row.key for row in rows.values() if row.goal] == ["hosts_16MiB"]


def test_pushes_are_compared_with_a_raw_message_and_its_answer():
    took = {"raw": [1e-5], "push": [2e-5], "push_pull": [4e-5], "pull": [1e-6]}
    _, push, both, pull = push_rows(took)
    assert (push.ratio, push.reached) == (pytest.approx(2), True)
    assert (both.ratio, pull.ratio) == (pytest.approx(4), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("n", "cases"),
    [
        (3, [(1, 1), (1, 2), (2, 1)]),
        (4, [(1, 1), (1, 2), (2, 1), (2, 2)]),
        (5, [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]),
    ],
)
def test_cases_are_all_that_the_ranks_can_be(n, cases):
    assert cases_of(n) == cases


def test_rates_and_shares_of_staleness():
    found = {"rates": [[10.0], [30.0]], "staleness": [[0, 5], [2, 1], [3, 2], [7, 2]]}
    rows, notes = crowd_rows([(1, 1), (2, 1)], found)
    values = {row.key: row.value for row in rows}
    assert values["rate_2w1s"] == 30
    assert values["bytes_2w1s"] == pytest.approx(30 * 2**21 / 1e9)
    assert [values[f"staleness_{late}"] for late in range(4)] == [50, 0, 10, 40]
    assert values["staleness_max"] == 7
    assert "0: 5, 2: 1, 3: 2, 7: 2" in notes[0]


@pytest.mark.parametrize(("two", "reached"), [(15.0, True), (12.0, False)])
def test_updates_are_to_grow_with_the_servers(two, reached):
    rows = grown_rows("links", "slow cards", [10.0], [two], GROWS)
    assert [row.key for row in rows] == ["links_rate_1s", "links_rate_2s", "links_grown"]
    assert rows[-1].value == pytest.approx(two / 10)
    assert rows[-1].reached is reached


def test_updates_count_while_all_workers_are_at_work():
    # within a second: at 2.0 of the first, at 2.0 and 2.5 of the other
    assert within([[0.0, 1.5, 2.0, 3.0], [1.5, 2.0, 2.5]]) == pytest.approx(3.0)
    with pytest.raises(AssertionError, match="not at work at the same time"):
        within([[0.0, 1.0], [1.5, 2.0]])


class Alone:
    """A communicator's rank 0, for which the others are played."""

    rank, size = 0, 3

    def Split(self, color):
        return self

    def Ibarrier(self):
        return SimpleNamespace(Test=lambda: True)

    def bcast(self, value):
        return value

    def Free(self):
        pass


@pytest.mark.parametrize(("missed", "measured"), [(0, 1), (2, 3), (99, ps_crowd.TRIES)])
def test_a_round_is_measured_again_where_a_worker_came_too_late(missed, measured, monkeypatch):
    rounds = []

    def launch(program, comm):
        rounds.append(program)
        late = 2.0 if len(rounds) <= missed else 0.5
        return {"worker": [{"done": [0.0, 1.0]}, {"done": [late, late + 1]}]}

    monkeypatch.setattr(mpiml, "launch", launch)
    mpi = SimpleNamespace(MPI=SimpleNamespace(UNDEFINED=-1))
    monkeypatch.setitem(sys.modules, "mpi4py", mpi)
    found = ps_crowd._round(Alone(), 2, 1, {"nbytes": 4, "seconds": 0.1})
    assert len(rounds) == measured
    assert ps_crowd.together([each["done"] for each in found]) is (missed < measured)


@pytest.mark.parametrize("measures", [ps._hosts, ps._links])
@pytest.mark.parametrize("fails", ["houses", "ps_crowd"])
def test_a_measurement_that_fails_is_not_taken_for_hosts_without_mpi(
    measures, fails, monkeypatch
):
    def scenario(self, where, plan):
        if fails in where:
            raise BenchError("4 ranks: expected status 0. They said:\nno way there")

    monkeypatch.setattr(TwoHosts, "__init__", lambda self, *_, **more: None)
    monkeypatch.setattr(SlowLinks, "__init__", lambda self, *_: None)
    for kind in (TwoHosts, SlowLinks):
        monkeypatch.setattr(kind, "__exit__", lambda *_: None)
        monkeypatch.setattr(kind, "why_not", lambda self: "")
        monkeypatch.setattr(kind, "scenario", scenario)
    if fails == "ps_crowd":
        with pytest.raises(BenchError, match="no way there"):
            measures(True, None)
        return
    rows, (note,) = measures(True, None)
    assert rows == []
    assert note.endswith("not measured, MPI does not run on them: no way there")


@pytest.mark.parametrize(("asynchronous", "reached"), [(2.0, True), (3.0, False)])
def test_the_sooner_of_ssp_and_async_is_compared_with_bsp(asynchronous, reached):
    seconds = {"bsp": [4.0], "delay": [1.0], "ssp": [3.5], "async": [asynchronous]}
    found = {"rates": dict.fromkeys(seconds, 0.5), "seconds": seconds, "missed": 2}
    rows, notes = training_rows(4, found, TRAINING[False])
    assert rows[-1].value == pytest.approx(4 / asynchronous)
    assert rows[-1].reached is reached
    assert [row.ratio for row in rows[:2]] == [None, 0.25]
    assert "3 workers" in notes[0]
    assert "2 runs of all did not" in notes[0]


def test_the_best_rate_is_that_of_the_least_median():
    assert best_rate([(0.1, [3.0, 1.0, 3.0]), (0.2, [2.0, 9.0, 2.0])]) == 0.2


def test_the_gradient_is_that_of_the_loss():
    rng = np.random.default_rng(0)
    images, labels = rng.random((20, 64), np.float32), rng.integers(10, size=20)
    tree = {name: part.astype(np.float64) for name, part in initial(0).items()}
    found = gradient(tree, images, labels)
    for name, place in (("w1", (3, 4)), ("b1", 5), ("w2", (6, 7)), ("b2", 8)):
        sides = []
        for side in (1e-6, -1e-6):
            moved = {key: part.copy() for key, part in tree.items()}
            moved[name][place] += side
            sides.append(loss(moved, images, labels))
        assert found[name][place] == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-6)


def test_parameters_and_gradients_are_float32():
    images, labels = np.ones((4, 64), np.float32), np.arange(4)
    assert {part.dtype.name for part in initial(1).values()} == {"float32"}
    found = gradient(initial(1), images, labels)
    assert {part.dtype.name for part in found.values()} == {"float32"}
