"""Large messages: in the order of small ones, once for each host, on along a tree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpiml
from mpiml import wire
from mpiml.topics import tree
from tests.playing import both
from tests.topics.test_topics import result, run

LARGE = 1 << 16  # float64: more than goes to each subscriber by itself


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


# -- who passes on to whom --------------------------------------------------------------------


def passed(source, entries, host_of):
    """Follow the passing on; return transfers by pair of ranks, and how far each rank is."""
    transfers, depth, todo = {}, {source: 0}, [(source, entries)]
    while todo:
        rank, part = todo.pop()
        parts = tree.split(rank, [e for e in part if e.rank != rank], host_of)
        for turn, (to, theirs) in enumerate(parts, 1):
            assert to == theirs[0].rank
            assert to not in depth  # each gets it once
            transfers[rank, to] = theirs
            depth[to] = depth[rank] + turn
            todo.append((to, theirs))
    return transfers, depth


@given(st.integers(0, 40), st.sets(st.integers(0, 40), min_size=1), st.integers(1, 9))
def test_each_rank_gets_it_once_and_each_host_too(source, ranks, size):
    entries = [
        tree.Entry(rank, 10 * rank + i, 7, 5, 3)
        for rank in sorted(ranks - {source})
        for i in range(1 + rank % 2)
    ]
    host_of = lambda rank: rank // size  # noqa: E731
    transfers, depth = passed(source, entries, host_of)
    assert depth.keys() == ranks | {source}
    into = [host_of(to) for frm, to in transfers if host_of(frm) != host_of(to)]
    assert len(into) == len(set(into))  # over the network once for each host
    assert set(into) == {host_of(rank) for rank in ranks} - {host_of(source)}


@given(st.integers(1, 300))
def test_many_hosts_are_reached_in_a_logarithm_of_turns(hosts):
    entries = [tree.Entry(rank, rank, 0, 1, 1) for rank in range(1, hosts + 1)]
    _, depth = passed(0, entries, lambda rank: rank)
    assert max(depth.values()) == hosts.bit_length()  # ceil(log2(hosts + 1))


@given(
    st.lists(
        st.builds(
            tree.Entry, *[st.integers(0, 2**32 - 1)] * 3, *[st.integers(0, 2**64 - 1)] * 2
        )
    )
)
def test_a_list_reads_back(entries):
    assert tree.listed(tree.joined(entries)) == entries


# -- in programs ------------------------------------------------------------------------------


class Wires:
    """Notes the large messages that this rank sends: to whom, and the first number in each."""

    def __init__(self, monkeypatch):
        from mpiml.transport import MpiLink

        self.seen = []
        send = MpiLink.send

        def noting(link, rank, message, buffers=()):
            if buffers and wire.split(message).kind == wire.TOPIC:
                self.seen.append((link.comm.rank, rank, int(np.frombuffer(buffers[-1])[0])))
            send(link, rank, message, buffers)

        monkeypatch.setattr(MpiLink, "send", noting)

    def all(self):
        """Return what all ranks have sent. Collective."""
        from mpi4py import MPI

        return [one for seen in MPI.COMM_WORLD.allgather(self.seen) for one in seen]


def tell(publisher, count, to=None):
    for i in range(count):
        publisher.put(np.full(LARGE, float(i)), to)
        publisher.put(i, to)
    return publisher._outgoing.engine.rank


def listen(subscriber):
    return subscriber._incoming.engine.rank, numbers(subscriber)


def played(monkeypatch, host_size, policy, count=9, to=None):
    """Publish to five subscribers on all ranks; on rank 0, who is where and heard what.

    Returns
    -------
    home, heard, sent
        The rank of the publisher; rank and messages of each subscriber; see `Wires`.
    """
    monkeypatch.setenv("MPIML_HOST_SIZE", str(host_size))
    wires = Wires(monkeypatch)

    def build(program):
        topic = program.topic("arrays", policy=policy)
        node = mpiml.PyNode(tell, topic.publisher(), count, to)
        program.add_node(node, label="tell")
        node = mpiml.PyNode(listen, topic.subscriber())
        program.add_node(node, label="listen", replicas=5)

    found = run("mpi", build)
    sent = wires.all()
    heard = result("mpi", found, "listen")
    return (None, None, sent) if heard is None else (found["tell"][0], heard, sent)


def crossing(sent, host_size):
    """Return what went to another host: the message, and the host."""
    return [
        (value, to // host_size)
        for frm, to, value in sent
        if frm // host_size != to // host_size
    ]


hosts = pytest.mark.parametrize("host_size", [1, 2, 3])


@pytest.mark.mpi(min_size=2)
@hosts
@pytest.mark.parametrize("n", [1, 3, 100])
def test_large_messages_cross_once_to_each_host_and_keep_their_order(monkeypatch, host_size, n):
    count = 9
    home, heard, sent = played(monkeypatch, host_size, mpiml.Keep(n), count)
    if heard is not None:
        assert [got for _, got in heard] == [[i for i in range(count) for _ in range(2)]] * 5
        ranks = {rank for rank, _ in heard} - {home}
        into = sorted((value, to) for _, to, value in sent)
        assert into == [(i, rank) for i in range(count) for rank in sorted(ranks)]
        there = {rank // host_size for rank in ranks} - {home // host_size}
        crossed = sorted(crossing(sent, host_size))
        assert crossed == [(i, host) for i in range(count) for host in sorted(there)]


@pytest.mark.mpi(min_size=2)
@hosts
@pytest.mark.parametrize("policy", ["latest", mpiml.Keep(4, on_full="drop_oldest")])
def test_where_messages_are_dropped_none_is_sent_twice(monkeypatch, host_size, policy):
    _, heard, sent = played(monkeypatch, host_size, policy, 40)
    if heard is not None:
        for _, got in heard:
            assert got == sorted(got)
            assert got[-1] == 39
        into = [(value, to) for _, to, value in sent]
        assert len(into) == len(set(into))
        crossed = crossing(sent, host_size)
        assert len(crossed) == len(set(crossed))


@pytest.mark.mpi(min_size=2)
@hosts
def test_nothing_crosses_to_a_host_that_was_not_chosen(monkeypatch, host_size):
    count = 4
    home, heard, sent = played(monkeypatch, host_size, mpiml.Keep(3), count, to=(1, 4))
    if heard is not None:
        assert [len(got) for _, got in heard] == [0, 2 * count, 0, 0, 2 * count]
        chosen = {heard[i][0] for i in (1, 4)} - {home}
        assert {to for _, to, _ in sent} == chosen
        assert len(sent) == count * len(chosen)


def leave_early(subscriber):
    if mpiml.context().index % 2:
        return [first(subscriber.get())]
    return numbers(subscriber)


@pytest.mark.mpi(min_size=2)
@hosts
@pytest.mark.parametrize("policy", [mpiml.Keep(2), mpiml.Keep(2, on_full="drop_oldest")])
def test_subscribers_that_leave_hold_up_none_of_those_served_with_them(
    monkeypatch, host_size, policy
):
    monkeypatch.setenv("MPIML_HOST_SIZE", str(host_size))

    def build(program):
        topic = program.topic("arrays", policy=policy)
        program.add_node(mpiml.PyNode(mixed, topic.publisher(), 30), label="say")
        node = mpiml.PyNode(leave_early, topic.subscriber())
        program.add_node(node, label="hear", replicas=6)

    heard = result("mpi", run("mpi", build), "hear")
    if heard is not None:
        assert [len(got) for got in heard[1::2]] == [1] * 3
        assert [got[-1] for got in heard[::2]] == [30] * 3
        if policy.on_full == "block":
            assert heard[::2] == [list(range(31))] * 3


@pytest.mark.mpi(min_size=2)
@hosts
def test_several_publishers_that_are_subscribers_too(monkeypatch, host_size):
    monkeypatch.setenv("MPIML_HOST_SIZE", str(host_size))

    def both_ways(publisher, subscriber):
        for i in range(5):
            publisher.put(np.full(LARGE, float(i)))
        return [first(subscriber.get()) for _ in range(5 * mpiml.context().replicas)]

    def build(program):
        topic = program.topic("all", policy=mpiml.Keep(5))
        node = mpiml.PyNode(both_ways, topic.publisher(), topic.subscriber())
        program.add_node(node, label="node", replicas=4)

    heard = result("mpi", run("mpi", build), "node")
    if heard is not None:
        assert [sorted(got) for got in heard] == [[i for i in range(5) for _ in range(4)]] * 4


@pytest.mark.mpi(min_size=2)
@hosts
def test_large_values_without_arrays_are_passed_on_too(monkeypatch, host_size):
    monkeypatch.setenv("MPIML_HOST_SIZE", str(host_size))

    def say_long(publisher):
        for i in range(4):
            publisher.put([f"{i}/{k}" for k in range(20_000)])

    def hear_long(subscriber):
        return [(len(x), x[-1]) for x in subscriber]

    def build(program):
        topic = program.topic("text", policy=mpiml.Keep(2))
        program.add_node(mpiml.PyNode(say_long, topic.publisher()), label="say")
        node = mpiml.PyNode(hear_long, topic.subscriber())
        program.add_node(node, label="hear", replicas=5)

    heard = result("mpi", run("mpi", build), "hear")
    assert heard in (None, [[(20_000, f"{i}/19999") for i in range(4)]] * 5)
