"""Backup workers: the first n of a step count, the rest is dropped, whatever the order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mpiml.collectives.stragglers import Backup, Verdict
from mpiml.errors import UsageError

TAKE, LAST, LATE = Verdict.TAKE, Verdict.LAST, Verdict.LATE


class Workers(RuleBasedStateMachine):
    """Workers that start, send over wires of any length, and arrive in any order."""

    @initialize(n=st.integers(1, 4), b=st.integers(0, 3), first=st.integers(0, 5))
    def begin(self, n, b, first):
        self.backup = Backup(n, b, step=first)
        self.n, self.first = n, first
        self.started = {w: first - 1 for w in range(n + b)}  # newest step each computes
        self.wires = {w: [] for w in range(n + b)}  # sent, not arrived
        self.arrivals = {}  # step -> workers, as they came
        self.verdicts = {}  # (worker, step) -> verdict

    @rule(choice=st.integers(0, 6))
    def compute(self, choice):
        worker = choice % self.backup.workers
        if self.started[worker] < self.backup.step:  # it was given newer parameters
            self.started[worker] = self.backup.step
            self.wires[worker].append(self.backup.step)

    @precondition(lambda self: any(self.wires.values()))
    @rule(choice=st.integers(0, 6))
    def arrive(self, choice):
        waiting = [w for w, wire in self.wires.items() if wire]
        worker = waiting[choice % len(waiting)]
        step, now = self.wires[worker].pop(0), self.backup.step
        verdict = self.backup.offer(worker, step)
        self.arrivals.setdefault(step, []).append(worker)
        self.verdicts[worker, step] = verdict
        assert self.backup.step == now + (verdict is LAST)  # by one, and only then

    @precondition(lambda self: self.verdicts)
    @rule(data=st.data())
    def offer_once_more(self, data):
        worker, step = data.draw(st.sampled_from(sorted(self.verdicts)))
        before = self.state()
        with pytest.raises(UsageError, match=f"worker {worker} offers step {step} and has"):
            self.backup.offer(worker, step)
        assert self.state() == before

    @rule(choice=st.integers(0, 6), ahead=st.integers(1, 3))
    def offer_too_early(self, choice, ahead):
        before = self.state()
        with pytest.raises(UsageError, match="the current one"):
            self.backup.offer(choice % self.backup.workers, self.backup.step + ahead)
        assert self.state() == before

    def state(self):
        backup = self.backup
        return backup.step, backup.arrived, backup.last, backup.statistics()

    @invariant()
    def the_first_n_count_and_the_rest_is_dropped(self):
        for step, workers in self.arrivals.items():
            assert len(set(workers)) == len(workers)
            verdicts = [self.verdicts[w, step] for w in workers]
            expected = [TAKE] * (self.n - 1) + [LAST] + [LATE] * len(workers)
            assert verdicts == expected[: len(workers)]

    @invariant()
    def steps_are_those_with_n_gradients(self):
        complete = [s for s, workers in self.arrivals.items() if len(workers) >= self.n]
        assert sorted(complete) == list(range(self.first, self.backup.step))
        now = self.arrivals.get(self.backup.step, [])
        assert list(self.backup.arrived) == now
        assert len(now) < self.n
        if complete:
            assert list(self.backup.last) == self.arrivals[self.backup.step - 1][: self.n]

    @invariant()
    def counts_are_those_of_the_verdicts(self):
        counts = self.backup.statistics()
        assert counts.steps == self.backup.step - self.first
        for worker in range(self.backup.workers):
            mine = [v for (w, _), v in self.verdicts.items() if w == worker]
            assert counts.taken[worker] == sum(v.taken for v in mine)
            assert counts.dropped[worker] == mine.count(LATE)
        assert sum(counts.taken) == counts.steps * self.n + len(self.backup.arrived)


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_two_of_three_by_hand():
    backup = Backup(2, 1)
    assert backup.offer(2, 0) is TAKE
    assert backup.offer(0, 0) is LAST
    assert (backup.step, backup.last, backup.arrived) == (1, (2, 0), ())
    assert backup.offer(0, 1) is TAKE  # worker 1 is still at step 0
    assert backup.offer(1, 0) is LATE
    assert backup.offer(1, 1) is LAST  # it went on with the parameters of step 1
    assert backup.statistics() == (2, (2, 1, 1), (0, 1, 0))


def test_a_late_worker_leaves_out_the_steps_it_missed():
    backup = Backup(1, 1)
    for step in range(5):
        assert backup.offer(0, step) is LAST
    assert backup.offer(1, 0) is LATE
    assert backup.offer(1, 5) is LAST
    assert backup.statistics() == (6, (5, 1), (0, 1))


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(0, 3))
def test_sgd_with_backup_workers_is_sgd_on_the_first_n(data, n, b):
    backup, w, wanted = Backup(n, b), 0.0, 0.0
    for step in range(3):
        order = data.draw(st.permutations(range(n + b)))
        total, at = 0.0, w
        for worker in order:
            gradient = at - worker  # of (w - worker)^2 / 2, at the parameters of this step
            verdict = backup.offer(worker, step)
            if verdict.taken:
                total += gradient
            if verdict is LAST:
                w -= 0.5 * total / n
        wanted -= 0.5 * sum(wanted - worker for worker in order[:n]) / n
    assert w == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "Backup: n: expected a whole number >= 1, got 0"),
        ((1.5, 1), "Backup: n: expected a whole number >= 1, got 1.5"),
        ((2, -1), "Backup: b: expected a whole number >= 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Backup(*arguments)


def test_offers_that_cannot_be_are_refused():
    backup = Backup(2, 1, step=4)
    for worker in (-1, 3, "1", None):
        with pytest.raises(
            UsageError, match="worker: expected a whole number from 0 to 2, got"
        ):
            backup.offer(worker, 4)
    with pytest.raises(UsageError, match="step: expected a whole number >= 4, got 3"):
        backup.offer(0, 3)
    assert backup.offer(np.int64(1), np.int32(4)) is TAKE
    with pytest.raises(UsageError, match="worker 1 offers step 4 and has offered this step"):
        backup.offer(1, 4)
    backup.offer(0, 4)
    backup.offer(2, 5)
    with pytest.raises(UsageError, match="worker 2 offers step 4 and has offered step 5"):
        backup.offer(2, 4)
    assert backup.arrived == (2,)
