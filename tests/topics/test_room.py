"""Which subscriber a message goes to, and who is told of room, through random interleavings."""

import threading

from hypothesis import given
from hypothesis import strategies as st

import mpiml
from mpiml.topics.outgoing import Link, Outgoing, packed
from mpiml.topics.queues import Outbox
from mpiml.waits import Wait
from tests.topics.test_topics import LIMIT, hear, run, say


class Engine:
    """Sends nothing: the test acknowledges."""

    rank = 0

    def transmit(self, *args, **options):
        pass

    def fulfil(self, wait):
        assert not wait.ready  # told once for each time that it was put down
        wait.ready = True


def outgoing(policy, links):
    made = [Link(1 + i, 1 + i, 0, Outbox(policy)) for i in range(links)]
    return Outgoing(Engine(), 0, made, lambda rank: 0)


def total(out):
    return sum(link.sent + link.outbox.dropped + link.outbox.waiting for link in out.links)


steps = st.lists(st.tuples(st.sampled_from(["put", "put", "ack", "leave"]), st.integers(0, 3)))
message = packed(1)


@given(st.integers(1, 3), st.integers(1, 4), steps)
def test_a_message_finds_room_where_there_is_some_and_a_wait_is_told_of_it(n, links, steps):
    out = outgoing(mpiml.Keep(n), links)
    wait = None
    for kind, which in steps:
        link = out.links[which % links]
        if kind == "put" and wait is None:
            there = [each for each in out.links if not each.gone]
            room = not there or any(each.outbox.room for each in there)
            first = which % links
            groups = [[each] for each in (*out.links[first:], *out.links[:first])]
            before, lost = total(out), out.undelivered
            told = Wait()
            assert out.put_any(groups, message, told) is room
            assert total(out) == before + (room and bool(there))
            assert out.undelivered == lost + (not there)
            wait = None if room else told
        elif kind == "ack" and link.outbox._open and not link.gone:
            out.on_ack(link.vertex, 0, 1)
        elif kind == "leave" and not link.gone:
            out.on_ack(link.vertex, 0, 0, link.sent)
        else:
            continue
        if wait is not None and kind != "put":
            assert wait.ready
            wait = None
        assert len(out._waiting) == (wait is not None)


def test_a_message_goes_where_it_need_not_wait():
    for policy in ("latest", mpiml.Keep(1, on_full="drop_oldest")):
        out = outgoing(policy, 2)
        behind, idle = [[link] for link in out.links]
        assert out.put_any([behind], message, None)
        assert out.put_any([behind, idle], message, None)
        assert [link.sent for link in out.links] == [1, 1]
        assert out.put_any([behind, idle], message, None)  # nobody has room: the next in turn
        assert [link.outbox.waiting for link in out.links] == [1, 0]


def test_what_waits_for_room_at_the_end_was_not_sent():
    for late in (False, True):
        out = outgoing(mpiml.Keep(1), 1)
        wait = Wait()
        assert out.put_any([out.links], message, None)
        assert not out.put_any([out.links], message, wait)
        out.end(late=late)
        assert wait.ready
        assert out.refuses is not late
        assert out.put_any([out.links], message, wait) is late
        assert (out.count, out.undelivered) == ((2, 1) if late else (1, 0))


def test_a_publisher_whom_nobody_hears_sends_nothing():
    def build(program):
        topic = program.topic("jobs", mpiml.Keep(1), deliver="round_robin")
        for label in "ab":
            program.add_node(mpiml.PyNode(say, topic.publisher(), 3), label=label)
        program.add_node(mpiml.PyNode(hear, topic.subscriber("a")), label="hear")

    assert run("threads", build)["hear"] == [[0, 1, 2]]


def test_room_at_any_subscriber_ends_the_wait_of_a_round_robin():
    """One subscriber takes nothing until the other has taken all the rest."""
    done = threading.Event()

    def slow(subscriber):
        assert done.wait(LIMIT)
        return list(subscriber)

    def quick(subscriber):
        got = [subscriber.get(LIMIT) for _ in range(199)]
        done.set()
        return got

    def build(program):
        topic = program.topic("jobs", mpiml.Keep(1), deliver="round_robin")
        program.add_node(mpiml.PyNode(say, topic.publisher(), 200), label="say")
        program.add_node(mpiml.PyNode(slow, topic.subscriber()), label="slow")
        program.add_node(mpiml.PyNode(quick, topic.subscriber()), label="quick")

    found = run("threads", build)
    assert sorted(found["slow"][0] + found["quick"][0]) == list(range(200))
