"""The consistencies against their definitions, through random interleavings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.consistency import BSP, SSP, Async, Backup, BoundedDelay, DropStale, as_consistency
from mpiml.errors import UsageError
from mpiml.roles.parameter_server.order import order_of

ITERATIONS = 5


class Server:
    """A server whose parameters are what has been applied, and workers who pull, push, tell.

    Each worker does its steps in order; which one goes next is up to the caller. A gradient is
    its worker and iteration, so that every read shows what it has seen.
    """

    def __init__(self, consistency, workers, check=lambda server, worker: None):
        self.order = order_of(consistency, workers)
        self.workers = workers
        self.check = check
        self.applied = []  # updates
        self.dropped = []  # (worker, iteration)
        self.at = [0] * workers  # the iteration of each worker
        self.phase = [0] * workers
        self.version = [0] * workers

    def step(self, worker):
        """Do the worker's next step, if it need not wait; tell whether it did anything."""
        if self.at[worker] == ITERATIONS:
            return False
        phase = self.phase[worker]
        if phase == 0:
            if not self.order.readable(worker):
                return False
            self.check(self, worker)
            self.version[worker] = self.order.version
        elif phase == 1:
            pushed = self.order.push(worker, self.version[worker], (worker, self.at[worker]))
            self.applied += pushed.updates
            if pushed.dropped:
                self.dropped.append((worker, self.at[worker]))
        else:
            if isinstance(self.order, type(order_of(SSP(0), 1))):
                self.applied += self.order.clock(worker)
            self.at[worker] += 1
            if self.at[worker] == ITERATIONS:
                self.applied += self.order.leave(worker)
        self.phase[worker] = (phase + 1) % 3
        return True

    def run(self, choices):
        for choice in choices:
            self.step(choice % self.workers)
        while any([self.step(worker) for worker in range(self.workers)]):
            pass
        assert self.at == [ITERATIONS] * self.workers  # nobody waits for ever
        return self

    @property
    def seen(self):
        return {gradient for update in self.applied for gradient in update.gradients}


workers = st.integers(1, 4)
choices = st.lists(st.integers(0, 3), max_size=60)
KINDS = [Async(), BSP(), BoundedDelay(1), BoundedDelay(9), SSP(0), SSP(2), DropStale(1)]


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
@given(workers, choices)
def test_every_gradient_is_applied_once_or_dropped_and_nobody_waits_for_ever(
    consistency, workers, choices
):
    server = Server(consistency, workers).run(choices)
    applied = [g for update in server.applied for g in update.gradients]
    every = {(w, t) for w in range(workers) for t in range(ITERATIONS)}
    assert sorted(applied + server.dropped) == sorted(every)
    assert server.order.dropped == len(server.dropped)
    assert server.order.version == len(server.applied)


@given(workers, st.integers(0, 3), choices)
def test_ssp_no_read_is_older_than_its_bound_and_own_writes_are_seen(workers, s, choices):
    def check(server, worker):
        now = server.at[worker]
        assert {(worker, t) for t in range(now)} <= server.seen
        assert {(w, t) for w in range(workers) for t in range(now - s)} <= server.seen

    Server(SSP(s), workers, check).run(choices)


@given(workers, st.integers(0, 3), choices)
def test_ssp_lets_a_worker_go_on_within_its_bound(workers, s, choices):
    server = Server(SSP(s), workers)
    for choice in choices:
        worker = choice % workers
        ahead = server.at[worker] - min(at for at in server.at)
        if server.phase[worker] == 0 and server.at[worker] < ITERATIONS and ahead <= s:
            assert server.step(worker)
        else:
            server.step(worker)


@given(workers, st.integers(0, 3), choices)
def test_bounded_delay_an_iteration_begins_after_those_before_the_bound(workers, tau, choices):
    def check(server, worker):
        now = server.at[worker]
        assert {(w, t) for w in range(workers) for t in range(now - tau)} <= server.seen
        for update in server.applied:  # of one iteration, in the order of the workers
            assert list(update.gradients) == [
                (w, update.gradients[0][1]) for w in range(workers)
            ]

    Server(BoundedDelay(tau), workers, check).run(choices)


@given(workers, choices, st.sampled_from([BSP(), BoundedDelay(0)]))
def test_no_delay_is_sequential_bit_for_bit(workers, choices, consistency):
    rng = np.random.default_rng(workers)
    gradients = rng.standard_normal((workers, ITERATIONS, 7)).astype(np.float32)

    def add(x, update):
        mean = sum([gradients[w, t] for w, t in update], np.zeros(7, np.float32)) / len(update)
        return x - np.float32(0.1) * mean.astype(np.float32)

    serial = parallel = np.zeros(7, np.float32)
    for t in range(ITERATIONS):
        serial = add(serial, [(w, t) for w in range(workers)])
    for update in Server(consistency, workers).run(choices).applied:
        parallel = add(parallel, update.gradients)
    assert (serial == parallel).all()


@given(st.integers(1, 3), st.integers(0, 2), st.permutations(range(5)), st.integers(1, 4))
def test_backups_are_dropped_and_no_others(needed, b, order, steps):
    server = order_of(Backup(b), needed + b)
    order = [worker for worker in order if worker < needed + b]
    for step in range(steps):
        assert all(server.readable(worker) for worker in order)
        pushed = [server.push(worker, step, worker) for worker in order]
        (update,) = [update for each in pushed for update in each.updates]
        assert update.workers == tuple(sorted(order[:needed]))
        assert [bool(each.dropped) for each in pushed] == [False] * needed + [True] * b
    assert server.dropped == b * steps


@given(workers, st.integers(0, 1), choices)
def test_backup_a_step_is_made_of_gradients_of_that_step(workers, b, choices):
    b = min(b, workers - 1)
    server = Server(Backup(b), workers).run(choices)
    for update in server.applied:
        assert set(update.staleness) == {0}
        assert len(set(update.workers)) == len(update.workers)


@given(workers, st.integers(0, 3), choices)
def test_what_is_too_stale_is_dropped_and_nothing_else(workers, n, choices):
    order = order_of(DropStale(n), workers)
    versions = [0] * workers
    for choice in choices:
        worker = choice % workers
        staleness = order.version - versions[worker]
        pushed = order.push(worker, versions[worker], None)
        assert bool(pushed.dropped) == (staleness > n)
        assert [u.staleness for u in pushed.updates] == (
            [] if staleness > n else [(staleness,)]
        )
        if choice % 2:
            versions[worker] = order.version


def test_who_has_left_is_waited_for_no_more():
    for consistency in (BSP(), SSP(0), Backup(0)):
        order = order_of(consistency, 2)
        order.push(0, 0, "a")
        order.clock(0) if consistency == SSP(0) else None
        assert not order.readable(0)
        order.leave(1)
        assert order.readable(0)


def test_versions_that_have_not_been_are_refused():
    order = order_of(Async(), 1)
    for version in (1, -1):
        with pytest.raises(UsageError, match="expected one that pull"):
            order.push(0, version, None)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SSP(-1), r"SSP: s: expected a whole number >= 0, got -1"),
        (lambda: SSP(1.5), r"SSP: s: expected a whole number"),
        (lambda: BoundedDelay(-1), r"BoundedDelay: tau"),
        (lambda: BSP(1), r"Use BoundedDelay\(1\)"),
        (lambda: DropStale(True), r"DropStale: n"),
        (lambda: Backup(-2), r"Backup: b"),
        (lambda: Async(compensate=-1.0), r"compensate: expected a number >= 0"),
        (
            lambda: Async(compensate=float("nan")),
            r"compensate: expected a number >= 0, got nan",
        ),
        (lambda: order_of(Backup(2), 2), r"more workers than backups, got 2"),
        (lambda: as_consistency("ssp", "here"), r"here: consistency: expected 'bsp'"),
        (
            lambda: as_consistency(SSP, "here"),
            r"here: consistency: expected 'bsp', .* got <class",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, text):
    with pytest.raises(UsageError, match=text):
        make()


def test_names():
    assert as_consistency("bsp", "") == BSP()
    assert as_consistency("async", "") == Async()
    assert as_consistency(SSP(3), "") == SSP(3)


@given(st.integers(1, 4), st.integers(0, 2), st.data())
def test_backup_drops_and_applies_by_its_definition_in_any_interleaving(needed, b, data):
    """Of the steps that end, each has the first `needed` gradients; all others are dropped."""
    workers = needed + b
    order = order_of(Backup(b), workers)
    step = [0] * workers  # of each worker's next gradient
    came: dict[int, list[int]] = {}  # by step, who came in time
    pushes = 0
    for worker in data.draw(st.lists(st.integers(0, workers - 1), max_size=60)):
        if not order.readable(worker):
            continue
        step[worker] = data.draw(st.integers(step[worker], order.version), label="pulled")
        before = order.version
        pushed = order.push(worker, step[worker], (worker, step[worker]))
        pushes += 1
        if step[worker] < before:
            assert pushed.dropped
        else:
            assert not pushed.dropped
            came.setdefault(before, []).append(worker)
        for update in pushed.updates:
            assert len(update.gradients) == needed
            assert sorted(update.workers) == sorted(came[before])
    assert order.dropped == pushes - sum(map(len, came.values()))


def test_a_backup_step_goes_on_without_who_adds_nothing():
    order = order_of(Backup(1), 3)
    order.push(0, 0, "a")
    (update,) = order.clock(1)  # two of three have had their part
    assert update.gradients == ("a",)
    assert all(order.readable(worker) for worker in range(3))
    assert order.clock(0) == order.clock(0) == []  # counted once
    assert not order.readable(0)
    assert order.clock(1) == []  # nobody adds anything: the step begins again
    assert order.readable(0)
    assert order.version == 1


@given(st.integers(0, 3), st.integers(1, 4), st.data())
def test_bounded_delay_holds_few_gradients(tau, workers, data):
    order = order_of(BoundedDelay(tau), workers)
    held = [0] * workers
    for worker in data.draw(st.lists(st.integers(0, workers - 1), max_size=80)):
        if order.takes(worker):
            held[worker] += 1
            for update in order.push(worker, 0, None).updates:
                for other in update.workers:
                    held[other] -= 1
        assert held[worker] <= tau + 1


@given(st.integers(0, 3), st.integers(1, 5), st.data())
def test_who_may_read_is_told_of_all_as_of_each(s, workers, data):
    for consistency in (SSP(s), BoundedDelay(s), Backup(0), DropStale(s), Async()):
        order = order_of(consistency, workers)
        for worker in data.draw(st.lists(st.integers(0, workers - 1), max_size=20)):
            order.clock(worker)
            found = order.all_readable()
            assert found == [order.readable(w) for w in range(workers)]
