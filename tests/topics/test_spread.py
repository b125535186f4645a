"""Topics on pretended ranks and hosts, whose messages come in any order that MPI allows."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpiml
from mpiml import wire
from mpiml.contents import value_in
from mpiml.topics.exchange import Topics
from mpiml.topics.outgoing import packed
from mpiml.waits import Wait

LARGE = 10_000  # float64: more than goes to each subscriber by itself


class Engine:
    """The engine of one pretended rank: frames go on a wire to each other rank."""

    def __init__(self, rank, wires):
        self.rank = rank
        self.handlers = {}
        self.wires = wires
        self.link = self
        self.note_sent = itertools.count().__next__

    def transmit(
        self, rank, kind, source, target, id=0, aux=0, *, encoding=0, flags=0, name=b"", body=b"",
        buffers=(),
    ):  # fmt: skip
        message = wire.join(
            kind, source, target, id, aux, encoding=encoding, flags=flags, name=name, body=body,
            lengths=[len(buffer) for buffer in buffers],
        )  # fmt: skip
        if rank == self.rank:
            self.handlers[kind](rank, wire.split(message), buffers)
        else:
            self.send(rank, message, [bytearray(buffer) for buffer in buffers])

    def send(self, rank, message, buffers=()):
        self.wires.setdefault((self.rank, rank), []).append((message, buffers))

    def fulfil(self, wait):
        wait.ready = True


class Cluster:
    """One publisher, subscribers on pretended ranks, and what is under way between them."""

    def __init__(self, policy, ranks, host_size, home):
        program = mpiml.Program("spread")
        topic = program.topic("x", policy)
        program.add_node(mpiml.PyNode(print, topic.publisher()), label="say")
        node = mpiml.PyNode(print, topic.subscriber())
        program.add_node(node, label="hear", replicas=len(ranks))
        vertices = program.expand([1, len(ranks)])
        places = [home, *ranks]
        self.wires, self.host_size = {}, host_size
        self.crossed, self.came = [], []
        self.topics = {
            rank: Topics(
                Engine(rank, self.wires), vertices, places, lambda side, end: side, self.host_of
            )
            for rank in sorted(set(places))
        }
        self.out = self.topics[home]._outgoing[0, 0]
        self.hearers = [
            self.topics[places[v]]._incoming[v << 32] for v in range(1, len(places))
        ]
        self.got = [[] for _ in ranks]
        self.expected = [[] for _ in ranks]
        self.put_ = 0

    def host_of(self, rank):
        return rank // self.host_size

    def put(self, choice):
        """Put a message, large or small, to all or to some."""
        links = self.out.links[choice // 4 % 2 :: 2] if choice % 4 == 3 else self.out.links
        value = np.full(LARGE, float(self.put_)) if choice % 2 else self.put_
        if self.out.put_plain(links, value) or self.out.put_any(
            [links], packed(value), Wait("room")
        ):
            for link in links:
                self.expected[link.vertex - 1].append(self.put_)
            self.put_ += 1

    def deliver(self, choice):
        pairs = sorted(pair for pair, messages in self.wires.items() if messages)
        if not pairs:
            return False
        source, rank = pair = pairs[choice % len(pairs)]
        message, buffers = self.wires[pair].pop(0)
        frame = wire.split(message)
        if buffers:
            value = int(np.frombuffer(buffers[-1])[0])
            self.came.append((value, rank))
            if self.host_of(source) != self.host_of(rank):
                self.crossed.append((value, self.host_of(rank)))
        self.topics[rank]._engine.handlers[frame.kind](source, frame, buffers)
        return True

    def take(self, choice):
        which = choice % len(self.hearers)
        taken = None if self.hearers[which].left else self.hearers[which].take()
        if taken is None:
            return False
        value = value_in(*taken.message)
        if not isinstance(value, int):
            assert (value == value[0]).all()
            number = int(value[0])
            value[:] = -1  # its own: nobody else sees it
            value = number
        self.got[which].append(value)
        return True

    def leave(self, choice):
        hearer = self.hearers[choice % len(self.hearers)]
        if not hearer.left:
            hearer.leave()

    def step(self, kind, choice):
        if kind == "put":
            self.put(choice)
        else:
            {"deliver": self.deliver, "take": self.take, "leave": self.leave}[kind](choice)

    def settle(self):
        self.out.end()
        while any([self.deliver(0), *map(self.take, range(len(self.hearers)))]):
            pass


policies = st.one_of(
    st.just("latest"),
    st.builds(mpiml.Keep, st.integers(1, 12), st.sampled_from(["block", "drop_oldest"])),
)
kinds = st.sampled_from(
    ["put", "put", "deliver", "deliver", "deliver", "take", "take", "leave"]
)
steps = st.lists(st.tuples(kinds, st.integers(0, 1000)), max_size=200)
ranks = st.lists(st.integers(0, 6), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(policies, ranks, st.integers(1, 4), st.integers(0, 6), steps)
def test_order_counts_and_ends_hold_whatever_comes_first(policy, ranks, host_size, home, steps):
    check(policy, ranks, host_size, home, steps)


@pytest.mark.parametrize("seed", range(40))
def test_they_hold_in_long_runs_too(seed):
    draw = random.Random(seed)
    policy = mpiml.Keep(draw.randint(1, 12), draw.choice(["block", "drop_oldest"]))
    kinds = ["put"] * draw.randint(1, 4) + ["deliver"] * draw.randint(1, 6)
    kinds += ["take"] * draw.randint(0, 3)
    steps = [(draw.choice(kinds), draw.randint(0, 1000)) for _ in range(300)]
    ranks = [draw.randint(0, 6) for _ in range(draw.randint(1, 8))]
    check(policy, ranks, draw.randint(1, 4), draw.randint(0, 6), steps)


def check(policy, ranks, host_size, home, steps):
    """Take the steps, then all that is left, and look at what each has got."""
    cluster = Cluster(policy, ranks, host_size, home)
    for kind, choice in steps:
        cluster.step(kind, choice)
    cluster.settle()
    for hearer, got, put in zip(cluster.hearers, cluster.got, cluster.expected, strict=True):
        assert got == sorted(set(got))
        if hearer.left:
            continue
        assert hearer.over
        assert len(got) + hearer.inbox.dropped[0] == len(put)
        assert set(got) <= set(put)
        assert got[-1:] == put[-1:]
        if isinstance(policy, mpiml.Keep) and policy.on_full == "block":
            assert got == put
    assert all(link.outbox.idle for link in cluster.out.links)
    assert len(cluster.crossed) == len(set(cluster.crossed))
    assert len(cluster.came) == len(set(cluster.came))
