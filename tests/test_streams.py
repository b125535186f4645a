"""Streams: order, back-pressure, leaving early, errors, deadlines, the end of the program."""

import gc
import threading

import numpy as np
import pytest

import mpiml
from mpiml.streams import WINDOW
from tests.playing import LIMIT, Gate, both, play


class Source(Gate):
    def __init__(self):
        super().__init__()
        self.made = 0
        self.ended = threading.Event()

    def count(self, n, fail_at=None):
        try:
            for i in range(n):
                if i == fail_at:
                    raise ValueError(f"at {i}")
                self.made = i + 1
                yield i
        finally:
            self.ended.set()

    def arrays(self, n, keep):
        x = np.zeros(50_000)
        for i in range(n):
            x[:] = i
            yield x if keep else mpiml.give(x.copy())

    def bad_item(self):
        try:
            yield 1
            yield threading.Lock()
        finally:
            self.ended.set()

    def stand(self):
        try:
            yield "first"
            self.event.wait(LIMIT)
            yield "second"
        finally:
            self.ended.set()

    def stubborn(self):
        try:
            yield 1
            yield 2
        finally:
            raise KeyError("while closing")

    def produced(self):
        return self.made

    def has_ended(self):
        return self.ended.wait(LIMIT)

    def ended_now(self):
        return self.ended.is_set()

    def listed(self):
        return [1, 2, 3]

    def number(self):
        return 5

    async def agen(self, n):
        try:
            for i in range(n):
                yield i
        finally:
            self.ended.set()

    async def coroutine(self):
        return 1


@both
def test_items_come_in_order_and_then_the_end(mode):
    def body(src):
        assert list(src.stream.count(100)) == list(range(100))
        assert list(src.stream.count(0)) == []
        stream = src.stream.count(1)
        assert next(stream) == 0
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(stream)
        assert list(src.stream.listed()) == [1, 2, 3]
        with pytest.raises(TypeError, match="not iterable"):
            list(src.stream.number())
        with pytest.raises(mpiml.UsageError, match=r"client\.stream\.method"):
            src.count(3)

    play(mode, body, src=Source)


@both
def test_several_streams_and_calls_interleave(mode):
    def body(src):
        streams = [src.stream.count(40) for _ in range(5)]
        for i in range(40):
            assert [next(s) for s in streams] == [i] * 5
            assert src.number() == 5

    play(mode, body, src=Source)


@both
def test_the_service_runs_ahead_only_as_far_as_the_window(mode):
    def body(src):
        stream = src.stream.count(10_000)
        assert next(stream) == 0
        while src.produced() < WINDOW:
            pass
        for _ in range(20):
            assert src.produced() == WINDOW
        for i in range(1, 100):
            assert next(stream) == i
            assert src.produced() <= i + 1 + WINDOW
        stream.close()
        assert src.has_ended()

    play(mode, body, src=Source)


@both
@pytest.mark.parametrize("how", ["close", "with", "break", "drop"])
def test_leaving_early_closes_the_generator(mode, how):
    def body(src):
        if how == "close":
            stream = src.stream.count(10_000)
            assert next(stream) == 0
            stream.close()
            stream.close()
            assert list(stream) == []
        elif how == "with":
            with src.stream.count(10_000) as stream:
                assert next(stream) == 0
        elif how == "break":
            for i in src.stream.count(10_000):
                if i == 3:
                    break
        else:
            stream = src.stream.count(10_000)
            assert next(stream) == 0
            del stream
        gc.collect()
        assert src.has_ended()
        assert src.produced() <= 2 * WINDOW
        engine = src.__dict__["_target"].engine
        for _ in range(10_000):  # the last frame may still be on its way
            if not engine.pending:
                break
            src.number()
        assert not engine.pending

    play(mode, body, src=Source, concurrency=2)


@both
def test_a_stream_left_before_its_first_turn_never_starts(mode):
    def body(src):
        held = src.futures.hold()  # the only turn
        stream = src.stream.count(5)
        del stream
        gc.collect()
        other = src.stream.count(5)
        other.close()
        held.cancel()
        assert mpiml.context().role == "body"

    class Quick(Source):
        def hold(self, tag=None):
            self.event.wait(1.5)  # long enough for what body does, on a loaded machine too

    def check(src):
        body(src)
        assert src.produced() == 0

    play(mode, check, src=Quick)


@both
def test_an_error_arrives_in_its_place_and_ends_the_stream(mode):
    def body(src):
        stream = src.stream.count(10, fail_at=3)
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="at 3") as caught:
            next(stream)
        assert "in count" in str(caught.value.__cause__)
        with pytest.raises(StopIteration):
            next(stream)
        stream = src.stream.bad_item()
        assert next(stream) == 1
        with pytest.raises(mpiml.UsageError, match="an item"):
            next(stream)
        assert src.has_ended()
        stream = src.stream.stubborn()
        assert next(stream) == 1
        stream.close()  # its error has nobody to go to
        assert src.number() == 5

    play(mode, body, src=Source)


@both
def test_large_items_are_the_callers_own(mode):
    def body(src):
        for keep in (True, False):
            kept = []
            for i, x in enumerate(src.stream.arrays(40, keep)):
                assert (x == i).all()
                x += 1000
                kept.append(x)
            assert [int(x[0]) for x in kept] == [1000 + i for i in range(40)]

    play(mode, body, src=Source)


@both
def test_a_deadline_counts_for_each_item_and_is_no_end(mode):
    def body(src):
        stream = src.with_options(timeout=0.1).stream.stand()
        assert next(stream) == "first"
        for _ in range(2):
            with pytest.raises(mpiml.DeadlineError, match=r"src/0\.stand\(\) stream"):
                next(stream)
        src.open()
        patient = iter(lambda: _next(stream), None)
        assert next(patient) == "second"

    def _next(stream):
        while True:
            try:
                return next(stream)
            except mpiml.DeadlineError:
                continue

    play(mode, body, src=Source, concurrency=2)


@both
def test_a_stream_that_stands_at_its_yield_holds_no_turn(mode):
    def body(src):
        streams = [src.stream.count(1000) for _ in range(4)]
        for stream in streams:
            next(stream)
        assert src.number() == 5  # with one turn in all

    play(mode, body, src=Source)


@both
def test_async_for(mode):
    def body(src):
        import asyncio

        async def read(n):
            return [i async for i in src.stream.count(n)]

        async def main():
            assert await asyncio.gather(*(read(n) for n in (0, 5, 60))) == [
                list(range(n)) for n in (0, 5, 60)
            ]
            with pytest.raises(ValueError, match="at 2"):
                async for _ in src.stream.count(5, fail_at=2):
                    pass
            stream = src.with_options(timeout=0.05).stream.stand()
            assert await anext(stream) == "first"
            with pytest.raises(mpiml.DeadlineError):
                await anext(stream)
            src.open()
            async for i in src.stream.count(10_000):
                if i == 5:
                    break
            assert src.number() == 5

        asyncio.run(main())

    play(mode, body, src=Source, concurrency=2)


@both
def test_asynchronous_generators_are_streamed_too(mode):
    def body(src):
        assert list(src.stream.agen(50)) == list(range(50))
        stream = src.stream.agen(10_000)
        assert next(stream) == 0
        stream.close()
        assert src.has_ended()
        with pytest.raises(mpiml.UsageError, match="plain call"):
            next(src.stream.coroutine())
        with pytest.raises(mpiml.UsageError, match=r"client\.stream"):
            src.agen(3)

    play(mode, body, src=Source)


@both
@pytest.mark.parametrize("kept", [True, False])
def test_streams_left_open_when_the_program_ends(mode, kept):
    keep = []

    class Last(Source):
        def __init__(self):
            super().__init__()
            mpiml.context().on_stop(lambda: keep.append("stop"))

        def count(self, n):
            try:
                yield from range(n)
            finally:
                keep.append("finally")

    def body(src):
        stream = src.stream.count(10_000)
        next(stream)
        if kept:
            mpiml.context().kept = stream

    play(mode, body, src=Last)
    if mode == "threads":
        assert sorted(keep) == ["finally", "stop"]


@both
def test_iterating_ends_with_the_program(mode):
    def body(src):
        stream = src.stream.stand()
        assert next(stream) == "first"
        src.stop_soon()
        with pytest.raises(mpiml.Stopped):
            next(stream)
        raise mpiml.Stopped

    class Stopper(Source):
        def stop_soon(self):
            threading.Timer(0.05, mpiml.context().bind(self._stop)).start()

        def _stop(self):
            mpiml.context().stop()
            threading.Timer(0.3, self.event.set).start()  # the end has to wait for the method

    play(mode, body, src=Stopper, concurrency=2)
