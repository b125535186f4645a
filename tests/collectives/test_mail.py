"""Mail: order and content of messages between members, in one process and by MPI."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.collectives import mail, messages, office
from mpiml.collectives.mail import INLINE, mail_of
from mpiml.collectives.members import team_of
from mpiml.errors import UsageError
from tests.collectives.everywhere import everywhere
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import outcomes, together

LABEL = "the test"


def text(source, target, number):
    return f"{source} to {target}, number {number}".encode()


# -- in one process ----------------------------------------------------------------------------------

PLANS = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(
            st.tuples(
                st.integers(0, n - 1), st.integers(0, n - 1), st.integers(0, 1),
                st.none() | st.binary(max_size=9),
            ),
            max_size=24,
        ),
    )
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(PLANS, st.booleans(), st.booleans())
def test_order_and_content(plan, anyone, borrow):
    """Each gets what was sent to it on each channel, that of each source in order."""
    size, letters = plan

    def body(team):
        post = mail_of(team)
        channels = [post.open("a"), post.open("b")]
        sendings = [
            channels[c].send(to, bytes([i]), content)
            for i, (source, to, c, content) in enumerate(letters)
            if source == team.index
        ]
        for c, channel in enumerate(channels):
            mine = [
                (source, bytes([i]), content)
                for i, (source, to, which, content) in enumerate(letters)
                if (to, which) == (team.index, c)
            ]
            got = []
            for source, _, _ in mine:
                ask = channel.receive(None if anyone else source, borrow=borrow)
                parcel = ask.wait(LABEL)
                body = None if parcel.body is None else bytes(parcel.body)
                got.append((parcel.source, parcel.head, body))
                parcel.release()
            for source in range(size):
                assert [g for g in got if g[0] == source] == [m for m in mine if m[0] == source]
            assert channel.poll() is None
        for sending in sendings:
            sending.wait(LABEL)

    together(size, body)


def test_a_body_stays_the_senders_until_it_is_released():
    def body(team):
        channel = mail_of(team).open("x")
        if team.index == 0:
            memory = np.arange(1000.0)
            sending = channel.send(1, b"", memory)
            assert not sending.test()
            channel.send(1, b"go")
            sending.wait(LABEL)
            memory[:] = -1
            channel.send(1, b"changed")
            return
        parcel = channel.receive(0, borrow=True).wait(LABEL)
        assert parcel.body.readonly
        seen = np.frombuffer(parcel.body)
        assert channel.receive(0).wait(LABEL).head == b"go"
        np.testing.assert_array_equal(seen, np.arange(1000.0))
        parcel.release()
        assert parcel.body is None
        assert channel.receive(0).wait(LABEL).head == b"changed"
        assert seen[0] == -1  # it was the sender's all along

    together(2, body)


def test_into_takes_an_array_or_a_function_of_what_has_come():
    def body(team):
        channel = mail_of(team).open("x")
        if team.index == 0:
            for i in range(3):
                channel.send(1, bytes([i]), np.full((2, 3), float(i))).wait(LABEL)
            channel.send(1, b"no body")
            channel.send(1, b"empty", b"").wait(LABEL)
            return
        out = np.zeros((3, 2, 3))
        channel.receive(0, out[0]).wait(LABEL)
        asked = []

        def into(source, head, nbytes):
            asked.append((source, head, nbytes))
            return out[head[0]] if nbytes > 0 else None

        channel.receive(0, into).wait(LABEL)
        own = channel.receive(0).wait(LABEL).body
        np.testing.assert_array_equal(np.frombuffer(own), np.full(6, 2.0))
        own[:] = bytes(48)  # the receiver's own
        assert channel.receive(None, into).wait(LABEL).body is None
        assert bytes(channel.receive(None, np.empty(0)).wait(LABEL).body) == b""
        np.testing.assert_array_equal(out[:, 0, 0], [0, 1, 0])
        assert asked == [(0, b"\x01", 48), (0, b"no body", -1)]

    together(2, body)


@pytest.mark.parametrize("into", [np.zeros(3), np.zeros(4)[::2], np.frombuffer(bytes(16))])
def test_what_does_not_fit_is_dropped_and_said(into):
    def body(team):
        channel = mail_of(team).open("letters")
        if team.index == 0:
            channel.send(1, b"", np.zeros(2)).wait(LABEL)  # freed though it was refused
            channel.send(1, b"next")
            return
        if into.size == 4:
            return
        with pytest.raises(
            UsageError, match=r"letters: expected a message of .* got 16 bytes from"
        ):
            channel.receive(0, into).wait(LABEL)
        assert channel.receive(0).wait(LABEL).head == b"next"

    together(2, body)


def test_an_error_of_the_function_is_the_receivers():
    def body(team):
        channel = mail_of(team).open("x")
        if team.index == 0:
            channel.send(1, b"", b"12").wait(LABEL)
            return
        with pytest.raises(ZeroDivisionError):
            channel.receive(0, lambda *_: 1 / 0).wait(LABEL)

    together(2, body)


def test_a_wait_ends_as_the_team_says():
    class Ending(RuntimeError):
        pass

    class Hooks:
        def begin(self, label): ...

        def end(self): ...

        def waiting(self, seconds, missing, label):
            if str(label) == "doomed":
                raise Ending(f"{label}: {missing}")

    def body(team):
        channel = mail_of(team).open("x")
        if team.index == 0:
            channel.receive(1).wait("doomed")
        other = mail_of(team).open("y")
        other.send(0, b"", b"never taken").wait("doomed")

    for found, who in zip(outcomes(2, body, Hooks()), ("(1,)", "(0,)"), strict=True):
        assert isinstance(found, Ending)
        assert str(found) == f"doomed: {who}"


def test_threads_of_one_member_receive_apart():
    """Each waits for another source, in any order."""

    def body(team):
        channel = mail_of(team).open("x")
        if team.index:
            channel.send(0, bytes([team.index]))
            return
        got = {}

        def take(source):
            got[source] = channel.receive(source).wait(LABEL).head

        threads = [threading.Thread(target=take, args=(s,), daemon=True) for s in (3, 2, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert got == {1: b"\x01", 2: b"\x02", 3: b"\x03"}

    together(4, body)


# -- wherever members live ---------------------------------------------------------------------------

SIZES = (None, 0, 1, 2049, INLINE, INLINE + 1, 1_000_003)


@places
def test_all_to_all_of_all_sizes(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        post = mail_of(team)
        first, second = post.open("first"), post.open("second")
        everyone = range(team.size)
        sendings = []
        for to in everyone:
            for number, size in enumerate(SIZES):
                head = text(team.index, to, number)
                content = None if size is None else np.full(size, 16 * team.index + to, "u1")
                sendings.append(first.send(to, head, content))
            sendings.append(second.send(to, b"last"))
        # the other way round than they were sent, so that what comes must be kept apart
        assert {second.receive(None).wait(LABEL).source for _ in everyone} == set(everyone)
        for source in reversed(everyone):
            for number, size in enumerate(SIZES):
                into = None if size is None or number % 2 else np.empty(size, "u1")
                parcel = first.receive(source, into, borrow=True).wait(LABEL)
                assert parcel.head == text(source, team.index, number)
                if size is None:
                    assert parcel.body is None
                else:
                    assert bytes(parcel.body) == bytes([16 * source + team.index]) * size
                parcel.release()
        for sending in sendings:
            sending.wait(LABEL)

    played(place, body, monkeypatch)


@pytest.mark.mpi(min_size=2)
def test_bodies_are_chopped(monkeypatch):
    monkeypatch.setattr(office, "_CHUNK", 1 << 16)

    def body(comm):
        team = team_of(comm, "the test")
        channel = mail_of(team).open("x")
        ahead, behind = (team.index + 1) % team.size, (team.index - 1) % team.size
        content = np.arange(100_000, dtype="f4") + team.index
        sending = channel.send(ahead, b"", content)
        out = np.empty_like(content)
        channel.receive(behind, out).wait(LABEL)
        np.testing.assert_array_equal(out, np.arange(100_000, dtype="f4") + behind)
        sending.wait(LABEL)

    everywhere("mpi", body)


@pytest.mark.mpi(min_size=2)
def test_a_refused_body_leaves_the_next_one_whole():
    def body(comm):
        team = team_of(comm, "the test")
        channel = mail_of(team).open("x")
        ahead, behind = (team.index + 1) % team.size, (team.index - 1) % team.size
        sendings = [channel.send(ahead, b"", np.full(INLINE + 7, i, "u1")) for i in (1, 2)]
        with pytest.raises(UsageError, match="expected a message of 7 bytes"):
            channel.receive(behind, bytearray(7)).wait(LABEL)
        assert set(channel.receive(behind).wait(LABEL).body) == {2}
        for sending in sendings:
            sending.wait(LABEL)

    everywhere("mpi", body)


@pytest.mark.mpi(min_size=2)
def test_a_communicator_with_mail_can_be_freed_and_made_again():
    from mpi4py import MPI

    def body(world):
        for round_ in range(3):
            comm = world.Dup()
            team = team_of(comm, "the test")
            channel = mail_of(team).open("x")
            channel.send((team.index + 1) % team.size, bytes([round_]))
            if round_ != 1:  # else it is left in the communicator
                assert channel.receive(None).wait(LABEL).head == bytes([round_])
            comm.Free()

    everywhere("mpi", body)
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


@pytest.mark.mpi(min_size=2)
def test_what_is_sent_arrives_though_nobody_keeps_the_sending():
    """Of heads and bodies above what MPI sends at once, whose memory is used again."""
    from mpi4py import MPI

    def body(comm):
        team = team_of(comm, "the test")
        channel = mail_of(team).open("x")
        ahead, behind = (team.index + 1) % team.size, (team.index - 1) % team.size
        many = range(40)
        for k in many:
            channel.send(ahead, bytes([k]) * 60_000)
            channel.send(ahead, b"", np.full(INLINE + 1, k, "u1"))
        gc.collect()
        others = [bytes([255]) * 60_000 for _ in range(400)]  # what the program does next
        comm.Barrier()
        for k in many:
            assert channel.receive(behind).wait(LABEL).head == bytes([k]) * 60_000
            assert set(channel.receive(behind).wait(LABEL).body) == {k}
        del others
        comm.Barrier()
        limit = time.monotonic() + 20
        while messages._orphans and time.monotonic() < limit:
            mail_of(team).office.progress()
        assert not messages._orphans  # and is let go then

    everywhere("mpi", body)
    MPI.COMM_WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("end", ["closed before", "closed after", "taken last"])
def test_bodies_that_nobody_takes_are_not_taken_for_others(monkeypatch, end):
    """Tags of bodies come again after a while."""
    monkeypatch.setattr(mail, "_TAGS", 3)
    monkeypatch.setattr(office, "_CHUNK", INLINE)  # two messages for each body

    def body(comm):
        team = team_of(comm, "the test")
        left, channel = mail_of(team).open("left"), mail_of(team).open("x")
        ahead, behind = (team.index + 1) % team.size, (team.index - 1) % team.size
        if end == "closed before":
            left.close()
        comm.Barrier()
        sendings = []
        for k in range(10):
            if k in (0, 4):
                sendings.append(left.send(ahead, b"left", np.full(INLINE + 5, 100 + k, "u1")))
            sendings.append(channel.send(ahead, b"", np.full(INLINE + 5, k, "u1")))
        for k in range(10):
            assert set(channel.receive(behind).wait(LABEL).body) == {k}
            if end == "closed after" and k == 1:
                left.close()
        if end == "taken last":
            into = np.empty(INLINE + 5, "u1")
            assert set(left.receive(behind, into).wait(LABEL).body) == {100}
            assert set(left.receive(behind).wait(LABEL).body) == {104}
        else:
            assert left.poll() is None
        for sending in sendings:  # those that are dropped, too
            sending.wait(LABEL)
        channel.send(ahead, b"done")
        channel.receive(behind).wait(LABEL)

    everywhere("mpi", body)


@places
def test_what_comes_for_a_closed_channel_is_dropped(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        channel, other = mail_of(team).open("x"), mail_of(team).open("y")
        ahead, behind = (team.index + 1) % team.size, (team.index - 1) % team.size
        memory = [np.zeros(INLINE + 1, "u1") for _ in range(2)]
        first = channel.send(ahead, b"before", memory[0])
        other.send(ahead, b"")
        other.receive(behind).wait(LABEL)
        channel.close()
        other.send(ahead, b"")
        other.receive(behind).wait(LABEL)
        second = channel.send(ahead, b"after", memory[1])
        for sending in (first, second):
            sending.wait(LABEL)
        other.send(ahead, b"")
        other.receive(behind).wait(LABEL)  # its messages have been dropped by now
        assert not channel.some()
        kept = [weakref.ref(m) for m in memory]
        memory.clear()
        del first, second, sending
        mail_of(team).office.until(lambda: not any(ref() for ref in kept), team.waiting(LABEL))

    played(place, body, monkeypatch)
