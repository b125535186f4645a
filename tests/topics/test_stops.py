"""How topics end when work is not done, and what is counted then."""

import re

import pytest

import mpiml
from mpiml.runtime import Runtime
from tests.playing import both
from tests.topics.test_topics import LIMIT, hear, result, run, say


@both
def test_statistics_say_what_has_become_of_each_message(mode):
    def talk(publisher, done):
        for _ in range(100):
            publisher.put(bytes(1000))
        done.get(LIMIT)
        return publisher.statistics()

    def take(subscriber, done):
        for _ in range(100):
            subscriber.get(LIMIT)
        done.put(True)
        return subscriber.statistics()

    def build(program):
        topic, done = program.topic("x", mpiml.Keep(4)), program.topic("done", mpiml.Keep(1))
        node = mpiml.PyNode(talk, topic.publisher(), done.subscriber())
        program.add_node(node, label="talk")
        node = mpiml.PyNode(take, topic.subscriber(), done.publisher())
        program.add_node(node, label="take")

    found = run(mode, build)
    if result(mode, found, "talk") is not None:
        put, got = found["talk"][0], found["take"][0]
        size = put.pop("bytes")
        assert put == {"put": 100, "sent": 100, "waiting": 0, "dropped": 0, "undelivered": 0}
        assert size == got.pop("bytes")
        assert 100_000 <= size < 120_000
        assert got == {"received": 100, "waiting": 0, "dropped": 0}


@both
def test_what_a_subscriber_leaves_untaken_is_undelivered(mode):
    def talk(publisher):
        for i in range(5):
            publisher.put(i)
        while publisher.undelivered < 3:
            assert not mpiml.context().wait_for_stop(0.001)
        publisher.put(5)
        return publisher.statistics()

    def take(subscriber):
        return subscriber.get(LIMIT), subscriber.get(LIMIT)

    def build(program):
        topic = program.topic("x", mpiml.Keep(8))
        program.add_node(mpiml.PyNode(talk, topic.publisher()), label="talk")
        program.add_node(mpiml.PyNode(take, topic.subscriber()), label="take")

    found = result(mode, run(mode, build), "talk")
    if found is not None:
        assert (found[0]["sent"], found[0]["undelivered"], found[0]["waiting"]) == (5, 4, 0)


class Shelf:
    """A service that puts and takes in its methods."""

    def __init__(self, publisher=None, subscriber=None, begun=None):
        self.publisher, self.subscriber, self.begun = publisher, subscriber, begun

    def produce(self, count):
        self.begun.put(True)
        for i in range(count):
            self.publisher.put(i)

    def consume(self):
        self.begun.put(True)
        found = list(self.subscriber)
        raise AssertionError(f"the end of an iteration looks as if all had come: {found}")


@both
def test_a_method_that_waits_for_room_does_not_hold_up_the_end(mode):
    def ask(shelf, begun):
        shelf.futures.produce(100)
        begun.get(LIMIT)

    def build(program):
        topic, begun = program.topic("x", mpiml.Keep(1)), program.topic("begun")
        node = mpiml.ServiceNode(Shelf, topic.publisher(), begun=begun.publisher())
        shelf = program.add_node(node, label="shelf")
        program.add_node(mpiml.ServiceNode(Shelf, subscriber=topic.subscriber()), label="full")
        program.add_node(mpiml.PyNode(ask, shelf, begun.subscriber()), label="ask")

    run(mode, build)


@both
@pytest.mark.parametrize("source", ["body", "service"])
def test_a_method_that_waits_for_a_message_does_not_hold_up_a_stop(mode, source):
    errors = []

    def ask(shelf, begun):
        future = shelf.futures.consume()
        begun.get(LIMIT)
        future.add_done_callback(lambda f: errors.append(f.exception()))
        mpiml.context().stop()

    def silent(publisher):
        mpiml.context().wait_for_stop()

    def build(program):
        topic, begun = program.topic("x"), program.topic("begun")
        node = mpiml.ServiceNode(Shelf, None, topic.subscriber(), begun.publisher())
        shelf = program.add_node(node, label="shelf")
        if source == "body":
            program.add_node(mpiml.PyNode(silent, topic.publisher()), label="source")
        else:
            program.add_node(mpiml.ServiceNode(Shelf, topic.publisher()), label="source")
        program.add_node(mpiml.PyNode(ask, shelf, begun.subscriber()), label="ask")

    run(mode, build)
    for error in errors:
        assert isinstance(error, mpiml.ServiceGoneError)
        assert "before they were done: source/0" in str(error)
    if mode == "threads":
        assert len(errors) == 1


@both
def test_the_failure_of_a_publisher_is_no_end_of_its_work(mode):
    seen = []

    def fail(publisher):
        publisher.put(1)
        raise KeyError("broken")

    def take(subscriber):
        for _ in subscriber:
            pass
        seen.append("the end")

    def build(program):
        topic = program.topic("x", mpiml.Keep(2))
        program.add_node(mpiml.PyNode(fail, topic.publisher()), label="fail")
        program.add_node(mpiml.PyNode(take, topic.subscriber()), label="take", replicas=2)

    with pytest.raises(KeyError, match="broken"):
        run(mode, build)
    assert not seen


@both
def test_nothing_is_put_after_the_body_has_returned(mode):
    class Speaker:
        def __init__(self, publisher):
            self.publisher = publisher

        def run(self):
            self.publisher.put("one")

        def say(self, x):
            self.publisher.put(x)

    def body(subscriber, speaker):
        assert list(subscriber) == ["one"]  # it ends with run(), not with the service
        with pytest.raises(mpiml.ServiceGoneError, match=r"speaker/0: the node has returned"):
            speaker.say("two")

    def build(program):
        topic = program.topic("x")
        node = mpiml.ServiceNode(Speaker, topic.publisher())
        speaker = program.add_node(node, label="speaker")
        program.add_node(mpiml.PyNode(body, topic.subscriber(), speaker), label="body")

    run(mode, build)


@pytest.mark.parametrize("timeout", [-1, float("nan"), True, "1"])
def test_a_wrong_timeout_is_refused(timeout):
    def body(subscriber):
        with pytest.raises(mpiml.UsageError, match="expected timeout >= 0 or None"):
            subscriber.get(timeout)
        return hear(subscriber)

    def build(program):
        topic = program.topic("x")
        program.add_node(mpiml.PyNode(say, topic.publisher(), 1), label="say")
        program.add_node(mpiml.PyNode(body, topic.subscriber()), label="body")

    assert run("threads", build)["body"] == [[0]]


def test_nodes_that_iterate_over_each_other_are_reported(monkeypatch):
    """Each waits for the other to return: a deadlock, said with lines and names, and stoppable."""
    said = []

    def say_and_stop(self, text):
        said.append(text)
        self.request_stop(self.nodes[0], "seen")

    def talk(publisher, subscriber):
        publisher.put(1)
        return list(subscriber)

    monkeypatch.setattr(Runtime, "say", say_and_stop)
    program = mpiml.Program("all to all")
    topic = program.topic("x")
    node = mpiml.PyNode(talk, topic.publisher(), topic.subscriber())
    program.add_node(node, label="talk", replicas=2)
    mpiml.launch(program, stall_warning=0.1)
    assert "every node has waited for 0.1 s or more. Who waits for whom" in said[0]
    for i in range(2):
        assert re.search(
            rf"talk/{i} .* for topic 'x': a message for talk/{i} at test_stops\.py:", said[0]
        )
