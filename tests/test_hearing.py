"""When a rank says that nothing comes from a host: with a link of the test's own."""

import threading
from types import SimpleNamespace

import pytest

from mpiml import hearing as hearing_module
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


def looks(engine, number=LOOKS):
    for _ in range(number):
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


def test_with_the_warning_turned_off_the_stop_is_watched_no_more_often_than_its_grace_asks_for():
    """On a machine that is loaded, looks that are meant to be frequent come late, and count less."""
    runtime = Runtime()
    runtime.settings = SimpleNamespace(grace=600.0, failure_grace=None)
    runtime.stopping = True
    hearing = Hearing(runtime, 0, list)
    hearing.stopping()
    looks(runtime.engine, 1)
    assert not runtime.engine.looked.acquire(timeout=0.2)
    hearing.close()
    runtime.done = True


def test_of_many_partners_those_on_other_hosts_are_asked_one_of_each_first(monkeypatch):
    """A subscriber on the first of 3 hosts of 40 ranks; the publishers are on all of them."""
    runtime = Runtime()
    runtime.engine.size = 120
    rows = [SimpleNamespace(name=str(i), ranks=range(40 * i, 40 * i + 40)) for i in range(3)]
    runtime.hosts = SimpleNamespace(rows=rows, host_of=lambda rank: range(120)[rank] // 40)
    runtime.ranks = range(121)  # the last one is a rank of another program
    runtime.vertices = ()
    runtime.present = [SimpleNamespace(vertex=0)]
    edges = [SimpleNamespace(vertex=0, publishers=tuple(range(1, 121)))]
    edges += [SimpleNamespace(vertex=v, publishers=(0, 5)) for v in (7, 119)]
    monkeypatch.setattr(hearing_module, "subscriptions", lambda _: {1: ((), edges)})
    partners = Hearing(runtime, 0, list)._partners_of(0)
    assert partners[:4] == (40, 80, 41, 81)
    assert len(partners) == 32


def test_a_handler_of_a_signal_may_ask_for_the_stop_while_an_answer_is_taken_in():
    """Python runs it between any two lines of the thread that holds the lock."""
    runtime = Runtime()
    hearing = Hearing(runtime, 0, list)
    runtime.stopping = runtime.done = True
    hearing._silence.heard = lambda rank, now: hearing.stopping()
    thread = threading.Thread(target=hearing._on_heard, args=(1, None, ()), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
