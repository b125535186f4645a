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
        assert deadline is None  # else a report of stalls would see many short waits
        self.waits.append(wait.about)
        self.actions.pop(0)()
        assert wait.ready

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
    assert engine.waits == ["state 0", "state 0"]
    assert len(waiters) == 0
    waiters.until(lambda: bool(state), lambda: "", "mine")  # nothing to wait for
    assert len(engine.waits) == 2


def test_the_end_of_the_program_ends_waits_and_later_ones(monkeypatch):
    monkeypatch.setattr(waiting, "_PATIENCE", 0.0)
    ended = threading.Event()
    engine = Engine(lambda: (waiters.end(), ended.wait(10.0)))
    waiters = Waiters(engine)
    fulfil = engine.fulfil
    engine.fulfil = lambda wait: (fulfil(wait), ended.set())
    with pytest.raises(ServiceGoneError, match="a pull: expected it to end"):
        waiters.until(lambda: False, lambda: "a pull", 0)
    with pytest.raises(ServiceGoneError):
        waiters.until(lambda: False, lambda: "a pull", 0)
    assert len(engine.waits) == 1
