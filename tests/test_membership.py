"""What ends the wait of a collective, and what is said of it: one node, and fakes around it."""

import threading
import types

import pytest

from mpiml.agree import Agreement
from mpiml.errors import ServiceGoneError, Stopped, UsageError
from mpiml.hosting import FAILED, RETURNED, RUNS, STOPPED
from mpiml.membership import RoleHooks, State
from mpiml.scope import BodyScope, Scope, enter, leave


class Fakes:
    """A role of four on four ranks; its first node waits. `clock` is the time."""

    def __init__(self, monkeypatch, stall=60.0):
        self.clock = 1000.0
        monkeypatch.setattr("mpiml.membership.time", types.SimpleNamespace(monotonic=self.now))
        self.said = []
        self.asked = []
        self.members = [
            types.SimpleNamespace(id=i, role="a", index=i, title=f"a/{i}") for i in range(4)
        ]
        self.runtime = types.SimpleNamespace(
            ranks=[0, 1, 2, 3], name="fake", done=False, say=self.said.append,
            engine=types.SimpleNamespace(closed=False, rank=0, wait=self.wait),
            ending=types.SimpleNamespace(abandoned=False, failed=False),
            settings=types.SimpleNamespace(stall_warning=stall),
        )  # fmt: skip
        self.node = types.SimpleNamespace(
            vertex=0, title="a/0", spec=self.members[0], runtime=self.runtime, agreed=False,
            broken=False, calling_back=False, thread=0, agreement=Agreement("a/0"),
        )  # fmt: skip
        self.node.scope = BodyScope(self.node)
        self.node.resume = lambda: None
        self.node.release = self.release
        self.states = {}
        teams = types.SimpleNamespace(runtime=self.runtime, states=self.states, ask=self.ask)
        self.hooks = RoleHooks(teams, self.node, self.members)
        self.decide = None

    def now(self):
        return self.clock

    def ask(self, node, vertex):
        self.asked.append(vertex)

    def wait(self, wait, deadline, scope):
        assert wait is self.node.agreement.decided
        self.node.agreement.decide(self.decide)

    def release(self):
        self.node.agreed = self.node.agreement.alert = True
        self.node.scope.halt = True

    def tell(self, vertex, how, rounds):
        self.states[vertex] = State(how, rounds, self.clock)

    def look(self, seconds, missing=(), label="sum"):
        """Look around after so many seconds of one wait."""
        self.clock = 1000.0 + seconds
        self.hooks.waiting(seconds, missing, label)


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


def test_a_short_wait_asks_nobody(fakes):
    fakes.hooks.begin("sum")
    fakes.look(0.05, [1, 2])
    assert not fakes.asked
    fakes.look(0.15, [1, 2])
    fakes.look(0.2, [1, 2])
    assert fakes.asked == [1, 2]  # once, and only those who are missing


def test_who_is_missing_after_it_has_left_ends_the_wait(fakes):
    fakes.hooks.begin("sum")
    fakes.look(0.2, [2])
    fakes.tell(2, RETURNED, 0)
    fakes.look(0.25, [2])  # it may have come between the look for it and the news
    with pytest.raises(UsageError, match=r"sum: a/2 \(rank 2\) has returned and will never"):
        fakes.look(0.3, [2])


def test_who_came_before_it_left_does_not(fakes):
    fakes.hooks.begin("sum")
    fakes.look(0.2, [2, 3])
    fakes.tell(2, RETURNED, 1)
    fakes.tell(3, RUNS, 0)
    fakes.look(0.25, [2, 3])
    for i in range(60):
        fakes.look(0.3 + 0.05 * i, [3])


def test_in_a_message_rounds_tell_who_will_never_come(fakes):
    fakes.hooks.begin("sum")
    fakes.hooks.end()
    fakes.hooks.begin("sum")
    fakes.look(0.2)
    fakes.look(0.25)
    assert fakes.asked == [None]  # about all, once
    fakes.tell(1, RETURNED, 2)  # it has sent its part
    fakes.look(0.3)
    fakes.tell(2, STOPPED, 1)
    with pytest.raises(UsageError, match=r"a/2 \(rank 2\) was stopped"):
        fakes.look(0.4)


def test_the_error_of_one_that_failed_is_waited_for(fakes):
    fakes.hooks.begin("sum")
    fakes.look(0.2, [2])
    fakes.tell(2, FAILED, 0)
    fakes.look(0.3, [2])
    fakes.look(1.0, [2])
    fakes.runtime.ending.failed = True
    with pytest.raises(Stopped):
        fakes.look(1.1, [2])


def test_it_is_not_waited_for_in_vain(fakes):
    fakes.hooks.begin("sum")
    fakes.look(0.2, [2])
    fakes.tell(2, FAILED, 0)
    fakes.look(0.3, [2])
    with pytest.raises(ServiceGoneError, match="has failed"):
        fakes.look(9.0, [2])


def test_a_stop_does_not_end_a_wait(fakes):
    fakes.hooks.begin("sum")
    fakes.node.agreed = True
    fakes.look(0.1, [2])
    fakes.look(30.0, [2])


@pytest.mark.parametrize("what", ["broken", "abandoned", "alone"])
def test_what_ends_every_wait(fakes, what):
    if what != "alone":
        fakes.hooks.begin("sum")
    fakes.look(0.05, [2])
    fakes.node.broken = what == "broken"
    fakes.runtime.ending.abandoned = what == "abandoned"
    fakes.node.agreed = True
    with pytest.raises(Stopped):
        fakes.look(0.1, [2])


def test_an_ended_program_ends_a_wait_with_an_error(fakes):
    fakes.runtime.done = True
    with pytest.raises(ServiceGoneError, match="sum: the program has ended"):
        fakes.look(0.1, [2])


class Method(Scope):
    """A method that counts how often it gives up its turn."""

    __slots__ = ("turns",)

    def __init__(self, owner):
        super().__init__(owner, nested=True)
        self.turns = []

    def suspend(self):
        self.turns.append("given")
        return True

    def resume(self):
        self.turns.append("back")


def test_a_method_counts_no_round_and_gives_its_turn_up_while_it_waits(fakes):
    fakes.node.agreement.freeze()
    scope = Method(fakes.node)
    token = enter(scope)
    try:
        for _ in range(2):
            fakes.hooks.begin("sum")
            fakes.look(0.05, [2])
            fakes.look(0.2, [2])
            fakes.hooks.end()
    finally:
        leave(token)
    assert scope.turns == ["given", "back"] * 2
    assert fakes.node.agreement.rounds == 0


# -- rounds -------------------------------------------------------------------------------------


def test_a_round_up_to_the_target_is_begun_and_the_next_is_not(fakes):
    hooks, agreement = fakes.hooks, fakes.node.agreement
    hooks.begin("sum")
    assert agreement.freeze() == 1
    fakes.decide = 3
    hooks.end()
    for _ in range(2):
        assert not fakes.node.agreed
        hooks.begin("sum")
        hooks.end()
    assert fakes.node.agreed
    with pytest.raises(Stopped):
        hooks.begin("sum")


def test_who_is_beyond_the_target_is_released_at_the_door(fakes):
    fakes.node.agreement.freeze()
    fakes.decide = 0
    with pytest.raises(Stopped):
        fakes.hooks.begin("sum")
    assert fakes.node.agreed


def test_callbacks_of_the_stop_begin_new_ones(fakes):
    fakes.release()
    token = enter(BodyScope(fakes.node))  # theirs has not halted
    try:
        fakes.hooks.begin("sum")
        fakes.hooks.end()
    finally:
        leave(token)
    with pytest.raises(Stopped):
        fakes.hooks.begin("sum")


# -- what is said -------------------------------------------------------------------------------


def warned(fakes, missing, until=61.0):
    for i in range(20):
        fakes.look(until - 1 + 0.1 * i, missing)
    return fakes.said


def test_the_first_of_those_who_wait_names_the_missing_once(fakes):
    fakes.hooks.begin("sum")
    (line,) = warned(fakes, [2, 3])
    assert line == (
        "mpiml: fake: a/0 (rank 0) has waited 60 s for a/2 (rank 2), a/3 (rank 3) in sum\n"
    )


def test_rounds_tell_whom_the_missing_wait_for(fakes):
    fakes.hooks.begin("sum")
    fakes.look(60.0, [2])  # asks again
    for vertex, rounds in ((0, 1), (1, 1), (2, 1), (3, 0)):
        fakes.tell(vertex, RUNS, rounds)
    fakes.look(60.3, [2])
    assert "for a/3 (rank 3) in sum" in fakes.said[0]


def test_others_keep_silent(fakes):
    fakes.node.vertex, fakes.node.spec = 1, fakes.members[1]
    fakes.hooks.begin("sum")
    assert not warned(fakes, [2])
    fakes.node.spec = fakes.members[0]
    assert not warned(fakes, [2])  # it has had its turn


def test_no_warning_is_wanted(monkeypatch):
    fakes = Fakes(monkeypatch, stall=0)
    fakes.hooks.begin("sum")
    assert not warned(fakes, [2])


def test_a_wait_is_shown_while_it_lasts(fakes):
    fakes.node.thread = threading.get_ident()
    fakes.hooks.begin("sum")
    assert not fakes.hooks.sleepers()
    fakes.look(2.0, [1, 2])
    (sleeper,) = fakes.hooks.sleepers()
    assert sleeper.wait.about == "a/1, a/2 in collective sum"
    assert sleeper.since == 1000.0
    fakes.clock += 5
    assert not fakes.hooks.sleepers()  # nobody looks any more
    fakes.look(7.0, [1])
    assert fakes.hooks.sleepers()
    fakes.hooks.end()
    assert not fakes.hooks.sleepers()
