"""Any interleaving of rounds, freezes and messages: a role leaves its loop at one round."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.agree import Agreement, Branch
from mpiml.wire import AGREE_COUNT, AGREE_REST, AGREE_TARGET


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
        self.targets = []  # on their way here
        self.heard = False


class Tree:
    """The branches of a role; messages to a node go to `tell`, at once or when `deliver` is called."""

    def __init__(self, replicas, tell):
        self.branches = [Branch(index, replicas) for index in range(replicas)]
        self.tell = tell
        self.wire = []  # (from, kind, to, number)
        self.sent = [0] * replicas
        self.taken = [0] * replicas

    def post(self, index, messages):
        for kind, to, number in messages:
            if to == index:
                assert kind == AGREE_TARGET
                self.tell(index, number)
            else:
                self.sent[index] += 1
                self.wire.append((index, kind, to, number))

    def count(self, index, count):
        self.post(index, self.branches[index].count(index, count))

    def rest(self, index, idle):
        self.post(index, self.branches[index].rest(index, idle))

    def deliver(self, choose=lambda pairs: pairs[0]):
        """Take in the oldest message of a pair of members."""
        pair = choose(list(dict.fromkeys((m[0], m[2]) for m in self.wire)))
        message = next(m for m in self.wire if (m[0], m[2]) == pair)
        self.wire.remove(message)
        source, kind, to, number = message
        self.taken[to] += 1
        branch = self.branches[to]
        if kind == AGREE_COUNT:
            self.post(to, branch.count(source, number))
        elif kind == AGREE_REST:
            self.post(to, branch.rest(source, bool(number)))
        else:
            self.post(to, branch.decide(number))

    def run(self, choose=lambda pairs: pairs[0]):
        while self.wire:
            self.deliver(choose)


def moves_of(ranks, stop_sent, tree):
    """Every step that some rank can take now, as (rank, what)."""
    lowest = min(rank.entered for rank in ranks)
    if tree.wire:
        yield 0, "deliver"
    for i, rank in enumerate(ranks):
        if stop_sent and not rank.heard:
            yield i, "freeze"
        if rank.targets:
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


def step(ranks, tree, i, what):
    rank = ranks[i]
    if what == "freeze":
        rank.heard = True
        count = rank.agreement.freeze()
        assert count == rank.begun
        tree.count(i, count)
    elif what == "deliver":
        tree.deliver(lambda pairs: pairs[rank.begun % len(pairs)])
    elif what == "target":
        target = rank.targets.pop(0)
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
@given(st.integers(2, 12), st.integers(0, 40), st.data())
def test_all_ranks_leave_after_the_same_round(n, stop_after, data):
    ranks = [Rank() for _ in range(n)]
    tree = Tree(n, lambda index, target: ranks[index].targets.append(target))
    for moves in range(10_000):
        choices = list(moves_of(ranks, moves >= stop_after, tree))
        if all(rank.state == "left" for rank in ranks):
            break
        assert choices, [vars(rank) for rank in ranks]  # nobody can move: a deadlock
        index = data.draw(st.integers(0, len(choices) - 1)) if moves < 200 else moves
        step(ranks, tree, *choices[index % len(choices)])
    assert {rank.state for rank in ranks} == {"left"}
    assert len({rank.finished for rank in ranks}) == 1
    assert all(rank.entered == rank.finished for rank in ranks)


def test_a_role_that_counts_no_rounds_stops_at_once():
    told = []
    tree = Tree(2, lambda index, target: told.append((index, target)))
    tree.count(0, 0)
    assert not told
    tree.count(1, 0)
    tree.run()
    assert sorted(told) == [(0, 0), (1, 0)]
    agreement = Agreement("role/0")
    assert agreement.decide(0)
    assert agreement.is_last()


def test_the_target_is_one_round_beyond_the_furthest():
    told = []
    tree = Tree(3, lambda index, target: told.append(target))
    for index, count in enumerate((3, 4, 0)):
        assert not told
        tree.count(index, count)
    tree.run()
    assert told == [5, 5, 5]
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
    told = []
    tree = Tree(2, lambda index, target: told.append(target))
    tree.count(0, counts[0])
    tree.count(1, counts[1])
    tree.run()
    assert told == [max(counts) + 1] * 2


def counted(n):
    """A role whose members know that they stop after round 2, and what they hear after that."""
    told = [[] for _ in range(n)]
    tree = Tree(n, lambda index, target: told[index].append(target))
    for index in range(n):
        tree.count(index, 1)
    tree.run()
    assert told == [[2]] * n
    for heard in told:
        heard.clear()
    return tree, told


@pytest.mark.parametrize("n", [1, 2, 9, 10, 80])
def test_members_that_are_all_idle_may_not_go_on(n):
    tree, told = counted(n)
    for index in range(n):
        tree.run()
        assert not any(told)
        tree.rest(index, True)
    tree.rest(n - 1, False)  # too late, though it cannot know
    tree.run()
    assert told == [[0]] * n


@pytest.mark.parametrize("n", [2, 9, 10, 80])
def test_one_that_asks_in_time_may_go_on(n):
    tree, told = counted(n)
    for index in range(1, n):
        tree.rest(index, True)
    tree.run()
    tree.rest(n - 1, False)
    tree.run()
    assert told == [[]] * (n - 1) + [[2]]
    tree.rest(0, True)
    tree.run()
    assert told[0] == []
    tree.rest(n - 1, True)
    tree.run()
    assert told == [[0]] * (n - 1) + [[2, 0]]


@settings(max_examples=60)
@given(st.integers(2, 20), st.data())
def test_nobody_goes_on_where_others_have_stopped_at_once(n, data):
    """Members rest and ask to go on in any order: all end at once, and nobody is in a round then."""
    tree, _ = counted(n)
    state = ["works"] * n  # "idle", "asks", "stopped"
    left = [data.draw(st.integers(0, 3)) for _ in range(n)]  # how often it asks to go on

    def hear(index, target):
        if target:
            assert state[index] == "asks"
            assert "stopped" not in state
            state[index] = "works"
        else:
            assert state[index] in ("idle", "asks")  # not in a round
            state[index] = "stopped"

    tree.tell = hear
    for _ in range(5000):
        moves = [i for i in range(n) if state[i] == "works" or (state[i] == "idle" and left[i])]
        choices = [*moves, *([-1] if tree.wire else [])]
        if not choices:
            break
        move = data.draw(st.sampled_from(choices))
        if move < 0:
            tree.deliver(lambda pairs: data.draw(st.sampled_from(pairs)))
        elif state[move] == "works":
            state[move] = "idle"
            tree.rest(move, True)
        else:
            left[move] -= 1
            state[move] = "asks"
            tree.rest(move, False)
    assert state == ["stopped"] * n


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
