"""Services as publishers: their topics end once nobody is left who could call them."""

import struct
import threading
import time
from types import SimpleNamespace

import pytest

import mpiml
from mpiml.topics.quiet import Quiet, _State, _waits
from mpiml.wire import TOPIC_QUIET, Frame
from tests.playing import both
from tests.topics.test_topics import LIMIT, hear, result, run


class Server:
    """Publishes what it is told, as in the example of Dask's discussion."""

    def __init__(self, publisher):
        self.publisher = publisher
        self.value = 0

    def push(self, x):
        self.value += x
        self.publisher.put(self.value)

    def statistics(self):
        return self.publisher.statistics()


def ask(server, count):
    for _ in range(count):
        server.push(1)


@both
def test_iteration_ends_when_nobody_is_left_to_call_the_service(mode):
    def build(program):
        topic = program.topic("x", mpiml.Keep(4))
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        program.add_node(mpiml.PyNode(ask, server, 50), label="ask", replicas=2)
        program.add_node(mpiml.PyNode(hear, topic.subscriber()), label="hear")

    heard = result(mode, run(mode, build), "hear")
    if heard is not None:  # a method that waits for room lets others in, so any order will do
        assert sorted(heard[0]) == list(range(1, 101))


@both
def test_coroutines_end_too_and_may_go_on_afterwards(mode):
    async def listen(subscriber, server):
        found = [x async for x in subscriber]
        await server.futures.push(5)  # nobody hears it any more
        return found, server.statistics()["undelivered"]

    def build(program):
        topic = program.topic("x", mpiml.Keep(4))
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        program.add_node(mpiml.PyNode(ask, server, 10), label="ask")
        node = mpiml.PyNode(listen, topic.subscriber(), server)
        program.add_node(node, label="hear")

    heard = result(mode, run(mode, build), "hear")
    assert heard in (None, [(list(range(1, 11)), 1)])


@both
def test_what_subscribers_cause_themselves_is_not_cut_short(mode):
    def train(subscriber, server, first, rounds):
        if first:
            server.push(1)
        for done, _ in enumerate(subscriber):
            if done == rounds:
                return done
            server.push(1)
        return "too early"

    def build(program):
        topic = program.topic("x", mpiml.Keep(500))
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        for first in (0, 1):
            node = mpiml.PyNode(train, topic.subscriber(), server, first, 100)
            program.add_node(node, label=f"train{first}")

    found = run(mode, build)
    for first in (0, 1):
        assert result(mode, found, f"train{first}") in (None, [100])


@both
def test_a_call_that_nobody_waits_for_is_heard_to_its_end(mode):
    def fire(server):
        for _ in range(50):
            server.futures.push(1)

    def build(program):
        topic = program.topic("x", mpiml.Keep(1))
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        program.add_node(mpiml.PyNode(fire, server), label="fire")
        program.add_node(mpiml.PyNode(hear, topic.subscriber()), label="hear")

    heard = result(mode, run(mode, build), "hear")
    if heard is not None:
        assert sorted(heard[0]) == list(range(1, 51))


@both
def test_the_end_goes_down_a_chain(mode):
    def relay(subscriber, publisher):
        for x in subscriber:
            publisher.put(-x)
        publisher.put("end")

    def build(program):
        first, second = (
            program.topic("first", mpiml.Keep(2)),
            program.topic("second", mpiml.Keep(2)),
        )
        server = program.add_node(mpiml.ServiceNode(Server, first.publisher()), label="server")
        node = mpiml.PyNode(relay, first.subscriber(), second.publisher())
        program.add_node(node, label="relay")
        program.add_node(mpiml.PyNode(hear, second.subscriber()), label="hear")
        program.add_node(mpiml.PyNode(ask, server, 3), label="ask")

    heard = result(mode, run(mode, build), "hear")
    assert heard in (None, [[-1, -2, -3, "end"]])


def look(times):
    """Wait, without mpiml's knowledge, until it has looked so often whether all wait."""
    quiet = mpiml.context()._node.runtime.quiet
    until, limit = quiet.looks + times, time.monotonic() + LIMIT
    while quiet.looks < until:
        assert time.monotonic() < limit, "it looks no more: the topics of services have ended"
        threading.Event().wait(0.001)


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_a_body_that_works_is_waited_for(limit):
    """It may compute, or wait for a limited time, while all others wait."""

    def work(server, tick):
        if limit is None:
            look(5)
        else:
            assert tick.get(limit)
        server.push(1)

    def tick(publisher):
        look(5)
        publisher.put(True)

    def build(program):
        topic, ticks = program.topic("x"), program.topic("ticks")
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        node = mpiml.PyNode(tick, ticks.publisher())
        program.add_node(node, label="tick", daemon=limit is not None)
        program.add_node(mpiml.PyNode(work, server, ticks.subscriber()), label="work")
        program.add_node(mpiml.PyNode(hear, topic.subscriber()), label="hear")

    assert run("threads", build)["hear"] == [[1]]


@both
def test_a_bound_thread_is_waited_for(mode):
    def body(server, numbers):
        quiet, begun = mpiml.context()._node.runtime.quiet, threading.Event()

        def later():
            begun.set()
            for _ in range(20):  # it computes; asked now, its rank is not quiet
                assert not quiet.local().quiet
                threading.Event().wait(0.01)
            server.push(1)

        thread = threading.Thread(target=mpiml.context().bind(later))
        thread.start()
        assert begun.wait(LIMIT)  # a thread that has not begun is not known to the node
        found = list(numbers)
        thread.join()
        return found, server.statistics()["undelivered"]

    def build(program):
        topic = program.topic("x", mpiml.Keep(4))
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        program.add_node(mpiml.PyNode(body, server, topic.subscriber()), label="body")

    assert result(mode, run(mode, build), "body") in (None, [([1], 0)])


@both
def test_a_bound_thread_that_waits_holds_nothing_up(mode):
    def body(server, numbers):
        bound = mpiml.context().bind(mpiml.context().wait_for_stop)
        threading.Thread(target=bound, daemon=True).start()
        server.push(1)
        return list(numbers)

    def build(program):
        topic = program.topic("x", mpiml.Keep(4))
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        program.add_node(mpiml.PyNode(body, server, topic.subscriber()), label="body")

    assert result(mode, run(mode, build), "body") in (None, [[1]])


def test_ranks_are_not_asked_while_rank_0_is_at_work():
    def work(server, hurry):
        quiet = mpiml.context()._node.runtime.quiet
        look(5)
        hurry.append(quiet.waves)
        server.push(1)

    def build(program):
        topic = program.topic("x")
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        program.add_node(mpiml.PyNode(work, server, asked), label="work")
        program.add_node(mpiml.PyNode(hear, topic.subscriber()), label="hear")

    asked = []
    assert run("threads", build)["hear"] == [[1]]
    assert asked == [0]


def quiet_of(states, monkeypatch):
    """A `Quiet` on rank 0 of two; waits that last no time; the frames it sends and how it waits."""
    sent, steps = [], []
    engine = SimpleNamespace(
        rank=0, size=2, handlers={}, transmit=lambda *a, **k: sent.append(a)
    )
    quiet = Quiet(SimpleNamespace(engine=engine, stopping=False))
    left = iter(states)

    def pause(step):
        steps.append(step)
        quiet.here = next(left, None)
        return quiet.here is None

    monkeypatch.setattr(quiet, "local", lambda: quiet.here)
    monkeypatch.setattr(quiet._closed, "wait", pause)
    monkeypatch.setattr("mpiml.topics.quiet._LIMIT", 0.0)
    return quiet, sent, steps


def test_questions_become_rarer_while_nothing_changes(monkeypatch):
    still, moved = _State(5, 5, 1, True), _State(6, 6, 1, True)
    quiet, sent, steps = quiet_of([still] * 8 + [moved] * 2, monkeypatch)
    quiet._watch()
    assert steps == [0.05, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 0.05, 0.1]
    assert len(sent) == quiet.waves == 8  # not where it had moved, nor at the first look


def test_a_late_answer_stays_in_its_wave(monkeypatch):
    state = _State(1, 1, 1, True)
    quiet, _, _ = quiet_of([], monkeypatch)
    quiet.here = state
    assert quiet._ask(state) is None
    late = quiet._wave
    assert quiet._ask(state) is None
    body = struct.pack("<4q", 9, 9, 0, True)
    frame = Frame(0, 0, 0, 1, 0, 0, 0, b"", body, ())  # of the first question
    quiet._asks._engine.handlers[TOPIC_QUIET](1, frame, ())
    assert late.state == _State(10, 10, 1, True)
    assert not quiet._wave.complete.is_set()
    assert quiet._wave.state is None


def test_where_only_daemons_wait_the_program_runs_until_it_is_stopped():
    ended, before = [], set(threading.enumerate())  # an earlier program's may be among them

    def listen(subscriber):
        threading.Thread(target=mpiml.context().bind(stop)).start()
        for _ in subscriber:
            pass
        ended.append(True)

    def stop():
        # there is no end to be found, so nobody looks for it
        new = set(threading.enumerate()) - before
        assert "mpiml-quiet" not in {thread.name for thread in new}
        mpiml.context().stop()

    def build(program):
        topic = program.topic("x")
        program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        program.add_node(mpiml.PyNode(listen, topic.subscriber()), label="listen", daemon=True)

    run("threads", build)
    assert not ended


@both
def test_services_take_messages_too(mode):
    class Log:
        def __init__(self, subscriber):
            self.subscriber = subscriber

        def take(self, count):
            return [self.subscriber.get(LIMIT) for _ in range(count)]

        def rest(self):
            return list(self.subscriber)

    def body(log, server):
        ask(server, 3)
        assert log.take(2) == [1, 2]
        assert log.rest() == [3]  # the service that publishes has ended by then

    def build(program):
        topic = program.topic("x", mpiml.Keep(4))
        server = program.add_node(mpiml.ServiceNode(Server, topic.publisher()), label="server")
        log = program.add_node(mpiml.ServiceNode(Log, topic.subscriber()), label="log")
        program.add_node(mpiml.PyNode(body, log, server), label="body")

    run(mode, build)


def test_a_wait_for_one_that_never_comes_is_ended_by_a_stop():
    """A body that sits in wait_for_stop has not returned: its topic goes on."""
    seen, nodes = [], []

    def silent(publisher):
        mpiml.context().wait_for_stop()

    def wait(subscriber):
        nodes.append(mpiml.context()._node)
        seen.append(hear(subscriber))

    def stop():
        engine, limit = mpiml.context()._node.runtime.engine, time.monotonic() + LIMIT
        while not (nodes and _waits(nodes[0], [*engine.sleepers.values()])):
            assert time.monotonic() < limit, "expected the subscriber to wait for a message"
            threading.Event().wait(0.001)
        mpiml.context().stop()

    def build(program):
        topic = program.topic("x")
        program.add_node(mpiml.PyNode(silent, topic.publisher()), label="silent")
        program.add_node(mpiml.PyNode(wait, topic.subscriber()), label="wait")
        program.add_node(mpiml.PyNode(stop), label="stop")

    assert run("threads", build)["wait"] == [None]
    assert not seen
