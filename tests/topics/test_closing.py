"""Ends that a node says itself: `close` and ``with``; and waits for room that must not be."""

import asyncio

import pytest

import mpiml
from tests.playing import both
from tests.topics.test_topics import LIMIT, hear, result, run


@both
def test_a_closed_publisher_ends_iterations_and_refuses_more(mode):
    def talk(publisher, answer):
        with publisher:
            publisher.put(1)
        publisher.close()  # the second time nothing
        with pytest.raises(mpiml.ServiceGoneError, match=r"has closed its publisher"):
            publisher.put(2)
        return answer.get(LIMIT)  # it works on

    def listen(subscriber, answer):
        answer.put(list(subscriber))

    def build(program):
        topic, answer = program.topic("x", mpiml.Keep(2)), program.topic("answer")
        program.add_node(
            mpiml.PyNode(talk, topic.publisher(), answer.subscriber()), label="talk"
        )
        program.add_node(
            mpiml.PyNode(listen, topic.subscriber(), answer.publisher()), label="listen"
        )

    assert result(mode, run(mode, build), "talk") in (None, [[1]])


@both
def test_nodes_that_hear_each_other_may_iterate_once_they_have_closed(mode):
    def talk(publisher, subscriber):
        with publisher:
            for i in range(20):
                publisher.put((mpiml.context().index, i))
        return sorted(subscriber)

    def build(program):
        topic = program.topic("x", mpiml.Keep(20))
        node = mpiml.PyNode(talk, topic.publisher(), topic.subscriber())
        program.add_node(node, label="talk", replicas=2)

    whole = [(who, i) for who in range(2) for i in range(20)]
    assert result(mode, run(mode, build), "talk") in (None, [whole] * 2)


@both
def test_a_block_that_fails_is_no_end_of_the_work(mode):
    def talk(publisher):
        with pytest.raises(KeyError), publisher:
            raise KeyError("half")
        publisher.put("whole")

    def build(program):
        topic = program.topic("x")
        program.add_node(mpiml.PyNode(talk, topic.publisher()), label="talk")
        program.add_node(mpiml.PyNode(hear, topic.subscriber()), label="hear")

    assert result(mode, run(mode, build), "hear") in (None, [["whole"]])


@both
def test_a_closed_subscriber_holds_nobody_up_and_its_node_works_on(mode):
    def talk(publisher, done):
        for i in range(10):
            publisher.put(i)
        while publisher.undelivered < 9:
            assert not mpiml.context().wait_for_stop(0.001)
        done.put(True)
        return publisher.undelivered

    def listen(subscriber, done):
        with subscriber:
            first = next(iter(subscriber))
        assert done.get(LIMIT)
        with pytest.raises(mpiml.ServiceGoneError, match="has closed its subscriber"):
            subscriber.get(LIMIT)
        assert list(subscriber) == []
        return first, subscriber.statistics()["received"], subscriber.statistics()["dropped"]

    def build(program):
        topic, done = program.topic("x", mpiml.Keep(2)), program.topic("done")
        program.add_node(mpiml.PyNode(talk, topic.publisher(), done.publisher()), label="talk")
        node = mpiml.PyNode(listen, topic.subscriber(), done.subscriber())
        program.add_node(node, label="listen")

    found = run(mode, build)
    assert result(mode, found, "talk") in (None, [9])
    assert result(mode, found, "listen") in (None, [(0, 1, 0)])


@both
def test_to_close_a_subscriber_ends_the_waits_of_other_tasks(mode):
    async def listen(subscriber, go):
        waits = asyncio.ensure_future(anext(subscriber, "the end"))
        while not subscriber._incoming._watchers:
            await asyncio.sleep(0)
        subscriber.close()
        found = await waits
        go.put(True)
        return found

    def talk(publisher, go):
        return go.get(LIMIT)

    def build(program):
        topic, go = program.topic("x"), program.topic("go")
        program.add_node(mpiml.PyNode(talk, topic.publisher(), go.subscriber()), label="talk")
        node = mpiml.PyNode(listen, topic.subscriber(), go.publisher())
        program.add_node(node, label="listen")

    assert result(mode, run(mode, build), "listen") in (None, ["the end"])


async def fill(publisher, count):
    """Put so many: where there is no room, as the error says."""
    refused = 0
    for i in range(count):
        try:
            publisher.put(i)
        except mpiml.UsageError as error:
            refused += "await asyncio.to_thread(publisher.put, x)" in str(error)
            await asyncio.to_thread(publisher.put, i)
    return refused


class Filler:
    """A service that puts in a coroutine."""

    def __init__(self, publisher):
        self.publisher = publisher

    async def fill(self, count):
        return await fill(self.publisher, count)


@both
@pytest.mark.parametrize("who", ["body", "method"])
def test_a_coroutine_does_not_wait_for_room(mode, who):
    async def body(publisher, go):
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                if turns == 5:
                    go.put(True)  # the loop runs while the message waits for room
                await asyncio.sleep(0)

        for i in range(2):
            publisher.put(i)
        counting = asyncio.ensure_future(count())
        refused = await fill(publisher, 3)
        counting.cancel()
        return refused

    def ask(filler, go):
        future = filler.futures.fill(5)
        go.put(True)
        return future.result()

    def listen(subscriber, go):
        go.get(LIMIT)
        return list(subscriber)

    def build(program):
        topic, go = program.topic("x", mpiml.Keep(2)), program.topic("go")
        if who == "body":
            program.add_node(
                mpiml.PyNode(body, topic.publisher(), go.publisher()), label="talk"
            )
        else:
            filler = program.add_node(
                mpiml.ServiceNode(Filler, topic.publisher()), label="fill"
            )
            program.add_node(mpiml.PyNode(ask, filler, go.publisher()), label="talk")
        program.add_node(
            mpiml.PyNode(listen, topic.subscriber(), go.subscriber()), label="hear"
        )

    found = run(mode, build)
    expected = [0, 1, 0, 1, 2] if who == "body" else [0, 1, 2, 3, 4]
    assert result(mode, found, "hear") in (None, [expected])
    if who == "body" and result(mode, found, "talk") is not None:
        assert found["talk"][0] >= 1


@both
def test_a_stop_ends_what_waits_for_room_in_a_thread_of_a_coroutine(mode):
    left = []

    async def body(publisher):
        publisher.put(0)
        waits = asyncio.ensure_future(asyncio.to_thread(publisher.put, 1))
        while not publisher._outgoing._waiting:
            await asyncio.sleep(0)
        mpiml.context().stop()
        try:
            await waits
        except mpiml.Stopped as error:
            left.append(type(error))
            raise

    def build(program):
        topic = program.topic("x", mpiml.Keep(1))
        program.add_node(mpiml.PyNode(body, topic.publisher()), label="body")
        # a service hears it for as long as there are bodies: nobody leaves, which makes room
        program.add_node(mpiml.ServiceNode(Filler, topic.subscriber()), label="idle")

    run(mode, build)
    if mode == "threads":
        assert left == [mpiml.Stopped]
