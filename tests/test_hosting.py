"""A node on its rank: the two sides of the agreed stop, and what computing beside calls changes."""

import sys
import threading
import types

import pytest

from mpiml.agree import Agreement
from mpiml.hosting import HostedNode, _Beside
from mpiml.waits import Wait


class Engine:
    pause_us = 0

    def fulfil(self, wait):
        wait.ready = True


class Node(HostedNode):
    """A node whose body acts in the middle of `on_target`."""

    def __init__(self, act):
        self.agreement = Agreement("role/0")
        self.resumed = Wait()
        self.runtime = types.SimpleNamespace(engine=Engine(), body_left=lambda node: None)
        self.agreed = False
        self.body = True
        self.spec = types.SimpleNamespace(replicas=2)
        self.released_by = []
        self._lock = threading.Lock()
        self._held = []
        self._flags = {"waiting": False, "returned": False}
        self._act = act

    def release(self):
        self.agreed = True
        self.released_by.append(1)

    def _flag(self, name):
        old = self._flags[name]
        if self._act == name:
            self._act = None
            self.enter(name)
        return old

    def enter(self, name):
        """What the body does: say so, then look whether it is decided."""
        if name == "returned":
            self._left()
            return
        self._flags[name] = True
        if self.agreement.decided.ready:
            self.release()

    @property
    def waiting(self):
        return self._flag("waiting")

    @property
    def returned(self):
        return self._flag("returned")

    @returned.setter
    def returned(self, value):
        self._flags["returned"] = value


@pytest.mark.parametrize("act", ["waiting", "returned"])
def test_a_body_that_ends_its_rounds_while_the_target_comes_is_released(act):
    node = Node(act)  # right after the look at it
    node.on_target(3)
    assert node.released_by


@pytest.mark.parametrize("act", ["waiting", "returned"])
def test_a_body_that_ends_its_rounds_before_or_after_the_target_is_released(act):
    for before in (True, False):
        node = Node(None)
        if before:
            node.enter(act)
        node.on_target(3)
        assert bool(node.released_by) is before
        if not before:
            node.enter(act)
        assert node.released_by


def test_the_switch_interval_comes_back_after_the_last_run():
    beside, one, two = _Beside(), Engine(), Engine()
    before = sys.getswitchinterval()
    try:
        beside.enter(one)
        beside.enter(one)
        beside.enter(two)
        assert sys.getswitchinterval() < before
        beside.leave(one)
        assert (one.pause_us > 0, two.pause_us > 0) == (True, True)
        beside.leave(one)
        assert (one.pause_us > 0, two.pause_us > 0) == (False, True)
        assert sys.getswitchinterval() < before
        beside.leave(two)
        assert two.pause_us == 0
        assert sys.getswitchinterval() == pytest.approx(before)
    finally:
        sys.setswitchinterval(before)
