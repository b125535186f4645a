"""The service's side: turns, cycles, threads, errors, results."""

import functools
import sys
import threading
import traceback
import types

import numpy as np
import pytest

import mpiml
from mpiml.batching import Batcher
from mpiml.server import Request, Server
from mpiml.streams import StreamRun
from mpiml.wire import ERROR, FLAG_STREAM, REQUEST, Frame
from tests.playing import LIMIT, Gate, both, play


class Custom(Exception):
    def __init__(self, code, *, hint=None):
        super().__init__(code)
        self.code = code
        self.hint = hint

    def __reduce__(self):
        return _custom, (self.code, self.hint)


def _custom(code, hint):
    return Custom(code, hint=hint)


def _deep(depth):
    if depth:
        return _deep(depth - 1)
    raise Custom(7, hint="try again")


class Service(Gate):
    def __init__(self):
        super().__init__()
        self.threads = set()

    def fail(self, kind):
        if kind == "custom":
            _deep(3)
        if kind == "locked":
            raise Custom(threading.Lock(), hint="not to be pickled")
        if kind == "key":
            return {}["absent"]
        if kind == "attribute":
            return self.absent
        if kind == "chained":
            try:
                raise OSError("the cause")
            except OSError as error:
                raise ValueError("the effect") from error
        raise AssertionError(kind)

    def thread(self):
        return threading.get_ident(), threading.current_thread().name

    def leave(self):
        sys.exit()

    async def leave_async(self):
        sys.exit()

    def leave_items(self):
        yield 1
        sys.exit()

    def stack(self):
        return "".join(traceback.format_stack())

    def unpicklable(self):
        return threading.Lock()

    def me(self):
        context = mpiml.context()
        return context.role, context.index, context.world_rank


# -- errors -------------------------------------------------------------------------------------


@both
def test_an_exception_keeps_class_arguments_and_remote_traceback(mode):
    def body(svc):
        for call in (svc.fail, lambda kind: svc.futures.fail(kind).result()):
            with pytest.raises(Custom) as caught:
                call("custom")
            error = caught.value
            assert (error.code, error.hint, error.args) == (7, "try again", (7,))
            cause = error.__cause__
            assert type(cause) is mpiml.RemoteError
            role, _, rank = svc.me()
            text = str(cause)
            assert f"[{role}/0, rank {rank}, host {mpiml.context().host}" in text
            assert 'raise Custom(7, hint="try again")' in text
            assert text.count("in _deep") == 4
            assert "mpiml/server.py" not in text

    play(mode, body, svc=Service)


@both
def test_the_users_lookup_errors_are_not_missing_methods(mode):
    def body(svc):
        with pytest.raises(KeyError, match="absent") as caught:
            svc.fail("key")
        assert type(caught.value) is KeyError
        with pytest.raises(AttributeError, match="absent") as caught:
            svc.fail("attribute")
        assert not isinstance(caught.value, mpiml.UnknownMethodError)
        with pytest.raises(TypeError, match="positional argument"):
            svc.fail()

    play(mode, body, svc=Service)


@both
def test_exit_without_a_status_is_a_return(mode):
    def body(svc):
        assert svc.leave() is None
        assert svc.leave_async() is None
        assert list(svc.stream.leave_items()) == [1]

    play(mode, body, svc=Service)


class Deaf:
    """An engine that remembers to whom credit went back and what was sent."""

    rank, driving, guests = 0, None, None

    def __init__(self):
        self.given, self.sent = [], []

    def consumed(self, rank):
        self.given.append(rank)

    def owed(self, rank):
        return 0

    def transmit(self, rank, kind, source, target, id, aux, **_):
        self.sent.append((id, kind))


def _request(id, name=b"echo", flags=0):
    return Frame(REQUEST, 0, flags, 0, 0, id, 1, name, b"", ())


def _failing(wrappers):
    engine = Deaf()
    server = Server(engine, types.SimpleNamespace(title="svc/0"), 1)  # not open: calls queue up
    server.wrappers = wrappers
    return engine, server


def test_what_is_queued_when_a_service_fails_is_refused_with_its_credit():
    batcher = Batcher(None, 2, 60.0, False)
    engine, server = _failing({b"many": batcher})
    for id in range(1, 4):  # one batch in the queue, one call that waits for company
        server.submit(1, _request(id, b"many"), ())
    server.submit(1, _request(4), ())
    server.submit(1, _request(5, flags=FLAG_STREAM), ())
    run = StreamRun(Request(1, _request(6, flags=FLAG_STREAM), ()))
    closed = []
    run.generator = types.SimpleNamespace(close=lambda: closed.append(1))
    server.streams[1, 6] = run
    server.enqueue(run)
    assert server.active == 7  # four in the queue, and the three requests of the batcher
    server.fail_all(ValueError("boom"))
    assert sorted(engine.sent) == [(id, ERROR) for id in range(1, 7)]
    assert engine.given == [1] * 5  # the stream has had its first turn, and given it back
    assert (server.active, server.detached, server.streams, batcher.waiting) == (0, 0, {}, 0)
    assert not closed
    server.stop()
    assert closed == [1]  # user code, and so not where others are answered


def test_a_request_that_comes_while_the_service_fails_is_refused():
    class Late:
        """A lock that the failure gets first."""

        def __enter__(self):
            server.lock = lock
            server.fail_all(ValueError("boom"))
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    engine, server = _failing({})
    lock, server.lock = server.lock, Late()
    server.submit(1, _request(1), ())
    assert (engine.sent, engine.given, server.active) == ([(1, ERROR)], [1], 0)


@both
def test_what_caused_an_exception_is_told_too(mode):
    def body(svc):
        with pytest.raises(ValueError, match="the effect") as caught:
            svc.fail("chained")
        text = str(caught.value.__cause__)
        assert "OSError: the cause" in text
        assert "direct cause of the following" in text
        assert "ValueError: the effect" in text

    play(mode, body, svc=Service)


@both
def test_an_exception_that_cannot_be_pickled_arrives_as_remote_error(mode):
    def body(svc):
        with pytest.raises(mpiml.RemoteError, match=r"Custom.*_thread.lock"):
            svc.fail("locked")
        with pytest.raises(mpiml.UsageError, match=r"the result.*lock"):
            svc.unpicklable()
        assert svc.note(1) == 1

    play(mode, body, svc=Service)


@both
def test_the_traceback_of_a_call_in_a_call_names_both(mode):
    class Front:
        def __init__(self, back):
            self.back = back

        def go(self):
            return self.back.fail("custom")

    def body(front, back):
        with pytest.raises(Custom) as caught:
            front.go()
        text = str(caught.value.__cause__)
        assert "[front/0" in text
        assert "[back/0" in text
        assert "return self.back.fail" in text

    def wire(handles):
        node.configure(handles["back"])

    node = mpiml.ServiceNode(Front)
    play(mode, body, after=wire, front=node, back=Service)


# -- turns --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("limit", [1, 3])
def test_at_most_concurrency_methods_run_at_once(mode, limit):
    class Counting:
        def __init__(self):
            self.lock = threading.Lock()
            self.inside = self.most = 0
            self.full = threading.Event()

        def work(self):
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
                if self.inside == limit:
                    self.full.set()
            assert self.full.wait(LIMIT)  # all that may come do
            threading.Event().wait(0.002)  # and no other one
            with self.lock:
                self.inside -= 1

        def seen(self):
            return self.most

    def body(svc):
        mpiml.gather([svc.futures.work() for _ in range(30)])
        assert svc.seen() == limit

    play(mode, body, svc=Counting, concurrency=limit)


class Knot:
    """Calls its peer, which calls back."""

    def __init__(self, peer=None):
        self.peer = peer
        self.inside = self.most = 0
        self.log = []

    def down(self, depth):
        if depth == 0:
            return "bottom"
        return self.peer.down(depth - 1)

    def start(self):
        return self.peer.middle()

    def middle(self):
        return self.peer.end() + 1

    def end(self):
        return 41

    async def astart(self, n):
        import asyncio

        async def one():
            return await self.peer.futures.middle()

        return sum(await asyncio.gather(*(one() for _ in range(n))))

    def through_wait(self):
        futures = [self.peer.futures.middle() for _ in range(3)]
        return [f.result() for f in mpiml.wait(futures, num_returns=3)[0]]

    def through_stream(self):
        return list(self.peer.stream.items(4))

    def items(self, n):
        for _ in range(n):
            yield self.peer.end()


def _knot(handles):
    for one, other in (("a", "b"), ("b", "a")):
        NODES[one].configure(peer=handles[other])


NODES = {}


def _play_knot(mode, body):
    NODES.update(a=mpiml.ServiceNode(Knot), b=mpiml.ServiceNode(Knot))
    play(mode, body, after=_knot, **NODES)


@both
def test_cycles_of_calls_do_not_deadlock(mode):
    def body(a, b):
        assert a.start() == 42
        assert a.down(4) == "bottom"
        assert a.down(25) == "bottom"
        assert mpiml.gather([a.futures.start() for _ in range(50)]) == [42] * 50
        both_ways = [c.futures.down(6) for _ in range(20) for c in (a, b)]
        assert mpiml.gather(both_ways) == ["bottom"] * 40
        assert a.through_wait() == [42] * 3
        assert a.through_stream() == [41] * 4
        assert a.astart(5) == 210
        assert mpiml.gather([a.futures.astart(3) for _ in range(20)]) == [126] * 20

    _play_knot(mode, body)


@both
def test_a_service_may_call_itself(mode):
    class Own:
        def __init__(self, me=None):
            self.me = me

        def fib(self, n):
            if n < 2:
                return n
            one, two = self.me.futures.fib(n - 1), self.me.futures.fib(n - 2)
            return one.result() + two.result()

    def body(own):
        assert own.fib(9) == 34

    node = mpiml.ServiceNode(Own)
    play(mode, body, after=lambda h: node.configure(me=h["own"]), own=node)


@both
def test_a_method_that_has_waited_goes_on_before_new_calls_and_alone(mode):
    class Careful:
        def __init__(self, gate):
            self.gate = gate
            self.inside = 0
            self.log = []

        def long(self):
            self._enter()
            self._leave()
            self.gate.hold()
            self._enter()
            self.log.append("went on")
            self._leave()

        def short(self, i):
            self._enter()
            self.log.append(i)
            self._leave()

        def _enter(self):
            self.inside += 1
            assert self.inside == 1

        def _leave(self):
            self.inside -= 1

        def read(self):
            return self.log

    def body(svc, gate):
        waiting = svc.futures.long()
        mpiml.gather([svc.futures.short(i) for i in range(20)])  # let in meanwhile
        gate.open()
        waiting.result()
        assert svc.read() == [*range(20), "went on"]

    svc = mpiml.ServiceNode(Careful)
    program = {"svc": svc, "gate": mpiml.ServiceNode(Gate)}

    def wire(handles):
        svc.configure(handles["gate"])

    play(mode, body, after=wire, concurrency={"gate": 2}, **program)


@both
def test_threads_left_behind_by_a_method_hold_no_turn(mode):
    class Leaver:
        def __init__(self, gate):
            self.gate = gate
            self.values = []

        def leave(self):
            import contextvars

            context = contextvars.copy_context()
            started = threading.Event()

            def work():
                started.set()
                self.values.append(self.gate.hold("done"))

            thread = threading.Thread(target=context.run, args=(work,))
            thread.start()
            assert started.wait(LIMIT)

        def read(self):
            return self.values

    def body(svc, gate):
        for _ in range(3):
            svc.leave()
        assert svc.read() == []
        gate.open()
        while len(svc.read()) < 3:
            pass
        running = [svc.futures.read() for _ in range(20)]
        assert mpiml.gather(running) == [["done"] * 3] * 20

    svc = mpiml.ServiceNode(Leaver)
    play(
        mode,
        body,
        after=lambda h: svc.configure(h["gate"]),
        concurrency=4,
        svc=svc,
        gate=mpiml.ServiceNode(Gate),
    )


@both
def test_methods_never_run_on_the_stack_of_code_that_waits(mode):
    class Busy(Service):
        def run(self):
            self.runner = threading.get_ident()
            mpiml.context().wait_for_stop()

        def other_thread(self):
            return threading.get_ident() != self.runner

    class Caller:
        def __init__(self, svc):
            self.svc = svc

        def deep(self):
            stack = self.svc.stack()
            here = "".join(traceback.format_stack())
            return "in deep" in here and "in deep" not in stack

    def body(caller, svc):
        assert "in body" not in svc.stack()
        assert svc.other_thread()
        assert caller.deep()
        futures = [svc.futures.stack() for _ in range(5)]
        assert all("result" not in f.result() for f in futures)

    caller = mpiml.ServiceNode(Caller)
    play(
        mode, body, after=lambda h: caller.configure(h["svc"]), caller=caller,
        svc=mpiml.ServiceNode(Busy),
    )  # fmt: skip


@both
def test_methods_and_their_threads_know_their_node(mode):
    class Asking(Service):
        def bound(self):
            box = []
            work = mpiml.context().bind(lambda: box.append(mpiml.context().role))
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(LIMIT)
            return box

    def body(svc):
        assert [m[:2] for m in svc.me()] == [("svc", 0), ("svc", 1)]
        assert svc.bound() == [["svc"], ["svc"]]
        assert mpiml.context().role == "body"

    play(mode, body, svc=mpiml.ServiceNode(Asking), replicas={"svc": 2})


# -- results ------------------------------------------------------------------------------------


@both
def test_results_that_the_service_keeps_are_snapshots(mode):
    class Keeper:
        def __init__(self):
            self.a = np.zeros(30_000)
            self.view = self.a[10:]

        def whole(self):
            return self.a

        def part(self):
            return self.view

        def tree(self):
            return {"w": self.a, "n": [self.a, 1]}

        def fresh(self):
            return np.ones(30_000)

        def bump(self):
            self.a += 1

    def body(svc):
        got = [svc.futures.whole(), svc.futures.part(), svc.futures.tree()]
        svc.bump()
        assert not got[0].result().any()
        assert not got[1].result().any()
        tree = got[2].result()
        assert not tree["w"].any()
        assert tree["n"][0] is tree["w"]
        fresh = svc.fresh()
        fresh += 1
        assert (fresh == 2).all()

    play(mode, body, svc=Keeper)


# -- async --------------------------------------------------------------------------------------


class Asynchronous(Gate):
    def __init__(self, other=None):
        super().__init__()
        self.other = other
        self.go = None

    async def add(self, a, b):
        import asyncio

        await asyncio.sleep(0)
        return a + b

    async def fail(self):
        raise Custom(3)

    async def wait_for_it(self):
        import asyncio

        if self.go is None:
            self.go = asyncio.Event()
        await self.go.wait()
        return mpiml.context().role

    async def release(self):
        import asyncio

        if self.go is None:
            self.go = asyncio.Event()
        self.go.set()

    async def loop_id(self):
        import asyncio

        return id(asyncio.get_running_loop())

    def plain(self):
        return "plain"

    @functools.wraps(add)
    def wrapped(self):
        return "not a coroutine"

    async def run(self):
        import asyncio

        self.ran = True
        await asyncio.sleep(0)


@both
def test_async_methods(mode):
    def body(svc):
        assert mpiml.gather([svc.futures.add(i, 1) for i in range(50)]) == list(range(1, 51))
        with pytest.raises(Custom) as caught:
            svc.fail()
        assert "in fail" in str(caught.value.__cause__)
        held = svc.futures.wait_for_it()
        assert svc.plain() == "plain"
        svc.release()
        assert held.result() == "svc"
        assert svc.loop_id() == svc.loop_id()
        assert svc.wrapped() == "not a coroutine"

    play(mode, body, svc=Asynchronous, concurrency=2)


@both
def test_an_async_method_holds_its_turn_until_it_ends(mode):
    class Exclusive:
        def __init__(self):
            self.inside = self.most = 0

        async def work(self):
            import asyncio

            self.inside += 1
            self.most = max(self.most, self.inside)
            for _ in range(3):
                await asyncio.sleep(0.0005)
            self.inside -= 1

        def seen(self):
            return self.most

    def body(svc):
        mpiml.gather([svc.futures.work() for _ in range(10)])
        assert svc.seen() == 1

    play(mode, body, svc=Exclusive)


@both
def test_an_async_body(mode):
    async def body(svc):
        import asyncio

        async def one(i):
            return await svc.futures.note(i)

        assert await asyncio.gather(*(one(i) for i in range(30))) == list(range(30))
        assert svc.note("x") == "x"  # a blocking call is allowed, it only blocks the loop
        return mpiml.context().role

    assert play(mode, body, svc=Gate) in ("body", None)
