"""Who waits for a message, and leaves: no watcher, no message and no count stays behind."""

import asyncio

import pytest

import mpiml
from tests.playing import both
from tests.topics.test_topics import LIMIT, result, run, say


@both
def test_who_polls_leaves_nothing_behind(mode):
    async def later(subscriber):
        waits = asyncio.ensure_future(anext(subscriber))
        while not subscriber._incoming._watchers:
            await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    def poll(subscriber, done):
        for timeout in (0, 0, 0, 0.001):
            with pytest.raises(mpiml.DeadlineError):
                subscriber.get(timeout)
        asyncio.run(later(subscriber))
        left = len(subscriber._incoming._watchers)
        done.put(True)
        return left, list(subscriber)

    def talk(publisher, done):
        done.get(LIMIT)
        publisher.put("late")

    def build(program):
        topic, done = program.topic("x"), program.topic("done")
        node = mpiml.PyNode(talk, topic.publisher(), done.subscriber())
        program.add_node(node, label="talk")
        program.add_node(mpiml.PyNode(poll, topic.subscriber(), done.publisher()), label="poll")

    assert result(mode, run(mode, build), "poll") in (None, [(0, ["late"])])


@both
def test_a_cancelled_task_loses_no_message(mode):
    async def listen(subscriber):
        got, cancelled = [], 0
        while True:
            task = asyncio.ensure_future(anext(subscriber))
            for _ in range(cancelled % 4):
                await asyncio.sleep(0)
            if cancelled < 50 and task.cancel():
                cancelled += 1
            try:
                got.append(await task)
            except asyncio.CancelledError:
                continue
            except StopAsyncIteration:
                return got

    def build(program):
        topic = program.topic("x", mpiml.Keep(100))
        program.add_node(mpiml.PyNode(say, topic.publisher(), 100), label="say")
        program.add_node(mpiml.PyNode(listen, topic.subscriber()), label="hear")

    assert result(mode, run(mode, build), "hear") in (None, [list(range(100))])


class Listener:
    """A service whose run() returns while messages wait; a method takes afterwards."""

    def __init__(self, subscriber, go):
        self.subscriber, self.go = subscriber, go

    def run(self):
        self.go.get(LIMIT)

    def look(self):
        incoming = self.subscriber._incoming
        return incoming.left, self.subscriber.statistics()

    def take(self):
        return self.subscriber.get(LIMIT)


@both
def test_what_waits_when_the_node_returns_is_let_go_and_counted_once(mode):
    def talk(publisher, go, listener):
        for i in range(3):
            publisher.put(i)
        go.put(True)
        while not listener.look()[0]:
            pass
        assert listener.look()[1]["waiting"] == 0
        with pytest.raises(mpiml.ServiceGoneError, match="closed its subscriber, or has retu"):
            listener.take()
        while publisher.undelivered < 3:
            assert not mpiml.context().wait_for_stop(0.001)
        return publisher.undelivered, listener.look()[1]

    def build(program):
        topic, go = program.topic("x", mpiml.Keep(8)), program.topic("go")
        node = mpiml.ServiceNode(Listener, topic.subscriber(), go.subscriber())
        listener = program.add_node(node, label="listener")
        node = mpiml.PyNode(talk, topic.publisher(), go.publisher(), listener)
        program.add_node(node, label="talk")

    found = result(mode, run(mode, build), "talk")
    zero = {"received": 0, "bytes": 0, "waiting": 0, "dropped": 0}
    assert found in (None, [(3, zero)])
