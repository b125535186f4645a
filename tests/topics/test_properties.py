"""Whatever the graph and the interleaving: who hears whom, in which order, and that all ends."""

import asyncio
import os
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpiml
from tests.playing import both
from tests.topics.test_topics import LIMIT, result, run, say

quick = settings(max_examples=25, deadline=None)


def pause(turns):
    for _ in range(turns):
        os.sched_yield()


def member(publisher, subscriber, rounds, neighbours):
    """Put one message in each round, and get one of each neighbour."""
    me = mpiml.context()
    got = []
    for k in range(rounds):
        publisher.put((me.index, k))
        got += [subscriber.get(LIMIT) for _ in range(neighbours)]
    return got


@quick
@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_each_member_hears_exactly_the_neighbours_it_chose(data, n, rounds, keep):
    """Rings, nearest neighbours of a line, and any other circulant graph, with itself or not."""
    offsets = data.draw(st.sets(st.integers(0, n - 1), min_size=1))

    def source(index, replicas):
        return [(index - d) % replicas for d in offsets]

    def build(program):
        topic = program.topic("sums", mpiml.Keep(keep))
        node = mpiml.PyNode(
            member, topic.publisher(), topic.subscriber(source), rounds, len(offsets)
        )
        program.add_node(node, label="member", replicas=n)

    found = run("threads", build)["member"]
    for index, got in enumerate(found):
        for d in offsets:
            other = (index - d) % n
            mine = [k for who, k in got if who == other]
            assert mine == sorted(mine)
        assert {who for who, _ in got} <= {(index - d) % n for d in offsets}
        assert len(got) == rounds * len(offsets)


@both
def test_a_line_of_nearest_neighbours_comes_to_its_mean(mode):
    """The ends of a line have one neighbour; the rule of diffusion keeps the sum."""

    def near(index, replicas):
        return [index - 1, index + 1]

    def diffuse(publisher, subscriber, rounds):
        me = mpiml.context()
        x = float(me.index)
        there = [i for i in near(me.index, me.replicas) if 0 <= i < me.replicas]
        waiting = {i: [] for i in there}  # a neighbour may be a round ahead
        for _ in range(rounds):
            publisher.put((me.index, x), to=there)
            while not all(waiting.values()):
                who, value = subscriber.get(LIMIT)
                waiting[who].append(value)
            x += sum(waiting[i].pop(0) - x for i in there) / 3
        return x

    def build(program):
        topic = program.topic("values", mpiml.Keep(2))
        node = mpiml.PyNode(diffuse, topic.publisher(), topic.subscriber(near), 60)
        program.add_node(node, label="member", replicas=4)

    found = result(mode, run(mode, build), "member")
    assert found is None or found == pytest.approx([1.5] * 4, abs=1e-3)


policies = st.one_of(
    st.just("latest"),
    st.builds(mpiml.Keep, st.integers(1, 5), st.sampled_from(["block", "drop_oldest"])),
)


@quick
@given(
    policies,
    st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=30),
)
def test_order_of_each_publisher_holds_in_any_interleaving(policy, puts, gets):
    def speak(publisher, who):
        for k, turns in enumerate(puts[who]):
            publisher.put((who, k))
            pause(turns)

    def listen(subscriber):
        got = []
        for turns, x in enumerate(subscriber):
            got.append(x)
            pause(gets[turns] if turns < len(gets) else 0)
        return got, list(subscriber.dropped.values())

    def build(program):
        topic = program.topic("x", policy)
        for who in range(len(puts)):
            node = mpiml.PyNode(speak, topic.publisher(), who)
            program.add_node(node, label=f"speak{who}")
        program.add_node(mpiml.PyNode(listen, topic.subscriber()), label="listen", replicas=2)

    for got, dropped in run("threads", build)["listen"]:
        for who, each in enumerate(puts):
            mine = [k for other, k in got if other == who]
            assert mine == sorted(set(mine))
            assert len(mine) + dropped[who] == len(each)
            assert not each or mine[-1] == len(each) - 1  # the newest is never lost
            if isinstance(policy, mpiml.Keep) and policy.on_full == "block":
                assert not dropped[who]


@both
def test_threads_of_a_node_share_its_messages(mode):
    def body(subscriber):
        got = [[] for _ in range(3)]
        ended = []

        def work(mine):
            while True:
                try:
                    mine.append(subscriber.get(LIMIT))
                except mpiml.ServiceGoneError as error:
                    ended.append(str(error))
                    return

        bind = mpiml.context().bind
        threads = [threading.Thread(target=bind(work), args=(mine,)) for mine in got]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert len(ended) == 3
        for mine in got:
            assert mine == sorted(mine)
        return sorted(x for mine in got for x in mine)

    def build(program):
        topic = program.topic("x", mpiml.Keep(3))
        program.add_node(mpiml.PyNode(say, topic.publisher(), 300), label="say")
        program.add_node(mpiml.PyNode(body, topic.subscriber()), label="body")

    assert result(mode, run(mode, build), "body") in (None, [list(range(300))])


@both
def test_a_get_with_a_limit_ends_while_others_wait(mode):
    def body(subscriber, done):
        got = []
        waits = threading.Thread(
            target=mpiml.context().bind(lambda: got.append(subscriber.get(LIMIT)))
        )
        waits.start()
        with pytest.raises(mpiml.DeadlineError, match=r"within 0\.01 s, got none"):
            subscriber.get(0.01)
        done.put(True)
        waits.join(LIMIT)
        return got

    def late(publisher, done):
        done.get(LIMIT)
        publisher.put("late")

    def build(program):
        topic, done = program.topic("x"), program.topic("done")
        node = mpiml.PyNode(late, topic.publisher(), done.subscriber())
        program.add_node(node, label="late")
        program.add_node(mpiml.PyNode(body, topic.subscriber(), done.publisher()), label="body")

    assert result(mode, run(mode, build), "body") in (None, [["late"]])


@both
def test_tasks_of_a_node_share_its_messages_and_let_others_run(mode):
    async def body(subscriber):
        turns = 0
        over = False

        async def count():
            nonlocal turns
            while not over:
                turns += 1
                await asyncio.sleep(0)

        async def listen():
            return [x async for x in subscriber]

        counting = asyncio.ensure_future(count())
        parts = await asyncio.gather(listen(), listen())
        over = True
        await counting
        assert turns > 50
        for part in parts:
            assert part == sorted(part)
        return sorted(parts[0] + parts[1])

    def build(program):
        topic = program.topic("x", mpiml.Keep(3))
        program.add_node(mpiml.PyNode(say, topic.publisher(), 200), label="say")
        program.add_node(mpiml.PyNode(body, topic.subscriber()), label="body")

    assert result(mode, run(mode, build), "body") in (None, [list(range(200))])


@both
def test_a_coroutine_that_waits_for_a_message_is_stopped(mode):
    left = []

    async def body(subscriber):
        try:
            async for _ in subscriber:
                mpiml.context().stop()
        finally:
            left.append(sys.exc_info()[0])

    def once(publisher):
        publisher.put(1)
        mpiml.context().wait_for_stop()

    def build(program):
        topic = program.topic("x")
        program.add_node(mpiml.PyNode(once, topic.publisher()), label="once")
        program.add_node(mpiml.PyNode(body, topic.subscriber()), label="body")

    run(mode, build)
    assert left == [mpiml.Stopped] or (mode == "mpi" and not left)  # it may be elsewhere
