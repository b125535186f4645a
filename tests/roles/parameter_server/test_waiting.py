"""Methods that wait at a server: one wait until something changes, so that who watches sees how long."""

import threading

import pytest

from mpiml.errors import ServiceGoneError
from mpiml.roles.parameter_server import waiting
from mpiml.roles.parameter_server.waiting import Waiters


class Engine:
    """Waits by playing a list of actions, one for each wait."""

    def __init__(self, *actions):
        self.actions = list(actions)
        self.waits = []

    def wait(self, wait, deadline, scope):
        self.waits.append((wait.about, deadline is not None))
        self.actions.pop(0)()
        assert wait.ready or deadline is not None
        return wait.ready

    def fulfil(self, wait):
        wait.ready = True


def test_a_method_looks_again_when_its_name_is_called():
    state = []

    def change():
        state.append(1)
        waiters.wake("other", "mine")

    engine = Engine(lambda: waiters.wake("mine"), change)
    waiters = Waiters(engine)
    waiters.until(lambda: bool(state), lambda: f"state {len(state)}", "mine")
    # without deadlines: a report of stalls would see many short waits
    assert engine.waits == [("state 0", False), ("state 0", False)]
    assert len(waiters) == 0
    waiters.until(lambda: bool(state), lambda: "", "mine")  # nothing to wait for
    assert len(engine.waits) == 2


def nothing():
    pass


def test_the_end_of_the_program_ends_waits_and_later_ones(monkeypatch):
    monkeypatch.setattr(waiting, "_PATIENCE", 0.0)
    ended = threading.Event()
    engine = Engine(lambda: (waiters.end(), ended.wait(10.0)), nothing, nothing)
    waiters = Waiters(engine)
    fulfil = engine.fulfil
    engine.fulfil = lambda wait: (fulfil(wait), ended.set())
    for _ in range(2):
        with pytest.raises(ServiceGoneError, match="a pull: expected it to end"):
            waiters.until(lambda: False, lambda: "a pull", 0)
    assert [limited for _, limited in engine.waits] == [False, True, True]


def test_what_is_there_in_a_while_is_had_after_the_end(monkeypatch):
    state = []
    engine = Engine(lambda: (state.append(1), waiters.wake("mine")))
    waiters = Waiters(engine)
    waiters._end()
    waiters.until(lambda: bool(state), lambda: "a part", "mine")
    assert engine.waits == [("a part", True)]
