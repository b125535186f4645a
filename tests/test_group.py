"""The verbs of a group of replicas: one item for each, the least loaded, results that are combined."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpiml
from mpiml.group import _Loads
from mpiml.reducing import REDUCE, _combined
from mpiml.wire import CREDIT, REPLY
from tests.playing import LIMIT, Gate, both, launched, play


class Worker(Gate):
    def __init__(self):
        super().__init__()
        self.index = mpiml.context().index
        self.state = np.full(3, float(self.index))
        self.notes = []

    def note(self, x, *, common=None):
        self.notes.append(x)
        return self.index, x, common

    def who(self):
        return self.index

    def vector(self, scale=1.0):
        return self.state * scale

    def block(self):
        return np.full(1 << 17, 1.0 + self.index)  # 1 MiB

    def kept(self):
        return self.state  # which it goes on using

    def tree(self):
        return {"loss": float(self.index), "grads": [np.ones((2, 2), "f4"), np.arange(2)]}

    def fails(self):
        if self.index == 2:
            raise KeyError("two")
        return 1.0

    def hold_third(self):
        return self.hold(1.0) if self.index == 2 else 1.0

    def noise(self):
        return np.random.default_rng(self.index).normal(size=1000)

    def imaginary(self, array=False):
        return np.ones(2) * 1j if array else 1j

    def uneven(self):
        return np.ones(2 + self.index // 2)

    def text(self):
        return "no number"

    async def later(self):
        return np.ones(1) * self.index

    @mpiml.batched(max_batch_size=8, timeout=0.01)
    def batch(self, x):
        return x * 2


def workers(count):
    return {"replicas": {"workers": count}, "workers": mpiml.ServiceNode(Worker)}


# -- scatter ---------------------------------------------------------------------------------------


@both
def test_scatter_gives_each_replica_its_item(mode):
    def body(workers):
        got = workers.scatter.note("abc", common=7)
        assert got == [(0, "a", 7), (1, "b", 7), (2, "c", 7)]
        futures = workers.futures.scatter.note([1, 2, 3])
        assert [f.result() for f in futures] == [(0, 1, None), (1, 2, None), (2, 3, None)]
        assert workers[1:].scatter.note(iter([8, 9])) == [(1, 8, None), (2, 9, None)]
        with pytest.raises(mpiml.UsageError, match="one item for each of 3 replicas, got 2"):
            workers.scatter.note([1, 2])
        with pytest.raises(mpiml.UsageError, match="one item for each of 3 replicas, got 5"):
            workers.scatter.note(5)
        with pytest.raises(mpiml.UnknownMethodError):
            workers.scatter.missing([1, 2, 3])

    play(mode, body, **workers(3))


# -- least loaded ----------------------------------------------------------------------------------


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=40))
def test_loads_stay_even_and_nobody_is_left_out(replicas, steps):
    loads, vertices = _Loads(), range(7, 7 + replicas)
    open_ = []
    for take in steps:
        if take or not open_:
            before = [loads._counts.get(v, 0) for v in vertices]
            vertex = loads.take(vertices)
            assert before[vertex - 7] == min(before)
            open_.append(vertex)
        else:
            loads.give_back(open_.pop(0))
    while open_:
        loads.give_back(open_.pop())
    assert sorted({loads.take(vertices) for _ in range(replicas)}) == list(vertices)


def test_slices_take_turns_whatever_the_others_do():
    loads = _Loads()
    found = []
    for _ in range(4):
        for vertices in ([1, 2, 3, 4], [1, 2]):
            vertex = loads.take(vertices)
            loads.give_back(vertex)
        found.append(vertex)
    assert set(found) == {1, 2}


@both
def test_slices_and_options_count_with_their_group(mode):
    def body(workers):
        assert [workers.with_options(timeout=LIMIT).least_loaded.who() for _ in range(6)] == [
            0, 1, 2, 0, 1, 2,
        ]  # fmt: skip
        busy = workers[:1].futures.least_loaded.hold()
        assert {workers.with_options(timeout=LIMIT).least_loaded.who() for _ in range(4)} == {
            1,
            2,
        }
        with pytest.raises(mpiml.DeadlineError, match=r"workers/1\.hold"):
            workers[1:2].with_options(timeout=0.01).least_loaded.hold()
        # which has not answered yet
        assert {workers.least_loaded.who() for _ in range(4)} == {2}
        for client in workers:
            client.open()
        busy.result()

    play(mode, body, concurrency=2, **workers(3))


@both
def test_who_is_busy_is_passed_over(mode):
    def body(workers):
        busy = workers.futures.least_loaded.hold()
        where = {workers.least_loaded.who() for _ in range(6)}
        assert len(where) == 2
        free = [c for c in workers if c.who() in where]
        assert len(free) == 2
        for client in workers:
            client.open()
        busy.result()
        # the thread that ends a future counts it down after that, so maybe a little later
        limit = time.monotonic() + LIMIT
        while {workers.least_loaded.who() for _ in range(3)} != {0, 1, 2}:
            assert time.monotonic() < limit
        assert {workers.least_loaded.who() for _ in range(6)} == {0, 1, 2}
        with pytest.raises(mpiml.UsageError, match="empty group"):
            workers[:0].least_loaded.who()

    play(mode, body, concurrency=2, **workers(3))


# -- reduced ---------------------------------------------------------------------------------------

SUMS = {"sum": 6.0, "mean": 1.5, "min": 0.0, "max": 3.0, "prod": 0.0}


@both
@pytest.mark.parametrize("op", SUMS)
def test_results_are_combined(mode, op):
    def body(workers):
        group = workers.reduced(op)
        assert group.who() == SUMS[op]
        assert group.vector(scale=1.0).tolist() == [SUMS[op]] * 3
        assert group.later().tolist() == [SUMS[op]]
        assert workers[2:3].reduced(op).who() == 2

    play(mode, body, **workers(4))


@both
def test_trees_and_what_the_service_keeps(mode):
    def body(workers):
        tree = workers.reduced("mean").tree()
        assert tree["loss"] == 1.0
        assert tree["grads"][0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert tree["grads"][0].dtype == np.float32
        assert tree["grads"][1].tolist() == [0.0, 1.0]
        for _ in range(2):
            assert workers.reduced("sum").kept().tolist() == [3.0] * 3
        assert workers.reduced("sum").batch(np.ones(2)).tolist() == [6.0, 6.0]

    play(mode, body, **workers(3))


@both
def test_errors_are_those_of_the_replica(mode):
    def body(workers):
        with pytest.raises(KeyError, match="two"):
            workers.reduced("sum").fails()
        with pytest.raises(
            mpiml.UsageError, match=r"float64 \(2,\) of workers/0 and float64 \(3,\)"
        ):
            workers.reduced("sum").uneven()
        with pytest.raises(mpiml.UsageError, match=r"workers/.: expected numbers, arrays"):
            workers.reduced("sum").text()
        with pytest.raises(mpiml.UsageError, match="expected one of sum, mean"):
            workers.reduced("median")
        with pytest.raises(mpiml.UsageError, match="empty group"):
            workers[:0].reduced("sum")
        with pytest.raises(mpiml.UnknownMethodError, match=r"served are: batch, block"):
            workers.reduced("sum").missing()
        assert workers.reduced("sum").who() == 3

    play(mode, body, **workers(3))


@both
def test_a_reduced_call_does_not_overtake_those_before(mode):
    def body(workers):
        for turn in range(20):
            notes = [workers[i].futures.note(turn) for i in (2, 1)]
            assert workers.reduced("sum").noted() == 3 * (turn + 1)
            workers[0].note(turn)
            [note.result() for note in notes]

    class Noting(Worker):
        def noted(self):
            return len(self.notes) + (self.index == 0)

    play(mode, body, workers=mpiml.ServiceNode(Noting), replicas={"workers": 3})


def received(client, call):
    """Return the replies that came to the caller during ``call()``, their bytes, and its value."""
    target = client.__dict__["_target"]
    engine = target.engine
    handlers, frames = dict(engine.handlers), []

    def counting(handler):
        def handle(rank, frame, buffers):
            if frame.target == target.source or frame.kind != REPLY:  # others share its rank
                frames.append(40 + len(frame.name) + len(frame.body) + sum(map(len, buffers)))
            handler(rank, frame, buffers)

        return handle

    # control frames of others may come at any time
    kinds = [kind for kind in handlers if kind < CREDIT] if engine.size > 1 else [REPLY]
    engine.handlers.update({kind: counting(handlers[kind]) for kind in kinds})
    try:
        value = call()
    finally:
        engine.handlers.update(handlers)
    return len(frames), sum(frames), value


@pytest.mark.parametrize("replicas", [2, 7])
def test_what_the_caller_receives_does_not_depend_on_the_replicas(replicas):
    def body(workers):
        frames, size, value = received(workers[0], workers.reduced("sum").block)
        assert frames == 1
        assert 1 << 20 < size < (1 << 20) + 500
        held = [workers[i].futures.hold() for i in (0, -1)]
        frames, size, same = received(workers[0], workers.reduced("sum").block)
        assert (same == value).all()
        assert frames == 2  # and the answer to the empty call before it
        assert 1 << 20 < size < (1 << 20) + 500
        for client in workers:
            client.open()
        mpiml.gather(held)

    play("threads", body, concurrency=2, **workers(replicas))


@both
def test_calls_under_way_do_not_change_the_bits(mode):
    def body(workers):
        value = workers.reduced("sum").noise()
        held = [client.futures.hold() for client in workers]
        assert (workers.reduced("sum").noise() == value).all()
        for client in workers:
            client.open()
        mpiml.gather(held)

    play(mode, body, concurrency=2, **workers(7))


@both
def test_one_deadline_for_all_and_nobody_waits_longer(mode):
    def body(workers):
        engine = workers[0].__dict__["_target"].engine
        late = workers.with_options(timeout=0.2)
        text = r'workers/0\.reduced\("sum"\)\.hold_third\(\): expected the result of 3 replicas within 0\.2'
        third = r'|workers/2\.reduced\("sum"\)\.hold_third\(\): expected its result within 0'
        with pytest.raises(mpiml.DeadlineError, match=text + third):
            late.reduced("sum").hold_third()
        limit = time.monotonic() + LIMIT / 3  # before the third itself gives up
        while engine.pending:  # the first soon waits for the third no more, which still works
            assert time.monotonic() < limit
            threading.Event().wait(0.001)
        assert workers.reduced("sum").who() == 3
        workers[2].open()

    play(mode, body, concurrency=2, **workers(3))


def test_the_deadline_holds_for_calls_that_are_open_too():
    gate = threading.Event()

    class Stuck(Worker):
        def stick(self):
            assert gate.wait(LIMIT)

    def body(workers):
        stuck = workers[2].futures.stick()
        with pytest.raises(
            mpiml.DeadlineError, match=r"workers/2\.reduced.* the calls before it"
        ):
            workers.with_options(timeout=0.1).reduced("sum").who()
        assert not stuck.done()
        gate.set()
        stuck.result()
        assert workers.reduced("sum").who() == 3

    play("threads", body, replicas={"workers": 3}, workers=mpiml.ServiceNode(Stuck))


@both
def test_what_is_waited_for_has_the_name_that_the_user_knows(mode):
    def body(workers):
        with pytest.raises(KeyError) as caught:
            workers.reduced("sum").fails()
        assert "\0" not in str(caught.value.__cause__)
        reduced = threading.Thread(
            target=mpiml.context().bind(lambda: workers.reduced("sum").hold())
        )
        reduced.start()
        engine = workers[0].__dict__["_target"].engine
        limit = time.monotonic() + LIMIT
        abouts = []
        try:
            while 'workers/0.reduced("sum").hold()' not in abouts:
                assert time.monotonic() < limit
                threading.Event().wait(0.001)
                abouts = [call.about for call in list(engine.pending.values())]
                assert not any(REDUCE in about for about in abouts)
        finally:
            for client in workers:
                client.open()
        reduced.join(LIMIT)
        assert not reduced.is_alive()

    class Numbered(Worker):
        def hold(self):
            super().hold()
            return 1.0

    node = mpiml.ServiceNode(Numbered)
    play(mode, body, concurrency=2, replicas={"workers": 3}, workers=node)


@both
def test_complex_numbers_have_no_order(mode):
    def body(workers):
        assert workers.reduced("sum").imaginary() == 3j
        for array in (False, True):
            for op in ("min", "max"):
                with pytest.raises(
                    mpiml.UsageError, match=r"workers/\d: expected numbers that have"
                ):
                    workers.reduced(op).imaginary(array)

    play(mode, body, **workers(3))


@pytest.mark.mpi(min_size=3)
def test_a_caller_receives_one_message_however_many_replicas_there_are():
    from mpi4py import MPI

    replicas = MPI.COMM_WORLD.size - 1

    def body(workers):
        workers.reduced("sum").block()
        for k in range(1, replicas + 1):
            group = workers[:k]
            frames, size, value = received(workers[0], group.reduced("sum").block)
            assert (value == k * (k + 1) / 2).all()
            assert frames == 1
            assert 1 << 20 < size < (1 << 20) + 500
            frames, size, values = received(workers[0], group.block)
            assert frames == len(values) == k
            assert size > k << 20

    play("mpi", body, **workers(replicas))


@both
def test_slices_are_groups(mode):
    def body(workers):
        assert isinstance(workers, Sequence)
        assert [len(workers), len(workers[1:]), len(workers[::2]), len(workers[3:])] == [
            3,
            2,
            2,
            0,
        ]
        assert workers[1:].who() == [1, 2]
        assert workers[::-1].who() == [2, 1, 0]
        assert workers[:2][1:].who() == [1]
        assert [f.result() for f in workers[1:].futures.who()] == [1, 2]
        assert workers[3:].who() == []
        assert workers[-1].who() == 2
        assert workers[1:].reduced("max").who() == 2
        late = workers[:2].with_options(timeout=30.0)
        assert late.who() == [0, 1]

    play(mode, body, **workers(3))


@both
def test_slices_in_the_graph(mode):
    def body(some, last):
        return some.who(), last[0].who()

    program = mpiml.Program("slices")
    handles = program.add_node(mpiml.ServiceNode(Worker), label="workers", replicas=4)
    program.add_node(mpiml.PyNode(body, handles[1:3], handles[-1:]), label="body")
    result = launched(mode, program)
    assert result is None or result["body"] == [([1, 2], 3)]


@both
def test_the_error_of_one_replica_leaves_the_others_answers(mode):
    def body(workers):
        with pytest.raises(KeyError, match="two") as caught:
            workers.fails()
        assert "workers/2" in str(caught.value.__cause__)
        got = mpiml.gather(workers.futures.fails(), return_errors=True)
        assert got[:2] == [1.0, 1.0]
        assert isinstance(got[2], KeyError)
        assert workers.who() == [0, 1, 2]

    play(mode, body, **workers(3))


@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=5), st.sampled_from(["sum", "min", "max"])
)
def test_numbers_as_numpy(values, op):
    arrays = [np.array([v, -v]) for v in values]
    expected = getattr(np, op)(arrays, axis=0)
    titles = [f"r/{i}" for i in range(len(values))]
    assert _combined(op, values, titles) == expected[0]
    before = [a.copy() for a in arrays]
    assert (_combined(op, arrays, titles) == expected).all()
    assert all((a == b).all() for a, b in zip(arrays, before, strict=True))


@both
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", ">f8", "?"])
def test_arrays_without_axes_are_arrays_all_the_way(mode, dtype):
    """On the way NumPy makes scalars of them, of which some are Python's numbers."""

    class Loss:
        def get(self):
            one = np.array(1, dtype)
            return {"loss": one, "more": [one, np.array([1, 0], dtype)]}

    def body(workers):
        found = workers.reduced("max" if dtype == "?" else "sum").get()
        expected = 1 if dtype == "?" else len(workers)
        assert found["loss"] == found["more"][0] == expected
        np.testing.assert_array_equal(found["more"][1], [expected, 0])

    play(mode, body, replicas={"workers": 5}, workers=mpiml.ServiceNode(Loss))


def test_other_structures_are_refused():
    with pytest.raises(mpiml.UsageError, match="one structure of a, b"):
        _combined("sum", [{"x": 1}, {"y": 1}], ["a", "b"])
