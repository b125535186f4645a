"""The end is quiet: nothing is left on the wire, no thread, no file, no communicator."""

import gc
import os
import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpiml
from mpiml.control import EXIT, FAILED, FINISHED, REQUESTED, STUCK, Note
from mpiml.ending import Ending
from mpiml.wire import STOP_REQUEST, Frame


class Rank:
    """An engine without MPI: frames wait in a queue until the test delivers them."""

    def __init__(self, rank, size, network):
        self.rank, self.size, self.network = rank, size, network
        self.handlers = {}

    def transmit(self, rank, kind, source, target, id=0, aux=0, *, body=b"", **_):
        frame = Frame(kind, 0, 0, source, target, id, aux, b"", body, ())
        self.network.append((self.rank, rank, frame))

    def fulfil(self, wait):
        wait.ready = True

    def interrupt(self):
        pass


class Network:
    """Ranks whose bodies and wishes the test steps; frames of one pair stay in order."""

    def __init__(self, size, bodies):
        self.queue = []
        self.notes = [[] for _ in range(size)]
        self.endings = [
            Ending(Rank(r, size, self.queue), sum(bodies), self.notes[r].append)
            for r in range(size)
        ]
        for ending, count in zip(self.endings, bodies, strict=True):
            ending.start(count)

    def deliver(self, draw=lambda n: 0):
        """Take in one frame: the first of some pair of ranks."""
        pairs = []
        for sender, receiver, _ in self.queue:
            if (sender, receiver) not in pairs:
                pairs.append((sender, receiver))
        chosen = pairs[draw(len(pairs))]
        for i, (sender, receiver, frame) in enumerate(self.queue):
            if (sender, receiver) == chosen:
                del self.queue[i]
                self.endings[receiver].engine.handlers[frame.kind](sender, frame, ())
                return

    def run(self):
        while self.queue:
            self.deliver()

    def reasons(self):
        return [ending.note and ending.note.reason for ending in self.endings]


def note(reason, rank=0):
    return Note(reason, 1, 0, rank, "why")


@given(st.data(), st.integers(1, 12))
def test_a_wish_that_came_before_the_question_is_heard_of_in_any_order(data, size):
    net = Network(size, [1] * size)
    rank = st.integers(0, size - 1)
    told = []
    for wished in (False, True):
        if wished:
            net.endings[data.draw(rank)].request(note(REQUESTED))
        net.endings[data.draw(rank)].ask(told.append)
        while len(told) == wished:  # the wish itself, and the stop, may come long after that
            net.deliver(lambda n: data.draw(st.integers(0, n - 1)))
        assert told[-1] is wished
    net.run()
    assert net.reasons() == [REQUESTED] * size
    assert not any(ending._asks._open for ending in net.endings)


@pytest.mark.parametrize("size", [1, 2, 9, 30])
def test_the_program_ends_when_the_last_body_has_returned(size):
    net = Network(size, [1] * size)
    for rank in range(size - 1):
        net.endings[rank].body(-1)
        net.run()
    assert net.reasons() == [None] * size
    net.endings[-1].body(-1)
    net.run()
    assert net.reasons() == [FINISHED] * size
    assert all(ending.stopped.ready for ending in net.endings)


def test_a_body_that_goes_on_after_waiting_counts_again():
    net = Network(3, [1, 1, 1])
    net.endings[2].body(-1)
    net.run()
    net.endings[2].body(+1)
    net.run()
    net.endings[0].body(-1)
    net.endings[1].body(-1)
    net.run()
    assert net.reasons() == [None] * 3


def test_a_program_without_bodies_does_not_end_by_itself():
    net = Network(3, [0, 0, 0])
    net.run()
    assert net.reasons() == [None] * 3


def test_the_first_failure_wins_everywhere():
    net = Network(12, [1] * 12)
    net.run()
    net.endings[11].request(note(FAILED, 11))
    net.deliver()  # it has come as far as the other starts from
    net.deliver()
    net.endings[5].request(note(EXIT, 5))
    net.run()
    assert {ending.note.rank for ending in net.endings} == {11}


def test_where_all_fail_at_once_no_rank_hears_of_many():
    net = Network(100, [1] * 100)
    net.run()
    heard = [0] * 100
    for ending in net.endings:

        def listen(
            rank, frame, buffers, ending=ending, take=ending.engine.handlers[STOP_REQUEST]
        ):
            heard[ending.engine.rank] += 1
            take(rank, frame, buffers)

        ending.engine.handlers[STOP_REQUEST] = listen
    for reason in (REQUESTED, FAILED):
        for rank, ending in enumerate(net.endings):
            ending.request(note(reason, rank))
    net.run()
    assert net.reasons() == [FAILED] * 100
    assert max(heard) <= 2 * 8


def test_a_failure_replaces_a_wish_and_a_wish_never_a_failure():
    net = Network(3, [1] * 3)
    net.endings[1].request(note(REQUESTED, 1))
    net.run()
    net.endings[2].request(note(FAILED, 2))
    net.run()
    net.endings[1].request(note(REQUESTED, 1))
    net.run()
    assert net.reasons() == [FAILED] * 3
    assert [[n.reason for n in notes] for notes in net.notes] == [[REQUESTED, FAILED]] * 3


def test_stragglers_end_the_waiting_but_do_not_hide_the_failure():
    net = Network(3, [1] * 3)
    net.endings[1].request(note(FAILED, 1))
    net.run()
    net.endings[2].request(note(STUCK, 2))
    net.run()
    assert net.reasons() == [FAILED] * 3
    assert all(ending.abandoned for ending in net.endings)


def test_a_long_note_that_comes_as_a_buffer_is_read():
    from mpiml.wire import FLAG_BODY_APART

    net = Network(1, [1])
    frame = Frame(STOP_REQUEST, 0, FLAG_BODY_APART, 0, 0, 0, 0, b"", b"", (3,))
    net.endings[0].engine.handlers[STOP_REQUEST](0, frame, [bytearray(note(FAILED).pack())])
    assert net.reasons() == [FAILED]


def test_counts_leave_in_the_order_in_which_they_were_taken():
    """An older count that overtakes a newer one would keep the program alive for ever."""
    net = Network(2, [0, 0])
    ending = net.endings[1]
    sent, calls = [], []
    second = threading.Event()

    def transmit(rank, kind, source, target, aux=0, **_):
        calls.append(aux)
        if len(calls) == 1:
            second.wait(0.2)  # the other thread would pass here, were there no lock
        sent.append(aux)
        second.set()

    ending.engine.transmit = transmit
    threads = [threading.Thread(target=ending.body, args=(change,)) for change in (+1, -1)]
    for thread in threads:
        thread.start()
        while not calls:
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert sent == [1, 0]


# -- with ranks ---------------------------------------------------------------------------------


class Echo:
    def echo(self, x):
        return x

    def slow(self):
        time.sleep(0.001)

    def items(self, n):
        yield from range(n)


def talks(service, n):
    for i in range(n):
        assert service.echo(i) == i
    futures = [service.futures.slow() for _ in range(5)]  # left behind
    futures.append(service.futures.echo(bytes(1 << 20)))
    for item in service.stream.items(100):
        if item == 3:
            break


def program(n=5):
    program = mpiml.Program("quiet")
    service = program.add_node(mpiml.ServiceNode(Echo), label="service")
    program.add_node(mpiml.PyNode(talks, service, n), label="talks", replicas=3)
    return program


def threads_since(before):
    """Names of threads of mpiml that were not there before; a communicator's team keeps its own."""
    return [t.name for t in set(threading.enumerate()) - before if t.name.startswith("mpiml")]


def settled(read, expected, limit=5.0):
    """Wait until `read` gives what is expected; return what it gave last."""
    end = time.monotonic() + limit
    while (value := read()) != expected and time.monotonic() < end:
        time.sleep(0.001)
    return value


def files():
    gc.collect()  # the memory of a program's doorbells lives until its cycles are collected
    return len(os.listdir("/proc/self/fd"))


def test_fifty_programs_in_threads_leave_nothing_behind():
    threads = partial(threads_since, set(threading.enumerate()))
    mpiml.launch(program())
    assert settled(threads, []) == []
    before = files()
    for _ in range(50):
        mpiml.launch(program(2))
    assert settled(threads, []) == []
    assert files() == before


@pytest.mark.mpi(min_size=4)
def test_fifty_programs_on_ranks_leave_nothing_behind():
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < 4 else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return
    threads = partial(threads_since, set(threading.enumerate()))
    for _ in range(3):
        mpiml.launch(program(), part)
    settled(threads, [])
    before = files()
    for _ in range(50):
        mpiml.launch(program(2), part)
        assert part.allreduce(1) == 4
    assert settled(threads, []) == []
    assert settled(files, before) <= before
    part.Free()


@pytest.mark.mpi(min_size=4)
def test_no_frame_is_left_on_the_wire(monkeypatch):
    from mpi4py import MPI

    from mpiml.engine import Engine

    engines = []
    start = Engine.__init__

    def init(self, *args, **kwargs):
        engines.append(self)
        start(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "__init__", init)
    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < 4 else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return
    for _ in range(10):
        mpiml.launch(program(20), part)
        counts = part.allgather(engines.pop().counts())
        assert sum(sent for sent, _ in counts) == sum(taken for _, taken in counts), counts
    part.Free()
