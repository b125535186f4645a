"""Any interleaving of rounds, freezes and messages: a role leaves its loop at one round."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.agree import Agreement, Tally


class Rank:
    """One rank of a data-parallel loop: ``while not agree_stop(): collective``.

    A collective of round r ends on a rank once every rank has entered round r.
    """

    def __init__(self):
        self.agreement = Agreement("role/0")
        self.begun = 0  # rounds that agree_stop has begun
        self.entered = 0  # collectives entered
        self.finished = 0
        self.state = "between"  # "asking", "collective", "left"
        self.report = None  # count on its way to the first
        self.target = None  # target on its way here
        self.heard = False


def moves_of(ranks, stop_sent):
    """Every step that some rank can take now, as (rank, what)."""
    lowest = min(rank.entered for rank in ranks)
    for i, rank in enumerate(ranks):
        if stop_sent and not rank.heard:
            yield i, "freeze"
        if rank.target is not None:
            yield i, "target"
        if rank.state == "between":
            yield i, "begin"
        elif rank.state == "asking" and rank.agreement.decided.ready:
            yield i, "answer"
        elif rank.state == "collective" and lowest >= rank.entered:
            yield i, "finish"


def go_on(rank):
    if rank.agreement.is_last():
        rank.state = "left"
    else:
        rank.state = "collective"
        rank.entered += 1


def step(ranks, tally, i, what):
    rank = ranks[i]
    if what == "freeze":
        rank.heard = True
        count = rank.agreement.freeze()
        assert count == rank.begun
        target = tally.add(i, count)  # the message, taken in at once: order is in `freeze`
        if target is not None:
            for other in ranks:
                other.target = target
    elif what == "target":
        target, rank.target = rank.target, None
        at_once = rank.agreement.decide(target)
        rank.agreement.decided.ready = True
        if at_once and rank.state == "between":
            rank.state = "left"
    elif what == "begin":
        rank.begun += 1
        if rank.agreement.begin_round():
            rank.state = "asking"
        else:
            rank.state = "collective"
            rank.entered += 1
    elif what == "answer":
        go_on(rank)
    else:
        rank.finished += 1
        rank.state = "between"


@settings(max_examples=300)
@given(st.integers(2, 5), st.integers(0, 40), st.data())
def test_all_ranks_leave_after_the_same_round(n, stop_after, data):
    ranks = [Rank() for _ in range(n)]
    tally = Tally(n)
    for moves in range(10_000):
        choices = list(moves_of(ranks, moves >= stop_after))
        if all(rank.state == "left" for rank in ranks):
            break
        assert choices, [vars(rank) for rank in ranks]  # nobody can move: a deadlock
        index = data.draw(st.integers(0, len(choices) - 1)) if moves < 200 else moves
        step(ranks, tally, *choices[index % len(choices)])
    assert {rank.state for rank in ranks} == {"left"}
    assert len({rank.finished for rank in ranks}) == 1
    assert all(rank.entered == rank.finished for rank in ranks)


def test_a_role_that_counts_no_rounds_stops_at_once():
    tally = Tally(2)
    assert tally.add(0, 0) is None
    assert tally.add(1, 0) == 0
    agreement = Agreement("role/0")
    assert agreement.decide(0)
    assert agreement.is_last()


def test_the_target_is_one_round_beyond_the_furthest():
    tally = Tally(3)
    assert [tally.add(v, count) for v, count in ((5, 3), (6, 4), (7, 0))] == [None, None, 5]
    agreement = Agreement("role/0")
    assert not agreement.decide(5)
    for _ in range(4):
        agreement.begin_round()
        assert not agreement.is_last()
    agreement.begin_round()
    assert agreement.is_last()


def test_a_second_freeze_reports_nothing():
    agreement = Agreement("role/0")
    agreement.begin_round()
    assert agreement.freeze() == 1
    assert agreement.begin_round()  # it has to wait for the target now
    assert agreement.freeze() is None


@pytest.mark.parametrize("counts", [[1, 1], [1, 2], [0, 3]])
def test_nobody_leaves_below_the_target(counts):
    tally = Tally(2)
    tally.add(0, counts[0])
    target = tally.add(1, counts[1])
    assert target == max(counts) + 1


def test_members_that_are_all_idle_may_not_go_on():
    tally = Tally(3)
    assert not tally.rest(1, True)
    assert not tally.rest(2, True)
    assert not tally.rest(1, False)  # it asked in time
    assert not tally.rest(3, True)
    assert tally.rest(1, True)
    assert tally.rest(2, False)  # it did not


def test_rounds_after_the_target_are_over():
    agreement = Agreement("role/0")
    assert not agreement.is_over(1)
    agreement.decide(2)
    assert [agreement.is_over(n) for n in (1, 2, 3)] == [False, False, True]
    assert not agreement.at_once
    agreement.decide(0)  # all are idle
    assert agreement.at_once
    assert agreement.is_over(1)


def test_a_stop_is_seen_by_who_counts_after_it():
    agreement = Agreement("role/0")
    agreement.next()
    assert not agreement.alert
    assert agreement.freeze() == 1
    agreement.next()
    assert agreement.alert
    assert agreement.rounds == 2


def test_a_loop_that_asks_is_left_in_no_collective():
    agreement = Agreement("role/0")
    for _ in range(3):
        agreement.begin_round()  # it asks, and then reduces three times
        for _ in range(3):
            agreement.next()
    agreement.begin_round()
    agreement.decide(14)
    for _ in range(3):
        assert not agreement.is_over(agreement.next())
    agreement.begin_round()
    assert agreement.is_last()


def test_a_loop_that_asks_no_more_is_left_in_a_collective():
    agreement = Agreement("role/0")
    agreement.begin_round()
    agreement.begin_round()
    agreement.decide(14)
    over = [agreement.is_over(number) for number in range(1, 200)]
    assert over.index(True) + 1 == 2 + 10 + 100 + 1
    assert all(over[over.index(True) :])
    agreement.decide(0)
    assert agreement.is_over(3)
