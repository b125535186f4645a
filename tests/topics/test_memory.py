"""A slow subscriber skips or slows: 100 000 messages of 1 KiB grow no memory on either side."""

import os

import pytest

import mpiml
from tests.playing import both
from tests.topics.test_topics import LIMIT, result, run

COUNT = 100_000
SIZE = 1024
BOUND = 20 << 20  # bytes; all messages are five times that


def resident():
    """Return how much memory this process has, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def flood(publisher, done):
    before = most = resident()
    rest = bytes(SIZE - 4)
    for i in range(COUNT):
        publisher.put(i.to_bytes(4, "little") + rest)
        if i % 5000 == 0:
            most = max(most, resident())
    most = max(most, resident())
    done.put(publisher.statistics()["sent"])
    return most - before, publisher.statistics()


def take(subscriber, done, slow):
    """Return growth, numbers that came, and statistics; a slow one takes one, then waits."""
    first = subscriber.get(LIMIT)
    before = most = resident()
    numbers = [int.from_bytes(first[:4], "little")]
    if slow:
        done.get()  # however slow the machine is: it ends with the publisher, too
        most = resident()
    for i, x in enumerate(subscriber):
        assert len(x) == SIZE
        numbers.append(int.from_bytes(x[:4], "little"))
        if i % 5000 == 0:
            most = max(most, resident())
    return max(most, resident()) - before, numbers, subscriber.statistics()


@both
@pytest.mark.parametrize(
    "policy",
    [mpiml.Keep(64), mpiml.Keep(64, on_full="drop_oldest"), "latest"],
    ids=["block", "drop_oldest", "latest"],
)
def test_a_slow_subscriber_grows_no_memory(mode, policy):
    blocks = policy == mpiml.Keep(64)

    def build(program):
        topic, done = program.topic("flood", policy), program.topic("done")
        node = mpiml.PyNode(flood, topic.publisher(), done.publisher())
        program.add_node(node, label="flood")
        node = mpiml.PyNode(take, topic.subscriber(), done.subscriber(), not blocks)
        program.add_node(node, label="take")

    found = run(mode, build)
    if result(mode, found, "take") is None:
        return
    (put_grown, put), (got_grown, numbers, got) = found["flood"][0], found["take"][0]
    assert put_grown < BOUND
    assert got_grown < BOUND
    assert numbers[-1] == COUNT - 1
    assert got["received"] == len(numbers)
    assert got["received"] + got["dropped"] == put["put"] == COUNT
    if blocks:
        assert numbers == list(range(COUNT))
    else:
        assert numbers == sorted(set(numbers))
        assert len(numbers) <= 3 * 64 + 1  # here, under way, and at the publisher
