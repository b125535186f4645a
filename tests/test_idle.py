"""When a node counts as idle, and that it is said once."""

import types

import pytest

from mpiml import idle
from mpiml.agree import Agreement
from mpiml.idle import Idle


class Node:
    """A body after a stop, which has counted two rounds and is to stop after the third."""

    broken = returned = agreed = idle = False
    polls = 0
    thread = 7
    vertex = 1

    def __init__(self):
        self.spec = types.SimpleNamespace(replicas=2)
        self.scope = types.SimpleNamespace(awaiting=set())
        self.agreement = Agreement("a/1")
        for _ in range(2):
            self.agreement.next()
        self.agreement.freeze()
        self.agreement.decide(3)
        self.rested = []

    def rest(self, rounds):
        self.rested.append(rounds)
        self.idle = True


class Fakes:
    def __init__(self, monkeypatch):
        self.clock = 0.0
        monkeypatch.setattr(idle, "time", types.SimpleNamespace(monotonic=lambda: self.clock))
        self.node = Node()
        self.told = []
        self.busy = False
        self.sleepers = {}
        runtime = types.SimpleNamespace(
            nodes=[self.node],
            engine=types.SimpleNamespace(sleepers=self.sleepers),
            agreeing=types.SimpleNamespace(idle=lambda *what: self.told.append(what)),
            ending=types.SimpleNamespace(),
            teams=types.SimpleNamespace(busy=lambda node: self.busy),
        )
        self.idle = Idle(runtime)
        self.idle._seen = {1: (2, 0, 0.0)}

    def waits(self):
        self.sleepers[7] = types.SimpleNamespace(thread=7)

    def look(self, clock):
        self.clock = clock
        self.idle._look(self.node)
        return bool(self.node.rested)


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


def test_a_body_that_computes_is_not_idle(fakes):
    assert not fakes.look(0.5)
    fakes.node.polls = 1  # once in a round is no more than a loop does
    assert not fakes.look(9.0)


def test_a_body_that_looks_at_stopping_again_and_again_is(fakes):
    fakes.node.polls = 2
    assert not fakes.look(0.2)  # not that soon
    assert fakes.look(0.5)
    assert fakes.node.rested == [2]
    fakes.look(0.6)
    assert fakes.node.rested == [2]


def test_a_body_that_waits_is(fakes):
    fakes.waits()
    assert fakes.look(0.5)


def test_a_coroutine_that_waits_is(fakes):
    fakes.node.scope.awaiting.add(object())
    assert fakes.look(0.5)


def test_a_round_begins_it_anew(fakes):
    fakes.node.polls = 5
    fakes.node.agreement.next()
    assert not fakes.look(0.5)
    fakes.node.polls = 7
    assert not fakes.look(0.6)
    assert fakes.look(0.95)
    assert fakes.node.rested == [3]


def test_nobody_is_idle_while_a_collective_is_under_way(fakes):
    fakes.waits()
    fakes.busy = True
    assert not fakes.look(0.5)


@pytest.mark.parametrize("why", ["agreed", "returned"])
def test_who_has_left_says_so_once(fakes, why):
    setattr(fakes.node, why, True)
    for clock in (0.5, 0.6):
        assert not fakes.look(clock)
    assert fakes.told == [(1, True)]


def test_nothing_is_said_where_all_stop_at_once(fakes):
    fakes.node.agreement.decide(0)
    fakes.node.agreed = True
    fakes.look(0.5)
    assert not fakes.told


def test_a_watch_ends_when_it_is_closed(fakes):
    fakes.idle._runtime.done = False
    fakes.idle._runtime.ending.abandoned = False
    fakes.node.returned = True
    fakes.idle.watch()
    fakes.idle.watch()
    fakes.idle.close()
    assert not fakes.idle._thread.is_alive()
    assert len(fakes.told) == 1  # on the way out


def test_no_watch_begins_after_the_close(fakes):
    fakes.idle.close()
    fakes.idle.watch()
    assert fakes.idle._thread is None
