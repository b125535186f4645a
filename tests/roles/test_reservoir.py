"""`mpiml.roles.Reservoir`: a uniform sample of all that was put; who waits for whom."""

import threading
from concurrent.futures import wait

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpiml
from mpiml.roles.reservoir import Reservoir
from mpiml.roles.reservoir_policy import Slots, Watermarks
from tests.playing import LIMIT, both, play

# -- which items are kept --------------------------------------------------------------------------


@given(st.integers(1, 50), st.lists(st.integers(0, 60), max_size=8), st.integers(0, 99))
def test_slots_fill_in_order_and_then_each_item_goes_to_one_or_to_none(capacity, counts, seed):
    slots = Slots(capacity, np.random.default_rng(seed))
    seen = 0
    for count in counts:
        placed = slots.place(count)
        assert placed.shape == (count,)
        for slot in placed:
            assert slot == seen if seen < capacity else -1 <= slot < capacity
            seen += 1
        assert slots.seen == seen
        assert slots.held == min(seen, capacity)
    if seen:
        drawn = slots.draw(7)
        assert drawn.shape == (7,)
        assert ((drawn >= 0) & (drawn < slots.held)).all()


@pytest.mark.parametrize("batch", [1, 7, 60])
def test_every_item_is_held_with_the_same_probability(batch):
    capacity, items, rounds = 5, 60, 1000
    rng = np.random.default_rng(6)
    times = np.zeros(items)
    for _ in range(rounds):
        slots, held = Slots(capacity, rng), np.empty(capacity, int)
        for start in range(0, items, batch):
            numbers = np.arange(start, min(start + batch, items))
            places = slots.place(len(numbers))
            held[places[places >= 0]] = numbers[places >= 0]
        assert len(set(held)) == capacity
        times[held] += 1
    p = capacity / items
    # 4.5 standard deviations: one seed in 2500 has an item that is further off
    assert np.abs(times - rounds * p).max() < 4.5 * np.sqrt(rounds * p * (1 - p))


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.sampled_from([None, 1.0, 1.5]),
    st.lists(st.integers(1, 9).flatmap(lambda n: st.sampled_from([("p", n), ("s", n)]))),
)
def test_who_may_go_on_is_between_the_marks_and_never_nobody(low, high, per_item, reuse, tries):
    marks = Watermarks(low, high, per_item, reuse and reuse * per_item)
    for what, count in tries:
        assert marks.may_put() or marks.may_sample()
        assert not marks.may_sample() or marks.put >= low
        if what == "p" and marks.may_put():
            assert marks.put < low or marks.ahead < high
            marks.put += 1
            assert marks.ahead < high + 1
        elif what == "s" and marks.may_sample():
            marks.sampled += count
            assert reuse is None or marks.sampled < reuse * per_item * marks.put + count


def test_without_a_high_mark_producers_never_wait():
    marks = Watermarks(1, None, 1.0)
    marks.put = 10**9
    assert marks.may_put()


# -- in programs -----------------------------------------------------------------------------------


def node(*args, **kwargs):
    return mpiml.ServiceNode(Reservoir, *args, **kwargs)


@both
def test_what_is_sampled_was_put(mode):
    def body(one, many):
        assert one.statistics()["bytes"] == 0
        for i in range(30):
            one.put(np.float32(i))
        items = one.sample(400)
        assert items.shape == (400,)
        assert items.dtype == np.float32
        assert len(set(items)) == 10  # at most what it holds; and 400 draws miss none of 10
        assert set(items) <= set(range(30))
        x = np.arange(60).reshape(20, 3)
        many.extend(x, x.sum(axis=1))
        many.extend(x[:0], x[:0, 0])
        many.put(x[0], x[0].sum())
        rows, sums = many.sample(50)
        assert (rows.sum(axis=1) == sums).all()
        seen = many.statistics()
        assert (seen["put"], seen["held"], seen["sampled"]) == (21, 21, 50)
        assert seen["bytes"] == 21 * 4 * 8

    play(mode, body, one=node(10), many=node(100))


@both
def test_a_learner_waits_for_the_low_mark(mode):
    def body(reservoir):
        sample = reservoir.futures.sample(2)
        reservoir.extend(np.arange(4))
        assert reservoir.statistics()["sampled"] == 0
        assert not sample.done()
        reservoir.put(np.int64(9))
        assert sample.result(LIMIT).shape == (2,)
        assert reservoir.statistics()["sample_waited_s"] > 0

    play(mode, body, reservoir=node(10, low=5))


@both
def test_a_learner_waits_for_more_items(mode):
    def body(reservoir):
        reservoir.extend(np.arange(3))
        reservoir.sample(6)
        sample = reservoir.futures.sample(5)
        assert reservoir.statistics()["sampled"] == 6
        with pytest.raises(
            mpiml.DeadlineError,
            match=r"expected less than 2 samples of an item, on average, got 3 items and 6 ",
        ):
            reservoir.sample()
        assert sample.exception(LIMIT) is not None
        reservoir.put(3)
        assert len(reservoir.sample(5)) == 5
        reservoir.close()
        assert len(reservoir.sample(100)) == 100

    play(mode, body, reservoir=node(10, reuse=2, timeout=0.01))


@both
def test_a_producer_waits_for_the_learners(mode):
    def body(reservoir):
        reservoir.extend(np.arange(5))  # 2 are the low mark, 3 are ahead
        put = reservoir.futures.put(np.int64(5))
        more = reservoir.futures.put(np.int64(6))
        reservoir.sample(4)  # that makes up for one item
        assert reservoir.statistics()["put"] == 5
        reservoir.sample()
        done, _ = wait([put, more], timeout=LIMIT, return_when="FIRST_COMPLETED")
        assert len(done) == 1
        assert reservoir.statistics()["put"] == 6
        reservoir.close()
        put.result(LIMIT)
        more.result(LIMIT)
        reservoir.extend(np.arange(1000))
        assert reservoir.statistics()["put"] == 1007
        assert reservoir.statistics()["held"] == 10

    play(mode, body, reservoir=node(10, low=2, high=2, per_item=4))


@both
def test_a_wait_ends_at_the_timeout_and_says_what_is_missing(mode):
    def body(low, high):
        with pytest.raises(
            mpiml.DeadlineError,
            match=r"low/0.sample: expected 3 items put, got 0 items and 0 samples. Let producers .* within 0.01 s",
        ):
            low.sample()
        high.put(0)
        high.put(0)
        with pytest.raises(
            mpiml.DeadlineError,
            match=r"high/0.put: expected less than 1 items ahead of the learners, got 1\.",
        ):
            high.put(0)
        assert high.statistics()["put"] == 2
        low.close()
        with pytest.raises(mpiml.ServiceGoneError, match="nothing was put, nor will be"):
            low.sample()
        low.put(1)
        assert low.sample(2).tolist() == [1, 1]

    play(mode, body, low=node(9, low=3, timeout=0.01), high=node(9, high=1, timeout=0.01))


@both
def test_a_stop_and_the_end_leave_nobody_waiting(mode):
    def body(empty, full):
        full.put(0)
        full.put(0)
        pending = [empty.futures.sample(), full.futures.put(0)]
        mpiml.context().on_stop(lambda: ended.append([p.exception(LIMIT) for p in pending]))
        mpiml.context().stop()
        full.put(0)  # left by the stop

    ended = []
    play(mode, body, empty=node(9), full=node(9, high=1))
    for gone, nothing in ended:
        assert isinstance(gone, mpiml.ServiceGoneError)
        assert nothing is None


@both
def test_what_does_not_fit_is_refused_and_nothing_is_put(mode):
    def body(reservoir):
        with pytest.raises(mpiml.UsageError, match="expected at least one array"):
            reservoir.put()
        with pytest.raises(mpiml.UsageError, match="expected arrays of numbers"):
            reservoir.put(np.array([None]))
        with pytest.raises(mpiml.UsageError, match=r"got shapes \(2,\), \(3,\)"):
            reservoir.extend(np.zeros(2), np.zeros(3))
        with pytest.raises(mpiml.UsageError, match=r"got shapes \(\)"):
            reservoir.extend(np.float64(0))
        reservoir.put(np.zeros(3))
        for bad in (np.zeros(3, np.float32), np.zeros(4), np.zeros((1, 3))):
            with pytest.raises(mpiml.UsageError, match=r"put: expected items of <f8 \(3,\)"):
                reservoir.put(bad)
        with pytest.raises(mpiml.UsageError, match=r"got <f8 \(3,\), <f8 \(\)"):
            reservoir.put(np.zeros(3), 0.0)
        with pytest.raises(mpiml.UsageError, match=r"sample: count: .* >= 1, got 0"):
            reservoir.sample(0)
        assert reservoir.statistics()["put"] == 1

    play(mode, body, reservoir=node(10))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"capacity": 0}, "capacity: expected a whole number >= 1, got 0"),
        ({"low": 6}, "low: expected a whole number from 1 to 5, got 6"),
        ({"high": 0}, "high: expected a whole number >= 1, got 0"),
        ({"per_item": 0}, "per_item: expected a number > 0, got 0"),
        ({"per_item": 2, "reuse": 1}, "reuse: expected a number >= per_item .2., got 1"),
        ({"timeout": -1}, "expected timeout >= 0 or None, got -1"),
        ({"seed": "x"}, "seed: expected a whole number >= 0, got 'x'"),
    ],
)
def test_parameters_are_checked(bad, message):
    with pytest.raises(mpiml.UsageError, match=message):
        play(
            "threads", lambda r: None, r=mpiml.ServiceNode(Reservoir, **{"capacity": 5, **bad})
        )


def test_a_seed_gives_the_same_choices_and_state_goes_on():
    def body(service):
        return service.run_both()

    class Two:
        def run_both(self):
            a, b, c = (Reservoir(8, seed=s) for s in (3, 3, 4))
            for one in (a, b, c):
                one.extend(np.arange(500))
            first = a.sample(40)
            assert (first == b.sample(40)).all()
            assert (first != c.sample(40)).any()
            c.load_state_dict(a.state_dict())
            c.extend(np.arange(500, 900))
            a.extend(np.arange(500, 900))
            assert (a.sample(40) == c.sample(40)).all()
            assert a.statistics()["put"] == c.statistics()["put"] == 900
            with pytest.raises(mpiml.UsageError, match=r"expected 9 items .* got 8"):
                Reservoir(9).load_state_dict(a.state_dict())

    play("threads", body, service=Two)


@both
def test_producers_and_learners_of_several_threads(mode):
    def body(reservoir):
        def produce(which):
            for i in range(40):
                reservoir.put(np.array([which, i]))

        def learn():
            for _ in range(39):
                assert reservoir.sample(4).shape == (4, 2)

        bind = mpiml.context().bind
        threads = [threading.Thread(target=bind(produce), args=(i,)) for i in range(2)]
        threads += [threading.Thread(target=bind(learn)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        seen = reservoir.statistics()
        assert (seen["put"], seen["sampled"]) == (80, 312)

    play(mode, body, reservoir=node(16, low=4, high=4, per_item=4))
