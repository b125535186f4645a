"""Large messages: in the order of small ones, once for each host, on along a tree."""

import numpy as np
import pytest

import mpiml
from mpiml import wire
from tests.playing import both
from tests.topics.test_topics import result, run

LARGE = 1 << 19  # float64: more than goes to each subscriber by itself


def mixed(publisher, count):
    """Put large and small messages in turn; a large one is the last."""
    for i in range(count):
        publisher.put(i if i % 3 else np.full(LARGE, float(i)))
    publisher.put(np.full(LARGE, float(count)))


def first(x):
    """What `mixed` put, once it has been seen to be whole, and written over."""
    if isinstance(x, int):
        return x
    assert x.shape == (LARGE,)
    assert (x == x[0]).all()
    value = int(x[0])
    x[:] = -1.0  # nobody else's
    return value


def numbers(subscriber):
    return [first(x) for x in subscriber]


@both
def test_small_messages_and_the_end_do_not_overtake_large_ones(mode):
    def build(program):
        topic = program.topic("mixed", policy=mpiml.Keep(4))
        program.add_node(mpiml.PyNode(mixed, topic.publisher(), 30), label="say")
        program.add_node(mpiml.PyNode(numbers, topic.subscriber()), label="hear", replicas=2)

    heard = result(mode, run(mode, build), "hear")
    assert heard in (None, [list(range(31))] * 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("kind", "order"), [("TOPIC", [1, 2]), ("TOPIC_END", [1, 2]), ("TOPIC_ACK", [2, 1])]
)
def test_what_comes_behind_a_transfer_waits_for_it_but_for_acknowledgements(kind, order):
    from mpi4py import MPI

    from mpiml.transport import TAG_DATA, MpiLink, SleepBell

    got = []
    comm = MPI.COMM_SELF.Dup()
    link = MpiLink(comm, SleepBell(), lambda source, frame, buffers: got.append(frame.id))
    link._admit(0, wire.split(wire.join(wire.TOPIC, 0, 0, 1, lengths=(8,))))
    link._admit(0, wire.split(wire.join(getattr(wire, kind), 0, 0, 2)))
    comm.Send([bytearray(8), MPI.BYTE], 0, TAG_DATA)
    while len(got) < 2:
        link.poll()
    assert got == order
    link.close()
    comm.Free()
