"""`mpiml.roles.Counter`: totals, and the end of the program at a limit."""

from decimal import Decimal

import numpy as np
import pytest

import mpiml
from mpiml.roles.counter import Counter
from tests.playing import LIMIT, both, play


def stops(monkeypatch):
    """Count the calls of ``context().stop()``."""
    seen = []

    class Context:
        def stop(self):
            seen.append(1)

    monkeypatch.setattr("mpiml.roles.counter.context", Context)
    return seen


def test_counts_add_up_by_name():
    counter = Counter()
    assert counter.get_counts() == {}
    assert counter.increment(steps=2, episodes=1) == {"steps": 2, "episodes": 1}
    assert counter.increment(steps=np.int64(3)) == {"steps": 5, "episodes": 1}
    assert counter.increment() == counter.get_counts() == {"steps": 5, "episodes": 1}
    counter.get_counts()["steps"] = 99  # its own
    assert counter.increment(self=0.5)["self"] == 0.5
    assert counter.get_counts()["steps"] == 5


@pytest.mark.parametrize("bad", ["1", None, float("nan"), float("inf"), [1], b"2", 10**400])
def test_what_is_no_number_is_refused_and_nothing_is_counted(bad):
    counter = Counter()
    with pytest.raises(mpiml.UsageError, match=r"increment: steps: expected a finite number"):
        counter.increment(episodes=1, steps=bad)
    assert counter.get_counts() == {}
    if bad is not None:
        with pytest.raises(mpiml.UsageError, match=r"limit: steps: expected a finite number"):
            Counter({"steps": bad})
    with pytest.raises(mpiml.UsageError, match="name of a count"):
        counter.limit(3, 3)


def test_what_does_not_add_up_leaves_all_counts_as_they_were():
    counter = Counter()
    counter.increment(steps=1, seconds=0.5)
    with pytest.raises(TypeError):
        counter.increment(steps=1, seconds=Decimal(1))
    assert counter.get_counts() == {"steps": 1, "seconds": 0.5}


def test_a_limit_ends_the_program_when_it_is_reached(monkeypatch):
    seen = stops(monkeypatch)
    counter = Counter({"steps": 3})
    counter.increment(steps=2, episodes=10)
    assert not seen
    assert counter.increment(steps=2) == {"steps": 4, "episodes": 10}
    assert len(seen) == 1
    counter.increment(episodes=1)
    assert len(seen) == 1
    counter.limit("steps", None)
    counter.increment(steps=5)
    assert len(seen) == 1
    counter.limit("episodes", 11)  # it has come to it already
    assert len(seen) == 2
    counter.limit("other", -1)
    assert len(seen) == 2


def test_state_goes_to_another_counter(monkeypatch):
    seen = stops(monkeypatch)
    counter = Counter({"steps": 10})
    counter.increment(steps=4)
    other = Counter({"steps": 10})
    other.increment(others=1)
    other.load_state_dict(counter.state_dict())
    assert other.get_counts() == {"steps": 4}
    assert not seen
    other.increment(steps=6)
    assert len(seen) == 1
    Counter({"steps": 10}).load_state_dict(other.state_dict())  # what was over stays over
    assert len(seen) == 2
    with pytest.raises(mpiml.UsageError, match="load_state_dict: steps"):
        counter.load_state_dict({"counts": {"steps": "4"}})


@both
def test_the_program_ends_in_order_and_later_increments_are_answered(mode):
    def body(counter):
        def check():
            sent = list(pending)  # the stop may come before all are
            assert len(sent) >= 10
            steps = [future.result(LIMIT)["steps"] for future in sent]
            assert steps == list(range(1, len(sent) + 1))

        pending = []
        mpiml.context().on_stop(check)
        pending.extend(counter.futures.increment(steps=1) for _ in range(20))
        assert mpiml.context().wait_for_stop(LIMIT)

    play(mode, body, counter=mpiml.ServiceNode(mpiml.roles.Counter, limits={"steps": 10}))


@both
def test_state_is_never_served(mode):
    def body(counter):
        assert {"increment", "get_counts", "limit"} <= set(dir(counter))
        for name in ("state_dict", "load_state_dict"):
            assert name not in dir(counter)
            with pytest.raises(mpiml.UnknownMethodError, match=f"method '{name}' not found"):
                getattr(counter, name)
        # nor to a caller that does not look at the class
        target = counter.__dict__["_target"]
        target.methods = None
        with pytest.raises(mpiml.UnknownMethodError, match="served are: get_counts, increment"):
            counter.futures.state_dict().result()

    play(mode, body, counter=mpiml.ServiceNode(Counter))
