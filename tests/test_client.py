"""Calls as the caller spells them: blocking, options, groups, names, values, bytes."""

import gc
import pickle
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import mpiml
from tests.playing import LIMIT, Gate, both, play


class Echo(Gate):
    def add(self, a, b=1):
        return a + b

    def echo(self, x):
        return x

    def map(self, f, xs):
        return [f(x) for x in xs]

    def keep(self, x):
        self.kept = x
        return x

    def kept_array(self):
        return self.kept

    def total(self):
        return float(np.sum(self.kept))

    def who(self):
        return mpiml.context().index

    def run(self):
        """Not served."""

    def _private(self):
        return "secret"


@both
def test_arguments_and_keywords_arrive(mode):
    def body(echo):
        assert echo.add(2) == 3
        assert echo.add(2, b=5) == 7
        assert echo.map(abs, [-1, 2]) == [1, 2]
        assert echo.echo(None) is None

    play(mode, body, echo=Echo)


@both
def test_names_that_are_not_served_fail_without_a_message(mode):
    def body(echo):
        engine = echo.__dict__["_target"].engine
        before = engine.counts()[0]
        for name in ("missing", "_private", "run", "state_dict"):
            with pytest.raises(mpiml.UnknownMethodError, match=name):
                getattr(echo, name)
            with pytest.raises(AttributeError, match="served are: add, echo"):
                getattr(echo.futures, name)
            with pytest.raises(mpiml.UnknownMethodError):
                getattr(echo.stream, name)
        assert engine.counts()[0] == before
        assert not hasattr(echo, "__array__")
        assert dir(echo) == sorted(
            [
                "futures",
                "stream",
                "with_options",
                "add",
                "echo",
                "hold",
                "keep",
                "kept_array",
                "map",
                "note",
                "open",
                "read",
                "total",
                "who",
            ]
        )

    play(mode, body, echo=Echo)


@both
def test_an_allow_list_is_kept_on_both_sides(mode):
    def body(echo):
        assert dir(echo) == ["add", "futures", "stream", "with_options"]
        with pytest.raises(mpiml.UnknownMethodError, match=r"served are: add$"):
            echo.echo(1)
        # a client that does not know the list is refused by the service
        target = echo.__dict__["_target"].with_timeout(None)
        target.methods = None
        forged = mpiml.client.Client(target)
        with pytest.raises(mpiml.UnknownMethodError, match="'echo' not found") as caught:
            forged.echo(1)
        assert isinstance(caught.value.__cause__, mpiml.RemoteError)

    import mpiml.client

    play(mode, body, echo=Echo, allow=["add"])


@both
def test_a_client_cannot_be_sent(mode):
    def body(echo):
        with pytest.raises(mpiml.UsageError, match="a client works in the node it was given"):
            echo.echo(echo)
        with pytest.raises(mpiml.UsageError, match="client"):
            pickle.dumps(echo)

    play(mode, body, echo=Echo)


@both
def test_an_unpicklable_argument_is_named_where_the_call_is_made(mode):
    def body(echo):
        before = echo.__dict__["_target"].engine.counts()[0]
        for call in (echo.add, echo.futures.add, echo.stream.add):
            with pytest.raises(mpiml.UsageError, match=r"lock"):
                call(1, b={"x": threading.Lock()})
        assert echo.__dict__["_target"].engine.counts()[0] == before
        assert echo.add(1) == 2  # and nothing is left behind: no credit, no open call

    play(mode, body, echo=Echo)


@both
def test_a_group_fans_out_in_order_and_slices_are_groups(mode):
    def body(echo):
        assert echo.who() == [0, 1, 2]
        assert [f.result() for f in echo.futures.add(1)] == [2, 2, 2]
        assert echo[1].who() == 1
        assert echo[1:].who() == [1, 2]
        assert echo[::-1].who() == [2, 1, 0]
        assert len(echo[:0]) == 0
        assert echo[:0].who() == []
        assert [c.who() for c in echo] == [0, 1, 2]
        with pytest.raises(mpiml.UnknownMethodError):
            echo.missing(1)

    play(mode, body, echo=mpiml.ServiceNode(Echo), replicas={"echo": 3})


@both
def test_a_group_keeps_one_deadline(mode):
    def body(echo):
        quick = echo.with_options(timeout=0.05)
        with pytest.raises(mpiml.DeadlineError, match=r"echo/0\.hold"):
            quick.hold()
        for client in echo:
            client.open()
        assert echo.with_options(timeout=LIMIT).add(1) == [2, 2]

    play(mode, body, echo=mpiml.ServiceNode(Echo), replicas={"echo": 2}, concurrency=2)


def at_least(count, read):
    """Return what `read` returns once it is so long; fail after very many looks."""
    for _ in range(100_000):
        got = read()
        if len(got) >= count:
            return got
    raise AssertionError(f"expected {count} entries, got {got}")


@both
def test_a_deadline_ends_the_wait_and_not_the_call(mode):
    def body(gate):
        with pytest.raises(mpiml.DeadlineError, match=r"gate/0\.hold\(\).*within 0\.05 s"):
            gate.with_options(timeout=0.05).hold("late")
        patient = gate.with_options(timeout=None)
        assert at_least(1, patient.read) == ["late"]
        at_once = gate.with_options(timeout=0)
        with pytest.raises(mpiml.DeadlineError, match=r"gate/0\.hold\(\).*within 0 s"):
            at_once.hold("too late")
        with pytest.raises(mpiml.DeadlineError, match="timeout of the client"):
            at_once.futures.hold("too late").result()
        assert patient.read()[:1] == ["late"]
        gate.open()
        assert gate.hold("after") == "after"
        got = at_least(4, gate.read)  # four threads run these calls, in whatever order
        assert sorted(got) == ["after", "late", "too late", "too late"]
        with pytest.raises(mpiml.UsageError, match="timeout >= 0"):
            gate.with_options(timeout=-1)

    play(mode, body, gate=Gate, concurrency=4)


@both
def test_a_deadline_holds_while_the_service_is_too_far_behind(mode):
    class Slow(Gate):
        def hold(self):
            self.event.wait(1.0)  # nothing can open it: no other call gets a turn

    def body(gate):
        target = gate.__dict__["_target"]
        first = gate.futures.hold()
        while target.peer.under_way < target.engine.window[0]:
            gate.futures.note(0)
        with pytest.raises(mpiml.DeadlineError, match="room for another call within"):
            gate.with_options(timeout=0.05).note("never sent")
        first.result()
        assert "never sent" not in gate.read()

    play(mode, body, gate=Slow)


def test_waiting_until_ready_ends_where_there_is_no_room_to_ask():
    going_on = threading.Event()

    class Stuck(Gate):
        def stick(self):
            assert going_on.wait(LIMIT)

    def body(stuck):
        target = stuck.__dict__["_target"]
        first = stuck.futures.stick()
        while target.peer.under_way < target.engine.window[0]:
            stuck.futures.note(0)
        text = "wait_until_ready: expected 1 nodes .* within 0.05 s; not ready: stuck/0"
        try:
            with pytest.raises(mpiml.DeadlineError, match=text):
                mpiml.wait_until_ready(stuck, timeout=0.05)
        finally:
            going_on.set()
        first.result()
        mpiml.wait_until_ready(stuck)

    play("threads", body, stuck=Stuck)


@both
def test_an_argument_may_be_overwritten_at_once(mode):
    def body(echo):
        x = np.ones(1 << 21)  # 16 MiB
        future = echo.futures.keep(x)
        x[:] = 7.0
        assert future.result().sum() == 1 << 21
        assert echo.total() == 1 << 21
        raw = bytearray(b"a" * 100_000)
        future = echo.futures.echo(raw)
        raw[:] = b"b" * 100_000
        assert future.result() == b"a" * 100_000
        stream = echo.stream.echo([np.ones(100_000)])
        assert next(stream).sum() == 100_000

    play(mode, body, echo=Echo)


@both
def test_a_result_is_the_callers_own_and_the_service_keeps_its_own(mode):
    def body(echo):
        x = np.zeros(1 << 16)
        pulled = echo.keep(x)
        for _ in range(2):
            assert pulled.flags.writeable
            assert not pulled.any()
            pulled += 1.0
            pulled = echo.kept_array()
        x += 5.0
        assert echo.total() == 0.0
        small = echo.keep(np.zeros(3))
        small += 1
        assert echo.total() == 0.0
        listed = echo.keep([1, [2]])
        listed[1].append(3)
        assert echo.kept_array() == [1, [2]]

    play(mode, body, echo=Echo)


@both
def test_what_the_service_changes_later_does_not_change_the_result(mode):
    class Model:
        def __init__(self):
            self.w = np.zeros(1 << 21)

        def pull(self):
            return self.w

        def step(self):
            self.w += 1.0

    def body(model):
        first = model.futures.pull()
        model.futures.step()
        second = model.futures.pull()
        model.step()
        assert not first.result().any()
        assert (second.result() == 1.0).all()
        assert (model.pull() == 2.0).all()

    play(mode, body, model=Model)


@both
def test_given_memory_arrives_and_stays_ours(mode):
    class Giver:
        def make(self, n):
            return mpiml.give(np.arange(n))

        def last(self, x):
            x += 1
            return {"x": mpiml.give(x), "n": len(x)}

    def body(giver):
        n = 1 << 18
        got = giver.make(n)
        assert got.flags.writeable
        assert got[-1] == n - 1
        x = np.zeros(n)
        back = giver.last(mpiml.give(x))
        assert back["n"] == n
        assert (back["x"] == 1.0).all()
        assert not x.any()

    play(mode, body, giver=Giver)


POINT = np.dtype([("x", "<f8"), ("n", ">i4"), ("s", "S3")])
ARRAYS = [
    np.array(3.5),
    np.zeros((0, 4), np.int8),
    np.arange(40.0).reshape(5, 8)[:, ::2],
    np.arange(40.0).reshape(5, 8).T,
    np.asfortranarray(np.arange(100_000.0).reshape(250, 400)),
    np.arange(100_000.0).reshape(250, 400)[::3, ::-1],
    np.arange(50_000, dtype=">i4"),
    np.arange(5, dtype=">f8")[::2],
    np.array([(1.5, 2, b"abc"), (0, -1, b"")], POINT),
    np.zeros(20_000, POINT),
    np.array(["äö", "x"]),
    np.array([None, {"a": 1}], object),
    np.array(["2026-01-01"], "M8[D]"),
    np.arange(6, dtype=np.float16).reshape(1, 2, 3),
    np.ones(3, bool),
]


@both
def test_arrays_of_every_kind_arrive_equal(mode):
    def body(echo):
        for x in ARRAYS:
            for y in (echo.echo(x), echo.futures.echo(x).result(), echo.echo([x])[0]):
                assert y.dtype == x.dtype
                assert y.shape == x.shape
                np.testing.assert_array_equal(y, x)
                assert y.flags.writeable

    play(mode, body, echo=Echo)


@both
def test_bytes_of_all_sizes_in_flight_out_of_order(mode):
    def body(echo):
        sizes = [40 << 10, 5 << 20, 0]
        values = [bytes([i]) * sizes[i % 3] for i in range(100)]
        futures = [echo.futures.echo(v) for v in values]
        for i in (*range(99, -1, -2), *range(0, 100, 2)):
            assert futures[i].result() == values[i]

    play(mode, body, echo=Echo, concurrency=8)


@both
def test_calls_of_one_node_start_in_the_order_made(mode):
    def body(gate):
        big = np.zeros(1 << 19)
        tags = []
        for i in range(60):
            payload = (big, b"", b"x" * 70_000)[i % 3]
            tags.append(i)
            if i % 7 == 6:
                assert gate.note(i, payload) == i
            elif i % 5 == 4:
                gate.with_options(timeout=LIMIT).futures.note(i, payload)
            else:
                gate.futures.note(i, payload)
        assert gate.read() == tags

    play(mode, body, gate=Gate)


@both
def test_clients_are_thread_safe(mode):
    def body(echo):
        errors = []

        def work(k):
            try:
                for i in range(200):
                    assert echo.add(k, i) == k + i
                    x = np.full(3000, k)
                    assert (echo.futures.echo(x).result() == k).all()
            except BaseException as error:
                errors.append(error)

        bind = mpiml.context().bind
        threads = [threading.Thread(target=bind(work), args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not errors

    play(mode, body, echo=Echo, concurrency=4)


@both
def test_a_thread_that_the_body_starts_may_call_without_bind(mode):
    def body(echo):
        box = []
        thread = threading.Thread(target=lambda: box.append(echo.add(1)))
        thread.start()
        thread.join(LIMIT)
        assert box == [2]

    play(mode, body, echo=Echo)


@both
def test_request_ids_beyond_the_tags_of_mpi(mode):
    def body(echo):
        engine = echo.__dict__["_target"].engine
        import itertools

        tags = set()
        if engine.link is not None:
            isend = engine.link._isend

            def watched(data, rank, tag):
                tags.add(tag)
                return isend(data, rank, tag)

            engine.link._isend = watched
        engine.new_id = itertools.count(8_388_600).__next__
        pending = [echo.futures.add(i) for i in range(1000)]
        assert [f.result() for f in pending] == list(range(1, 1001))
        for i in range(1000):
            assert echo.add(i) == i + 1
        engine.new_id = itertools.count((1 << 40) + 7).__next__
        assert echo.add(1) == 2
        assert len(echo.echo(np.zeros(100_000))) == 100_000
        assert mode == "threads" or tags
        assert all(0 <= tag <= 32_767 for tag in tags)

    play(mode, body, echo=Echo)


@both
def test_calls_wait_for_a_service_that_is_not_up_yet(mode):
    release = threading.Event()

    class Late:
        def __init__(self):
            # the caller cannot tell us: it waits. Its call is there when we look again.
            self.began = release.wait(0.2)

        def ready(self):
            return True

    def body(late):
        assert late.futures.ready().result() is True
        assert late.ready()

    play(mode, body, late=Late)


def test_a_client_used_after_the_program_says_so():
    kept = []

    def body(echo):
        kept.append(echo)
        echo.add(1)

    play("threads", body, echo=Echo)
    for call in (kept[0].add, kept[0].futures.add, kept[0].stream.add):
        with pytest.raises(mpiml.ServiceGoneError, match="the program has ended"):
            call(1)


@both
def test_dropping_a_client_sends_nothing(mode):
    def body(echo):
        engine = echo.__dict__["_target"].engine
        sent = set()
        for _ in range(5):  # other threads of mpiml may send in between
            other = echo.with_options(timeout=5.0)
            assert other.add(1) == 2
            gone = weakref.ref(other)
            before = engine.counts()[0]
            del other
            gc.collect()
            assert gone() is None
            sent.add(engine.counts()[0] - before)
        assert min(sent) == 0

    play(mode, body, echo=Echo)


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_an_array_over_two_gib():
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 2:
        pytest.skip("it goes from one rank to another; more would only look on")
    free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    if free < 8 << 30:
        pytest.skip(f"needs 8 GiB of memory, {free >> 30} are free")

    class Tail:
        def tail(self, x):
            return x.nbytes, x[-3:]

    def body(tail):
        x = np.zeros((1 << 31) + 12, np.uint8)
        x[-2] = 7
        size, end = tail.tail(x)
        assert size == x.nbytes
        assert end.tolist() == [0, 7, 0]

    play("mpi", body, tail=Tail)


@both
def test_long_text_and_large_numbers_arrive(mode):
    def body(echo):
        for x in ("ä" * 5000, "\ud800", 1 << 100_000, -1, True, 1.5, b"b" * 5000, "", ()):
            assert echo.echo(x) == x
            assert echo.futures.echo(x).result() == x

    play(mode, body, echo=Echo)


@both
def test_a_deadline_must_be_a_number(mode):
    def body(echo):
        with pytest.raises(mpiml.UsageError, match="timeout"):
            echo.with_options(timeout="soon")

    play(mode, body, echo=Echo)


class Named:
    def count(self, x):
        return x

    def index(self, x):
        return x + 1


@both
def test_a_group_shadows_nothing_but_its_own_verbs(mode):
    def body(named):
        assert named.count(1) == [1, 1]
        assert named.index(1) == [2, 2]
        assert isinstance(named, Sequence)

    play(mode, body, named=mpiml.ServiceNode(Named), replicas={"named": 2})


@both
def test_a_stream_of_a_group_is_refused_with_the_cure(mode):
    def body(named):
        with pytest.raises(mpiml.UsageError, match=r"for c in clients: c\.stream\.method"):
            named.stream.count(1)

    play(mode, body, named=mpiml.ServiceNode(Named), replicas={"named": 2})
