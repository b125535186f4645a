"""Batched methods: stacking, padding, company and its absence, errors that hit only their caller."""

import threading
import time

import numpy as np
import pytest

import mpiml
from tests.playing import LIMIT, Gate, both, play


class Model:
    def __init__(self):
        self.calls = []
        self.event = threading.Event()

    @mpiml.batched(4, timeout=LIMIT)
    def double(self, x):
        self.calls.append(x.shape)
        return 2 * x

    @mpiml.batched(3, timeout=0.01)
    def soon(self, x, scale=1):
        self.calls.append(x.shape)
        return {"y": x * np.reshape(scale, (-1, *[1] * (x.ndim - 1))), "n": (x, list(x))}

    @mpiml.batched(8, timeout=0.01, pad=True)
    def padded(self, x):
        self.calls.append(x.shape)
        return x + 1

    @mpiml.batched(2, timeout=0.01)
    def fussy(self, x):
        self.calls.append(x.shape)
        if x.shape[1:] != (3,):
            raise ValueError(f"bad shape {x.shape[1:]}")
        return x.sum(axis=1)

    @mpiml.batched(2, timeout=0.01)
    def wrong(self, x):
        return x[:0] if x[0] else 5

    @mpiml.batched(2, timeout=0.01)
    def unpicklable(self, x):
        return [threading.Lock() if i else 1 for i in x]

    @mpiml.batched(4, timeout=LIMIT)
    async def later(self, x):
        import asyncio

        await asyncio.sleep(0)
        return x * 10

    @mpiml.batched(64, timeout=0.2)
    def waits(self, x):
        self.calls.append(x.shape)
        return x

    def shapes(self):
        return self.calls

    def items(self):
        yield 1


def test_the_decorator_checks_its_arguments():
    for bad in ((0, 1.0), (1, -1.0)):
        with pytest.raises(mpiml.UsageError, match="max_batch_size >= 1 and timeout >= 0"):
            mpiml.batched(*bad)


@both
def test_a_full_batch_is_one_call(mode):
    def body(model):
        rows = [np.full(3, i) for i in range(8)]
        futures = [model.futures.double(row) for row in rows]
        for row, future in zip(rows, futures, strict=True):
            np.testing.assert_array_equal(future.result(), 2 * row)
        assert model.shapes() == [(4, 3), (4, 3)]
        values = mpiml.gather([model.futures.double(i) for i in range(4)])
        assert values == [0, 2, 4, 6]

    play(mode, body, model=Model)


@both
def test_an_incomplete_batch_runs_after_its_time(mode):
    def body(model):
        values = mpiml.gather([model.futures.soon(np.full(2, i), scale=i) for i in range(2)])
        np.testing.assert_array_equal(values[1]["y"], [1, 1])
        assert values[0]["n"][0].tolist() == [0, 0]
        assert values[1]["n"][1].tolist() == [1, 1]
        assert model.shapes() == [(2, 2)]
        assert model.soon(7)["y"] == 7

    play(mode, body, model=Model)


@both
def test_padding_repeats_the_last_row_and_drops_its_results(mode):
    def body(model):
        assert mpiml.gather([model.futures.padded(i) for i in range(3)]) == [1, 2, 3]
        assert model.shapes() == [(8,)]

    play(mode, body, model=Model)


@both
def test_a_bad_shape_fails_only_its_caller(mode):
    def body(model):
        good = model.futures.fussy(np.ones(3))
        bad = model.futures.fussy(np.ones(4))
        assert good.result() == 3.0
        with pytest.raises(ValueError, match="bad shape"):
            bad.result()
        ragged = model.futures.fussy([[1, 2], [3]])
        good = model.futures.fussy(np.ones(3))
        assert good.result() == 3.0
        with pytest.raises(ValueError):
            ragged.result()
        with pytest.raises(TypeError):
            model.fussy(np.ones(3), 1, extra=2)

    play(mode, body, model=Model)


@both
def test_errors_of_the_method_and_of_its_result(mode):
    def body(model):
        for x, got in ((1, "length 0"), (0, "int")):
            with pytest.raises(mpiml.UsageError, match=f"first axis 1, .* got {got}"):
                model.wrong(x)
        good, bad = model.futures.unpicklable(0), model.futures.unpicklable(1)
        assert good.result() == 1
        with pytest.raises(mpiml.UsageError, match="the result"):
            bad.result()
        assert list(model.stream.items()) == [1]

    play(mode, body, model=Model)


@both
def test_more_callers_than_turns_never_deadlock(mode):
    def body(model):
        futures = [model.futures.double(i) for i in range(32)]
        assert mpiml.gather(futures) == [2 * i for i in range(32)]
        assert len(model.shapes()) == 8

    play(mode, body, model=Model, concurrency=1)


@both
def test_a_batch_larger_than_the_window_runs_all_the_same(mode):
    class Wide:
        @mpiml.batched(100_000, timeout=0.01)
        def one(self, x):
            return x

    def body(wide):
        assert mpiml.gather([wide.futures.one(i) for i in range(500)]) == list(range(500))

    play(mode, body, wide=Wide)


@both
def test_an_async_batched_method(mode):
    def body(model):
        assert mpiml.gather([model.futures.later(i) for i in range(4)]) == [0, 10, 20, 30]

    play(mode, body, model=Model)


@both
def test_calls_that_wait_for_company_run_before_the_program_ends(mode):
    seen = []

    class Sink:
        @mpiml.batched(64, timeout=LIMIT)
        def push(self, x):
            seen.extend(x.tolist())
            return x

    def body(sink):
        for i in range(3):
            sink.futures.push(i)

    play(mode, body, sink=Sink)
    if mode == "threads":
        assert seen == [0, 1, 2]


@both
def test_calls_of_a_service_that_is_up_only_after_the_stop_run(mode):
    """All bodies have returned before the service is there: its calls are run all the same."""
    seen = []

    class Sink:
        def __init__(self):
            time.sleep(0.3)  # the stop comes first

        @mpiml.batched(64, timeout=LIMIT)
        def push(self, x):
            seen.extend(x.tolist())
            return x

    def body(sink):
        for i in range(3):
            sink.futures.push(i)

    play(mode, body, sink=Sink)
    if mode == "threads":
        assert sorted(seen) == [0, 1, 2]


@both
def test_a_call_that_comes_after_the_stop_does_not_wait_for_company(mode):
    """A request may be on its way when the order to stop passes it."""
    answers = []

    class Sink:
        @mpiml.batched(64, timeout=LIMIT)
        def push(self, x):
            return x + 1

    def body(sink):
        mpiml.context().on_stop(lambda: answers.append(sink.push(1)))

    play(mode, body, sink=Sink)
    if mode == "threads":
        assert answers == [2]


@both
def test_calls_that_come_before_the_service_is_up_are_batched_too(mode):
    class Late(Model):
        def __init__(self, gate):
            super().__init__()
            gate.hold()

    def body(late, gate):
        futures = [late.futures.double(i) for i in range(6)]
        while gate.read() != [None]:
            pass
        gate.open()
        futures += [late.futures.double(i) for i in range(6, 8)]
        assert mpiml.gather(futures) == [2 * i for i in range(8)]
        assert late.shapes() == [(4,), (4,)]
        with pytest.raises(mpiml.UsageError, match="plain call of a batched method"):
            next(late.stream.double(1))

    late = mpiml.ServiceNode(Late)
    play(
        mode, body, after=lambda h: late.configure(h["gate"]), concurrency={"gate": 3},
        late=late, gate=Gate,
    )  # fmt: skip


@both
def test_many_threads_share_batches(mode):
    def body(model):
        values = {}

        def work(k):
            values[k] = [model.padded(np.full(4, k + i)).tolist() for i in range(5)]

        bind = mpiml.context().bind
        threads = [threading.Thread(target=bind(work), args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        for k in range(8):
            assert values[k] == [[k + i + 1] * 4 for i in range(5)]

    play(mode, body, model=Model)
