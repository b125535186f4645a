"""`mpiml.roles.Barrier`: nodes of several roles wait for each other, and who is missing is named."""

from functools import partial

import pytest

import mpiml
from mpiml.ending import Ending
from mpiml.roles.barrier import Barrier, Meetings
from tests.playing import LIMIT, both, launched

TITLES = {3: "a/0", 5: "a/1", 8: "b/0"}


def launch(mode, build):
    """Build a program with a barrier, run it in threads or on the ranks of mpiexec."""
    program = mpiml.Program("barrier")
    barrier = program.add_node(mpiml.ServiceNode(mpiml.roles.Barrier), label="barrier")
    build(program, barrier)
    return launched(mode, program)


# -- who is where ----------------------------------------------------------------------------------


def test_a_meeting_is_complete_with_the_last_and_begins_anew():
    meetings = Meetings(TITLES)
    first = meetings.arrive("x", 3, "wake 3")
    assert meetings.arrive("x", 5, "wake 5") is first
    assert meetings.arrive("y", 8, "wake 8") is not first
    assert not first.complete
    assert meetings.arrive("x", 8, "wake 8") is first
    assert first.complete
    assert list(first.there.values()) == ["wake 3", "wake 5", "wake 8"]
    assert meetings.arrive("x", 3, "again") is not first
    assert meetings.waiting() == ["wake 8", "again"]


def test_who_gives_up_is_missing_for_the_others():
    meetings = Meetings(TITLES)
    meeting = meetings.arrive("x", 3, None)
    meetings.arrive("x", 5, None)
    assert meetings.withdraw("x", 3, meeting) == ["b/0"]
    assert meetings.withdraw("x", 5, meeting) == ["a/0", "b/0"]
    assert meetings.waiting() == []
    assert meetings.arrive("x", 5, None) is not meeting


def test_a_node_counts_once():
    meetings = Meetings(TITLES)
    meetings.arrive("x", 5, None)
    with pytest.raises(mpiml.UsageError, match="a/1 waits there already"):
        meetings.arrive("x", 5, None)
    assert meetings.waiting() == [None]


def test_who_has_returned_does_not_come():
    meetings = Meetings(TITLES)
    meeting = meetings.arrive("x", 3, "wake 3")
    assert meetings.gone(meeting) == []
    meetings.leave(3)  # it waits there all the same
    assert meetings.gone(meeting) == []
    meetings.leave(8)
    assert meetings.gone(meeting) == ["b/0"]


# -- in programs -----------------------------------------------------------------------------------


class Log:
    def __init__(self):
        self.lines = []

    def add(self, line):
        self.lines.append(line)
        return list(self.lines)


@both
def test_nobody_goes_on_before_all_are_there(mode):
    def body(barrier, log):
        seen = []
        for turn in range(5):
            log.add(turn)
            barrier.wait("turn")
            seen.append(log.add("between").count(turn))
            barrier.wait(timeout=LIMIT)
        return seen

    def build(program, barrier):
        log = program.add_node(mpiml.ServiceNode(Log), label="log")
        program.add_node(mpiml.PyNode(body, barrier, log), label="a", replicas=2)
        program.add_node(mpiml.PyNode(body, barrier, log), label="b")

    result = launch(mode, build)
    if result is not None:
        assert result["a"] == [[3] * 5] * 2
        assert result["b"] == [[3] * 5]


def absent(barrier):
    mpiml.context().wait_for_stop()


@both
def test_a_timeout_names_who_is_missing(mode):
    def body(barrier):
        for _ in range(2):  # who has given up may come again
            with pytest.raises(
                mpiml.DeadlineError,
                match=r"barrier/0.wait\('go'\): expected 2 nodes within 0.01 s, got 1; missing: late/0",
            ):
                barrier.wait("go", timeout=0.01)
        mine = barrier.futures.wait("twice")
        with pytest.raises(mpiml.UsageError, match="body/0 waits there already"):
            barrier.wait("twice")
        with pytest.raises(mpiml.UsageError, match="expected timeout >= 0"):
            barrier.wait("twice", timeout=-1)
        with pytest.raises(mpiml.UsageError, match=r"got client\.stream"):
            next(iter(barrier.stream.wait()))
        with pytest.raises(TypeError, match="nonsense"):
            barrier.wait(nonsense=1)
        assert not mine.done()
        mpiml.context().stop()

    def build(program, barrier):
        program.add_node(mpiml.PyNode(body, barrier), label="body")
        program.add_node(mpiml.PyNode(absent, [barrier]), label="late")

    launch(mode, build)


@both
def test_who_waits_for_a_node_that_returns_is_told(mode):
    def body(barrier):
        for _ in range(2):  # first it waits, then it need not
            with pytest.raises(
                mpiml.ServiceGoneError,
                match=r"wait\('more'\): expected 2 nodes, got 1; .* more: short/0, which returned",
            ):
                barrier.wait("more")

    def short(barrier):
        barrier.wait("once")

    def both_of_them(barrier):
        barrier.wait("once")
        body(barrier)

    def build(program, barrier):
        program.add_node(mpiml.PyNode(both_of_them, barrier), label="body")
        program.add_node(mpiml.PyNode(short, barrier), label="short")

    launch(mode, build)


def hold_back_stops(monkeypatch):
    """Let a wish to stop be heard of only after somebody has learnt that there is one."""
    held = []
    accept, ask = Ending.accept, Ending.ask

    def hold(ending, note):
        if note.benign:
            held.append(partial(accept, ending, note))
        else:
            accept(ending, note)

    def told(then, stops):
        then(stops)
        while stops and held:
            held.pop()()

    monkeypatch.setattr(Ending, "accept", hold)
    monkeypatch.setattr(Ending, "ask", lambda ending, then: ask(ending, partial(told, then)))


@pytest.mark.parametrize("asks", ["the body", "a service that it calls"])
@both
def test_who_returns_since_the_program_stops_is_not_missed(mode, asks, monkeypatch):
    if mode == "threads":
        hold_back_stops(monkeypatch)

    def stuck(barrier):
        barrier.wait("never")

    def leaves(barrier, counter):
        if asks == "the body":
            mpiml.context().stop()
        else:
            counter.increment(steps=1)

    def build(program, barrier):
        counter = program.add_node(
            mpiml.ServiceNode(mpiml.roles.Counter, {"steps": 1}), label="counter"
        )
        program.add_node(mpiml.PyNode(stuck, barrier), label="stuck", replicas=2)
        program.add_node(mpiml.PyNode(leaves, barrier, counter), label="leaves")

    result = launch(mode, build)
    by = "leaves/0" if asks == "the body" else "counter/0"
    assert result is None or result.stopped_by == f"{by} called stop()"


def test_an_error_while_the_others_are_watched_leaves_nobody_behind(monkeypatch):
    real, failures = Barrier._await_return, []

    def fails_at_first(barrier, vertex):
        if len(failures) < 2:
            failures.append(vertex)
            raise OSError("no more threads, say")
        real(barrier, vertex)

    monkeypatch.setattr(Barrier, "_await_return", fails_at_first)

    def body(barrier):
        for _ in range(2):
            with pytest.raises(OSError, match="no more threads"):
                barrier.wait("more")
        with pytest.raises(mpiml.ServiceGoneError, match="short/0, which returned"):
            barrier.wait("more")

    def build(program, barrier):
        program.add_node(mpiml.PyNode(body, barrier), label="body")
        program.add_node(mpiml.PyNode(lambda barrier: None, barrier), label="short")

    launch("threads", build)
    assert len(failures) == 2


class Nested:
    def __init__(self, barrier):
        self.barrier = barrier

    def go(self):
        with pytest.raises(mpiml.ServiceGoneError, match="not all will come"):
            self.barrier.wait("never")
        return "gone"


@both
def test_a_stop_ends_the_waits_of_bodies_and_methods(mode):
    def stuck(barrier):
        barrier.wait("never")

    def stopper(nested, barrier):
        answers = []

        def check():
            assert answers[0].result(0) == "gone"

        mpiml.context().on_stop(check)
        answers.append(nested.futures.go())
        with pytest.raises(mpiml.DeadlineError):
            barrier.wait("never", timeout=0.01)
        mpiml.context().stop()

    def build(program, barrier):
        nested = program.add_node(mpiml.ServiceNode(Nested, barrier), label="nested")
        program.add_node(mpiml.PyNode(stuck, barrier), label="stuck", replicas=2)
        program.add_node(mpiml.PyNode(stopper, nested, barrier), label="stopper")
        program.add_node(mpiml.PyNode(absent, barrier), label="absent")

    result = launch(mode, build)
    assert result is None or "stopper/0" in result.stopped_by


def test_a_caller_without_the_handle_is_refused():
    program = mpiml.Program("barrier")
    program.add_node(mpiml.ServiceNode(mpiml.roles.Barrier), label="barrier")
    program.add_node(mpiml.PyNode(lambda: None), label="body")
    with mpiml.testing.running(program, manual=["body"]) as run:
        with pytest.raises(mpiml.UsageError, match=r"handle \(none does\)"):
            run.client("barrier").wait()
