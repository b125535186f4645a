"""When a rank says that nothing comes from a host: with a link of the test's own."""

import threading
from types import SimpleNamespace

import pytest

from mpiml import wire
from mpiml.hearing import Hearing
from mpiml.wire import HEAR_ASK, HEARD

LOOKS = 30  # far more than it takes to tell


class Engine:
    """Rank 0 of 3, which waits for rank 1; `turning`: whether it takes in what it sends itself."""

    rank, size = 0, 3
    sleepers = ()

    def __init__(self):
        self.handlers = {}
        self.link = self
        self.sleepers = {}
        self.turning = False
        self.answers = ()
        self.looked = threading.Semaphore(0)
        self.asked = []

    @property
    def pending(self):
        self.looked.release()
        call = SimpleNamespace(target_vertex=1, about="far/0.ask()")
        return {1: call}

    def note_sent(self):
        pass

    def transmit(self, rank, kind, source, target):
        assert kind == HEAR_ASK
        self.asked.append(rank)
        if rank in self.answers:
            self.handlers[HEARD](rank, None, ())

    def send(self, rank, message):
        assert (rank, wire.split(message).kind) == (0, HEARD)
        if self.turning:
            self.handlers[HEARD](rank, None, ())


class Runtime:
    """A program on two hosts."""

    name, done, stopping = "far", False, False
    ranks = (0, 1, 2)
    teams = SimpleNamespace(awaited=lambda: ())

    def __init__(self):
        self.engine = Engine()
        rows = [SimpleNamespace(name="a", ranks=(0,)), SimpleNamespace(name="b", ranks=(1, 2))]
        self.hosts = SimpleNamespace(rows=rows, host_of=lambda rank: min(rank, 1))
        self.settings = SimpleNamespace(grace=0.2, failure_grace=None)
        self.said, self.text = threading.Event(), ""

    def say(self, text):
        self.text += text
        self.said.set()


@pytest.fixture
def heard():
    runtime = Runtime()
    hearing = Hearing(runtime, 0.12, list)
    yield runtime, hearing
    runtime.done = True
    hearing.close()


def looks(engine):
    for _ in range(LOOKS):
        assert engine.looked.acquire(timeout=20)


def test_a_rank_that_takes_nothing_in_accuses_nobody(heard):
    runtime, hearing = heard
    looks(runtime.engine)
    assert runtime.text == ""
    assert hearing.silent(0.01) == ""
    runtime.engine.turning = True
    runtime.engine.handlers[HEARD](0, None, ())  # what it sent itself comes at last
    assert runtime.said.wait(20)
    assert "nothing has come from host b (ranks 1, 2) to rank 0" in runtime.text
    assert "rank 0 waits for far/0.ask()" in runtime.text
    assert "or what runs there computes without letting mpiml run" in runtime.text
    assert "does not call mpiml.poll()" in runtime.text


def test_a_host_of_which_another_rank_answers_is_not_cut_off(heard):
    runtime, hearing = heard
    runtime.engine.answers = (2,)
    runtime.engine.turning = True
    assert runtime.said.wait(20)
    assert 2 in runtime.engine.asked
    assert "nothing has come" not in runtime.text
    assert "rank 1 of host b: no answer to rank 0" in runtime.text
    assert "though rank 2 of that host did answer" in runtime.text
    assert "The host is there" in runtime.text
    assert hearing.silent(0.01)
    assert hearing.silent(0.01, cut=True) == ""


def test_what_is_silent_at_the_stop_is_known_though_nothing_is_told():
    """With the warning turned off nobody is asked before the stop."""
    runtime = Runtime()
    hearing = Hearing(runtime, 0, list)
    runtime.engine.turning = True
    runtime.stopping = True
    hearing.stopping()
    looks(runtime.engine)
    assert "nothing has come from host b (ranks 1, 2)" in hearing.silent(0.1, cut=True)
    hearing.close()
    runtime.done = True
    assert runtime.text == ""
