"""MpiLink: frames and buffers of every size arrive whole and in order."""

import threading

import pytest

from mpiml import wire


@pytest.fixture
def pair():
    from mpi4py import MPI

    from mpiml.transport import MpiLink, SleepBell

    comm = MPI.COMM_WORLD.Dup()
    got = []
    link = MpiLink(
        comm, SleepBell(), lambda source, frame, buffers: got.append((source, frame, buffers))
    )
    yield comm, link, got
    assert link.drain(30.0)
    comm.Barrier()  # nobody sends any more
    while link.busy:
        link.poll()
    link.close()
    link.close()  # twice does nothing
    comm.Free()


def collect(comm, link, got, count):
    """Poll until `count` frames have come; the test runner's limit ends a hang."""
    while len(got) < count:
        link.poll()
    assert len(got) == count


@pytest.mark.mpi(min_size=2)
def test_frames_of_all_sizes_stay_in_order(pair):
    from mpiml.transport import SLOT

    comm, link, got = pair
    sizes = [0, 1, 100, SLOT - 40, SLOT - 39, SLOT, 3 * SLOT, 5 << 20, 7]
    right = (comm.rank + 1) % comm.size
    for i, size in enumerate(sizes):
        link.send(right, wire.join(wire.REQUEST, comm.rank, i, i, body=bytes([i % 251]) * size))
    collect(comm, link, got, len(sizes))
    for i, size in enumerate(sizes):
        source, frame, buffers = got[i]
        assert source == (comm.rank - 1) % comm.size
        assert (frame.id, frame.target, len(frame.body)) == (i, i, size)
        assert bytes(frame.body) == bytes([i % 251]) * size
        assert not buffers


@pytest.mark.mpi(min_size=2)
def test_buffers_come_with_their_frame_before_later_frames(pair):
    from mpiml.transport import SLOT

    comm, link, got = pair
    right = (comm.rank + 1) % comm.size
    plan = [[], [1 << 20], [], [0], [5, 0, 200_000], [], [3 << 20, 1], []]
    for i, lengths in enumerate(plan):
        buffers = [bytes([i + k + 1]) * n for k, n in enumerate(lengths)]
        body = b"x" * (SLOT * (i % 2))  # every second frame is itself announced
        link.send(right, wire.join(wire.REQUEST, 0, 0, i, body=body, lengths=lengths), buffers)
    collect(comm, link, got, len(plan))
    for i, lengths in enumerate(plan):
        _, frame, buffers = got[i]
        assert frame.id == i
        assert [bytes(b) for b in buffers] == [
            bytes([i + k + 1]) * n for k, n in enumerate(lengths)
        ]


@pytest.mark.mpi(min_size=2)
def test_control_passes_a_large_call_that_is_still_coming(pair):
    comm, link, got = pair
    right = (comm.rank + 1) % comm.size
    link.send(right, wire.join(wire.REQUEST, 0, 0, 1, lengths=[32 << 20]), [bytes(32 << 20)])
    link.send(right, wire.join(wire.STOP, 0, 0, 2))
    collect(comm, link, got, 2)
    assert {frame.id for _, frame, _ in got} == {1, 2}


@pytest.mark.mpi(min_size=1)
def test_what_a_signal_handler_sends_goes_behind_what_waits_in_the_queue():
    from mpi4py import MPI

    from mpiml.transport import FunneledLink, SleepBell

    comm = MPI.COMM_SELF.Dup()
    got = []
    link = FunneledLink(comm, SleepBell(), lambda source, frame, buffers: got.append(frame.id))
    isend = link._isend

    def interrupted(*args):
        link._isend = isend
        send(100)  # as a handler would, just there
        return isend(*args)

    def send(number):
        link.send(0, wire.join(wire.REQUEST, 0, 0, number))

    def others():
        thread = threading.Thread(target=lambda: [send(i) for i in range(3)])
        thread.start()
        thread.join()

    others()
    link._isend = interrupted
    link.poll()
    collect(comm, link, got, 4)
    assert got == [0, 1, 2, 100]
    others()
    link._isend = interrupted
    send(7)
    collect(comm, link, got, 9)
    assert got[4:] == [0, 1, 2, 7, 100]
    assert link.drain(30.0)
    link.close()
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_everybody_to_everybody_at_once(pair):
    comm, link, got = pair
    for k in range(50):
        for rank in range(comm.size):
            if rank != comm.rank:
                n = 100_000 if k % 7 == 0 else 10
                link.send(
                    rank, wire.join(wire.REQUEST, comm.rank, 0, k, lengths=[n]), [bytes(n)]
                )
    collect(comm, link, got, 50 * (comm.size - 1))
    for rank in range(comm.size):
        ids = [frame.id for source, frame, _ in got if source == rank]
        assert ids == list(range(50)) * (rank != comm.rank)


@pytest.mark.mpi(min_size=2)
def test_tags_stay_below_what_mpi_promises():
    from mpiml import transport

    assert 0 < transport.TAG_FRAME < transport.TAG_DATA <= 32767
