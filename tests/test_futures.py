"""Futures: the standard library's tools, awaiting, cancelling, deadlines, errors nobody saw."""

import asyncio
import concurrent.futures as cf
import gc
import threading

import pytest

import mpiml
from mpiml import futures as futures_module
from mpiml.futures import Future, gather, wait
from tests.playing import LIMIT, Gate, both, play


class Engine:
    """What a future needs of an engine."""

    def __init__(self):
        self.pending = {}
        self.dropped = []
        self.logged = []

    def fulfil(self, wait):
        wait.ready = True

    def wait(self, wait, deadline, scope):
        return wait.ready

    def forget(self, future):
        return self.pending.pop(future.id, None) is not None

    def unseen(self, future):
        self.dropped.append(future.about)

    def log_exception(self, text):
        self.logged.append(text)


def open_future(engine, id=1):
    future = Future(engine, "svc/0", "method")
    future.id = id
    engine.pending[id] = future
    return future


# -- alone --------------------------------------------------------------------------------------


def test_a_value_is_decoded_once_and_where_it_is_wanted():
    engine = Engine()
    future = open_future(engine)
    decoded = []
    future.complete(lambda: decoded.append(1) or "value")
    assert not decoded
    assert [future.result(), future.result()] == ["value", "value"]
    assert decoded == [1]
    assert future.exception() is None


def test_only_errors_that_nobody_saw_are_reported():
    engine = Engine()
    for outcome in ("value", "seen", "asked", "unseen"):
        future = open_future(engine)
        if outcome == "value":
            future.complete(lambda: pytest.fail("decoded a value that nobody wants"))
        else:
            future.fail(ValueError(outcome))
        if outcome == "seen":
            with pytest.raises(ValueError, match="seen"):
                future.result()
        if outcome == "asked":
            assert isinstance(future.exception(), ValueError)
        engine.pending.clear()
        del future
        gc.collect()
    assert engine.dropped == ["svc/0.method()"]


def test_errors_that_nobody_saw_are_only_counted_once_the_program_has_failed():
    class Failed(Engine):
        failed = True

        def unseen(self, future):
            self.dropped.append(future._decode)

    engine = Failed()
    open_future(engine).fail(ValueError("a consequence"))
    engine.pending.clear()
    gc.collect()
    assert engine.dropped == [None]  # counted, and nothing that could be logged


def test_cancel_and_completion_exclude_each_other():
    engine = Engine()
    future = open_future(engine)
    assert future.cancel()
    assert future.cancel()  # as the standard library: still true
    assert future.cancelled() and future.done() and not future.running()  # noqa: PT018
    with pytest.raises(cf.CancelledError):
        future.result()
    with pytest.raises(cf.CancelledError):
        future.exception()
    late = open_future(engine)
    engine.pending.clear()  # the reply has come
    late.complete(lambda: 3)
    assert not late.cancel()
    assert late.result() == 3


def test_nobody_but_mpiml_finishes_a_future():
    future = open_future(Engine())
    for call in (
        future.set_running_or_notify_cancel,
        lambda: future.set_result(1),
        lambda: future.set_exception(ValueError()),
    ):
        with pytest.raises(mpiml.UsageError):
            call()


def test_repr_tells_the_state_and_decodes_nothing():
    engine = Engine()
    future = open_future(engine)
    assert repr(future) == "<Future of svc/0.method(), under way>"
    future.complete(lambda: pytest.fail("decoded"))
    assert repr(future) == "<Future of svc/0.method(), finished>"


class Watched(Future):
    """Notes under which lock its state changes."""

    guarded = ()

    @property
    def _state(self):
        return self.__dict__.get("state", Future._state)

    @_state.setter
    def _state(self, value):
        held = (
            self._lock._is_owned() if self._lock is not None else futures_module._lazy.locked()
        )
        self.guarded = (*self.guarded, held)
        self.__dict__["state"] = value


@pytest.mark.parametrize("asked", [False, True])
def test_the_state_changes_only_while_nobody_can_begin_to_wait(asked):
    future = Watched(Engine(), "svc/0", "method")
    if asked:
        assert not cf.wait([future], 0).done
    future.complete(lambda: 1)
    assert future.guarded == (True,)
    assert cf.wait([future], 0).done == {future}


@pytest.mark.parametrize("when", [cf.ALL_COMPLETED, cf.FIRST_COMPLETED, cf.FIRST_EXCEPTION])
def test_the_standard_library_never_counts_a_future_twice(when):
    # Futures end on one thread while others begin to wait: whoever sees one done must not be
    # told of it again, or wait() returns with others still open.
    for _ in range(300):
        engine = Engine()
        futures = [open_future(engine, i) for i in range(6)]
        start = threading.Barrier(2)

        def finish(futures=futures, start=start):
            start.wait()
            for future in futures:
                future.complete(lambda: 1)

        thread = threading.Thread(target=finish)
        thread.start()
        start.wait()
        done, not_done = cf.wait(futures, LIMIT, when)
        if when != cf.FIRST_COMPLETED:
            assert not not_done
        assert done
        assert sum(f.result() for f in cf.as_completed(futures, LIMIT)) == 6
        thread.join()


def test_a_callback_added_while_the_call_ends_runs_once():
    for _ in range(300):
        engine = Engine()
        future = open_future(engine)
        seen = []
        start = threading.Barrier(2)

        def finish(future=future, start=start):
            start.wait()
            future.complete(lambda: 1)

        thread = threading.Thread(target=finish)
        thread.start()
        start.wait()
        future.when_done(seen.append)
        thread.join()
        assert seen == [future]


def test_wait_leaves_nothing_behind_on_futures_that_are_still_open():
    engine = Engine()
    futures = [open_future(engine, i) for i in range(3)]
    futures[1].complete(lambda: 1)
    done, rest = wait(futures)
    assert done == [futures[1]]
    assert rest == [futures[0], futures[2]]
    assert not futures[0]._callbacks
    for bad in (0, 4):
        with pytest.raises(mpiml.UsageError, match=r"num_returns in 1\.\.3"):
            wait(futures, bad)
    with pytest.raises(mpiml.UsageError):
        wait([])


def test_gather_puts_errors_in_their_places():
    engine = Engine()
    futures = [open_future(engine, i) for i in range(3)]
    error = ValueError("x")
    futures[0].complete(lambda: 1)
    futures[1].fail(error)
    futures[2].cancel()
    values = gather(futures, return_errors=True)
    assert values[:2] == [1, error]
    assert isinstance(values[2], cf.CancelledError)
    with pytest.raises(ValueError, match="x"):
        gather(futures)


# -- in programs --------------------------------------------------------------------------------


class Service(Gate):
    def double(self, x):
        return 2 * x

    def fail(self, x):
        raise ValueError(x)


@both
def test_concurrent_futures_take_them(mode):
    def body(svc):
        futures = [svc.futures.double(i) for i in range(50)]
        assert sorted(f.result() for f in cf.as_completed(futures, LIMIT)) == [
            2 * i for i in range(50)
        ]
        held = svc.futures.hold("x")
        _, rest = cf.wait([held, svc.futures.double(1)], LIMIT, cf.FIRST_COMPLETED)
        assert rest == {held}
        svc.open()
        assert cf.wait([held], LIMIT).done == {held}

    play(mode, body, svc=Service, concurrency=2)


@both
def test_mpiml_wait_and_gather(mode):
    def body(svc):
        held = svc.futures.hold("x")
        futures = [held, *(svc.futures.double(i) for i in range(5))]
        done, rest = mpiml.wait(futures, num_returns=3)
        assert len(done) == 3
        assert held in rest
        assert mpiml.wait([held], timeout=0.01) == ([], [held])
        pending = futures
        count = 0
        while len(pending) > 1:
            done, pending = mpiml.wait(pending)
            count += len(done)
        assert count == 5
        svc.open()
        assert mpiml.gather(futures) == ["x", 0, 2, 4, 6, 8]
        mixed = mpiml.gather([svc.futures.fail("no"), svc.futures.double(1)], True)
        assert isinstance(mixed[0], ValueError)
        assert mixed[1] == 2

    play(mode, body, svc=Service, concurrency=2)


@both
def test_futures_to_several_services_run_at_the_same_time(mode):
    def body(svc):
        futures = svc.futures.hold("x")
        assert [f.running() for f in futures] == [True, True, True]
        svc.open()  # each is inside hold, or this would not return
        assert mpiml.gather(futures) == ["x"] * 3

    play(mode, body, svc=mpiml.ServiceNode(Service), replicas={"svc": 3}, concurrency=2)


@both
def test_a_timeout_is_not_a_cancel(mode):
    def body(svc):
        future = svc.futures.hold("x")
        with pytest.raises(mpiml.DeadlineError, match=r"svc/0\.hold\(\): .* within 0\.01 s"):
            future.result(timeout=0.01)
        with pytest.raises(TimeoutError):
            future.exception(timeout=0.0)
        assert not future.done()
        svc.open()
        assert future.result(LIMIT) == "x"

    play(mode, body, svc=Service, concurrency=2)


@both
def test_a_client_with_a_deadline_gives_its_futures_one(mode):
    def body(svc):
        quick = svc.with_options(timeout=0.1)
        futures = [quick.futures.hold(i) for i in range(5)]
        with pytest.raises(mpiml.DeadlineError):
            futures[0].result()
        with pytest.raises(mpiml.DeadlineError):
            futures[1].result(timeout=LIMIT)
        assert cf.wait(futures[2:3], LIMIT).done
        assert isinstance(futures[2].exception(), mpiml.DeadlineError)
        assert mpiml.wait(futures[3:4])[0]

        async def later():
            with pytest.raises(mpiml.DeadlineError):
                await quick.futures.hold("y")

        asyncio.run(later())
        svc.open()
        assert quick.futures.double(2).result() == 4
        assert "y" in svc.read()  # it ran all the same

    play(mode, body, svc=Service, concurrency=10)


@both
def test_cancel_drops_the_result_and_the_call_goes_on(mode):
    def body(svc):
        future = svc.futures.hold("x")
        assert future.cancel()
        with pytest.raises(cf.CancelledError):
            future.result()
        svc.open()
        while svc.read() != ["x"]:
            pass
        done = svc.futures.double(1)
        assert done.result() == 2
        assert not done.cancel()

    play(mode, body, svc=Service, concurrency=2)


@both
def test_callbacks_may_wait_and_call(mode):
    def body(svc):
        finished = threading.Event()
        seen = []

        def after(future):
            assert threading.current_thread().name == "callbacks of mpiml"
            me = mpiml.context().role
            seen.append((me, svc.double(future.result())))  # a blocking call in a callback
            finished.set()

        future = svc.futures.hold(2)
        future.add_done_callback(after)
        svc.open()
        assert finished.wait(LIMIT)
        assert seen == [("body", 4)]
        future = svc.futures.double(2)
        future.result()
        future.add_done_callback(lambda f: seen.append(f.result()))
        assert seen[-1] == 4

    play(mode, body, svc=Service, concurrency=2)


@both
def test_the_program_does_not_end_under_a_callback(mode):
    begun, ran = [], []

    def callback(future):
        threading.Event().wait(0.3)  # longer than an idle program takes to end
        ran.append((future.result(), future.engine.closed))

    def body(svc):
        future = svc.futures.hold(1)
        future.add_done_callback(callback)
        svc.open()
        future.result()
        begun.append(1)

    play(mode, body, svc=Service, concurrency=2)
    assert ran == [(1, False)] * len(begun)  # on the rank of the body


@both
def test_a_callback_that_raises_is_logged_and_nothing_else(mode, capfd):
    def body(svc):
        finished = threading.Event()
        future = svc.futures.hold(1)
        future.add_done_callback(lambda _: 1 / 0)
        future.add_done_callback(lambda _: finished.set())
        svc.open()
        assert finished.wait(LIMIT)
        assert future.result() == 1

    play(mode, body, svc=Service, concurrency=2)
    if mode == "threads":
        assert "a callback of the future of svc/0.hold() raised" in capfd.readouterr().err


@both
def test_futures_are_awaited_while_other_tasks_go_on(mode):
    def body(svc):
        async def main():
            held = asyncio.ensure_future(_await(svc.futures.hold("x")))
            assert await svc.futures.double(4) == 8
            values = await asyncio.gather(*(_await(svc.futures.double(i)) for i in range(20)))
            assert values == [2 * i for i in range(20)]
            assert not held.done()
            with pytest.raises(ValueError, match="no"):
                await svc.futures.fail("no")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_await(svc.futures.hold("y")), 0.01)
            assert await asyncio.wrap_future(svc.futures.double(3)) == 6
            svc.open()
            assert await held == "x"

        async def _await(future):
            return await future

        asyncio.run(main())

    play(mode, body, svc=Service, concurrency=4)


@both
def test_many_futures_of_a_slow_service_make_the_caller_wait(mode):
    class Slow(Gate):
        def one(self, i):
            self.seen.append(i)
            server = _server_of(self)
            self.most = max(self.most, server.active)
            return i

        def queued(self):
            return self.most

    def _server_of(_):
        from mpiml.scope import current_scope

        return current_scope().owner.server

    def body(svc):
        window = svc.__dict__["_target"].engine.window[0]
        futures = [svc.futures.one(i) for i in range(1000)]
        assert mpiml.gather(futures) == list(range(1000))
        assert svc.read() == list(range(1000))
        assert svc.queued() <= window + 1  # and the one that runs

    play(mode, body, svc=Slow)


@both
def test_an_error_that_nobody_saw_is_logged_once_for_each_method(mode, capfd):
    def body(svc):
        for i in range(10):
            svc.futures.fail(f"number {i}")
        for i in range(10):
            svc.futures.double(i)
        svc.double(1)
        engine = svc.__dict__["_target"].engine
        assert engine.unseen_errors() == {"svc/0.fail()": 10}

    play(mode, body, svc=Service)
    if mode == "threads":
        err = capfd.readouterr().err
        assert err.count("svc/0.fail() failed and nobody looked at it") == 1
        assert "ValueError: number 0" in err
        assert "raise ValueError(x)" in err  # the remote traceback
        assert "double" not in err
        assert "svc/0.fail() failed 10 times and nobody looked\n" in err  # at the end
