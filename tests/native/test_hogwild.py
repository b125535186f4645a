"""Hogwild! adds: none is lost, every way equals NumPy's, snapshots are never torn."""

import itertools
import mmap
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml._native import (
    Gate,
    gate_bytes,
    hogwild_add,
    hogwild_add_at,
    hogwild_add_rows,
    hogwild_svm_rows,
)

HOWS = ["atomic", "racy", "spinlock", "mutex"]
DTYPES = [np.float32, np.float64]
INDICES = [np.int32, np.int64]


def lock_word():
    return np.zeros(1, np.uint32)


def gates(size):
    memory = mmap.mmap(-1, gate_bytes(size))
    return [Gate(memory, i, size) for i in range(size)]


def race(*bodies):
    """Run each body in a thread of its own; the first error is raised here."""
    errors = []
    start = threading.Barrier(len(bodies))

    def run(body):
        try:
            start.wait(60)
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(b,), daemon=True) for b in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a writer hangs"
    if errors:
        raise errors[0]


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0)


def csr(rng, rows, components, most, dtype=np.float32, index=np.int32):
    lengths = rng.integers(0, most + 1, rows)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
    indices = rng.integers(0, components, indptr[-1]).astype(index)
    return indptr, indices, rng.standard_normal(indptr[-1]).astype(dtype)


# --- no update is lost --------------------------------------------------------------


@pytest.mark.parametrize("how", ["atomic", "spinlock", "mutex"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_update_is_lost_in_a_million_racing_adds(how, dtype):
    """Whole numbers below 2**24 are exact in float32, so each lost add shows.

    All wait at a closed gate, in native code, and are let go at once: threads that start
    one after the other would be done before the next comes.
    """
    components, rows, width = 3, 40_000, 10
    model = np.zeros(components, dtype)
    indices = np.arange(rows * width, dtype=np.int32) % components
    indptr = np.arange(0, rows * width + 1, width, dtype=np.int32)
    values, ones = np.ones(rows * width, dtype), np.ones(rows, dtype)
    lock = lock_word()
    memory = mmap.mmap(-1, gate_bytes(5))
    memory[0] = 5  # closed by member 4
    *members, opener = [Gate(memory, i, 5) for i in range(5)]
    waiting = []

    def writer(gate):
        def body():
            waiting.append(gate)
            for _ in range(5):
                hogwild_add_rows(model, indptr, indices, values, ones, how, lock, gate)

        return body

    def let_go():
        wait_until(lambda: len(waiting) == 4)
        memory[0] = 0

    race(let_go, *map(writer, members))  # 4 * 5 * 400 000 adds
    np.testing.assert_array_equal(model, 20 * np.bincount(indices, minlength=components))
    assert lock[0] == 0
    assert opener.version() == 20 * rows


def test_no_update_is_lost_among_the_three_kinds_of_add():
    model = np.zeros(100_000, np.float64)
    every = np.arange(len(model))
    ones = np.ones(len(model))

    def dense():
        for _ in range(5):
            hogwild_add(model, ones, 2.0)

    def at():
        for _ in range(5):
            hogwild_add_at(model, every, ones, 3.0)

    def rows():
        for _ in range(5):
            hogwild_add_rows(model, np.array([0, len(model)]), every, ones, np.array([4.0]))

    race(dense, at, rows)
    np.testing.assert_array_equal(model, 5 * (2 + 3 + 4))


def test_two_processes_add_to_one_mapped_file(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(bytes(4096 + gate_bytes(3)))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    memory[4096] = 3  # closed by member 2, until both are there
    opener = Gate(memoryview(memory)[4096:], 2, 3)
    code = """
import mmap, sys
import numpy as np
from mpiml._native import Gate, hogwild_add_rows
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
model = np.frombuffer(memory, np.float32, 16)
gate = Gate(memoryview(memory)[4096:], int(sys.argv[2]), 3)
rows, width = 100_000, 16
indices = np.arange(rows * width, dtype=np.int64) % 16
arguments = (np.arange(0, rows * width + 1, width), indices,
             np.ones(rows * width, np.float32), np.ones(rows, np.float32))
print("ready", flush=True)
hogwild_add_rows(model, *arguments, gate=gate, timeout_us=60_000_000)
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, os.fspath(path), str(i)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        memory[4096] = 0
        for child in children:
            child.communicate(timeout=60)
            assert child.returncode == 0
    finally:
        for child in children:
            child.kill()
            child.communicate()
    np.testing.assert_array_equal(np.frombuffer(memory, np.float32, 16), 200_000)
    assert opener.version() == 200_000
    assert opener.inside() == []


# --- each way equals NumPy ----------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("components", [5, 1 << 19])  # near, and with looking ahead
def test_every_way_equals_numpy(how, dtype, index, components):
    rng = np.random.default_rng(1)
    model = rng.standard_normal(components).astype(dtype)
    expected = model.copy()
    lock = lock_word()
    values = rng.standard_normal(components).astype(dtype)
    hogwild_add(model, values, 0.3)
    expected += dtype(0.3) * values
    at = rng.integers(0, components, 100).astype(index)
    hogwild_add_at(model, at, values[:5].repeat(20), -0.7)
    np.add.at(expected, at, dtype(-0.7) * values[:5].repeat(20))
    indptr, indices, data = csr(rng, 30, components, 9, dtype, index)
    coefficients = rng.standard_normal(30).astype(dtype)
    hogwild_add_rows(model, indptr, indices, data, coefficients, how, lock)
    np.add.at(expected, indices, coefficients.repeat(np.diff(indptr)) * data)
    assert model.tobytes() == expected.tobytes()
    assert lock[0] == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_rows_equal_numpy(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    index, starts = data.draw(st.sampled_from(INDICES)), data.draw(st.sampled_from(INDICES))
    components = data.draw(st.integers(1, 20))
    rows = data.draw(st.lists(st.lists(st.integers(0, components - 1), max_size=6), max_size=8))
    width = 32 if dtype == np.float32 else 64
    numbers = st.floats(-100, 100, width=width)
    total = sum(map(len, rows))
    values = np.array(data.draw(st.lists(numbers, min_size=total, max_size=total)), dtype)
    scales = np.array(
        data.draw(st.lists(numbers, min_size=len(rows), max_size=len(rows))), dtype
    )
    indptr = np.cumsum([0, *map(len, rows)]).astype(starts)
    indices = np.array([j for row in rows for j in row], index)
    low = data.draw(st.integers(0, len(rows)))
    model = np.ones(components, dtype)
    hogwild_add_rows(model, indptr[low:], indices, values, scales[low:])
    expected = np.ones(components, dtype)
    begin = indptr[low]
    more = scales.repeat(np.diff(indptr))[begin:] * values[begin:]
    np.add.at(expected, indices[begin:], more)
    assert model.tobytes() == expected.tobytes()


def test_not_a_number_ends_the_loop():
    model = np.array([np.nan, 1.0, -0.0], np.float32)
    hogwild_add(model, np.array([1, np.nan, 0.0], np.float32))
    np.testing.assert_array_equal(model, np.array([np.nan, np.nan, 0], np.float32))


def test_empty_calls_change_nothing():
    model = np.ones(3, np.float32)
    none, no_index = np.empty(0, np.float32), np.empty(0, np.int32)
    hogwild_add(none, none)
    hogwild_add_at(model, no_index, none)
    hogwild_add_at(none, no_index, none)
    hogwild_add_rows(model, np.zeros(1, np.int32), no_index, none, none)
    assert hogwild_svm_rows(
        model, np.zeros(1, np.int64), no_index, none, none, model, 1, 1
    ) == (
        0,
        0.0,
    )
    np.testing.assert_array_equal(model, 1)


# --- the sparse SVM -----------------------------------------------------------------


def svm_by_hand(w, indptr, indices, values, labels, degrees, eta, mu, order):
    """The local step as Hogwild!'s authors write it, one row after the other."""
    dtype = w.dtype.type
    active, loss = 0, 0.0
    for row in order:
        part = slice(indptr[row], indptr[row + 1])
        at, x = indices[part], values[part]
        dot = 0.0
        for j, v in zip(at, x, strict=True):
            dot += float(w[j]) * float(v)
        if labels[row] * dot < 1:
            active, loss = active + 1, loss + 1 - float(labels[row]) * dot
            np.add.at(w, at, dtype(eta) * labels[row] * x)
        for j in at:
            w[j] *= dtype(1) - dtype(eta * mu) / degrees[j]
    return active, loss


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.1])
def test_svm_step_by_hand(how, dtype, twice, mu):
    rng = np.random.default_rng(3)
    rows, components = 60, 40
    indptr, indices, values = csr(rng, rows, components, 8, dtype, np.int32)
    if not twice:
        for low, high in itertools.pairwise(indptr):
            at = rng.choice(components, high - low, replace=False)
            indices[low:high] = np.sort(at)
    labels = rng.choice([-1, 1], rows).astype(dtype)
    degrees = np.maximum(1, np.bincount(indices, minlength=components)).astype(dtype)
    order = rng.integers(0, rows, 300)
    model = np.zeros(components, dtype)
    expected = model.copy()
    arguments = (indptr, indices, values, labels, degrees, 0.2, mu)
    seen = hogwild_svm_rows(model, *arguments, order, how, lock_word())
    assert seen == svm_by_hand(expected, *arguments, order)
    assert 0 < seen[0] < 300
    assert model.tobytes() == expected.tobytes()
    seen = hogwild_svm_rows(
        model, indptr[20:31], *arguments[1:3], labels[20:30], *arguments[4:]
    )
    assert seen == svm_by_hand(expected, *arguments, range(20, 30))
    assert model.tobytes() == expected.tobytes()


def test_svm_by_racing_threads_separates_the_classes():
    rng = np.random.default_rng(4)
    rows, components = 4000, 200
    indices = np.sort(rng.permuted(np.tile(np.arange(components), (rows, 1)), axis=1)[:, :10])
    values = rng.standard_normal((rows, 10))
    truth = rng.standard_normal(components)
    labels = np.where((values * truth[indices]).sum(1) > 0, 1.0, -1.0)
    degrees = np.bincount(indices.ravel(), minlength=components).astype(float)
    indptr = np.arange(0, rows * 10 + 1, 10)
    model = np.zeros(components)

    def body():
        for _ in range(10):
            hogwild_svm_rows(model, indptr, indices, values, labels, degrees, 0.05, 1e-3)

    race(body, body)
    right = np.mean(labels * (values * model[indices]).sum(1) > 0)
    assert right > 0.95


# --- snapshots ----------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_snapshot_is_never_torn(how):
    """Two writers add to the whole model; with one of them racing none of its own is lost."""
    count, turns = 50_000, 60
    first, second, reader = gates(3)
    model, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    whole, every = np.array([0, count]), np.arange(count)  # one row
    lock = lock_word()
    seen = []

    def writer(gate):
        def body():
            for _ in range(turns):
                hogwild_add_rows(model, whole, every, ones, ones[:1], how, lock, gate)

        return body

    def read():
        out = np.empty_like(model)

        def look():
            version = reader.snapshot(model, out, 60_000_000)
            assert version is not None
            if how != "racy":  # there two whole adds may lose parts of each other
                assert np.ptp(out) == 0
                assert out[0] == version
            seen.append(version)
            return version == 2 * turns

        wait_until(look)

    race(writer(first), writer(second), read)
    assert seen == sorted(seen)
    assert first.version() == 2 * turns
    assert first.inside() == []
    assert first.closed_by == -1


def test_snapshot_comes_between_the_rows_of_a_call():
    """Each row adds 1 to all components, so a snapshot within a row would be torn."""
    writer, reader = gates(2)
    components, rows = 64, 20_000
    model = np.zeros(components, np.float64)
    indices = np.tile(np.arange(components, dtype=np.int32), rows)
    indptr = np.arange(0, len(indices) + 1, components)
    values, ones = np.ones(len(indices)), np.ones(rows)

    def write():
        hogwild_add_rows(model, indptr, indices, values, ones, gate=writer)

    def read():
        out = np.empty_like(model)

        def look():
            version = reader.snapshot(model, out)
            np.testing.assert_array_equal(out, version)
            return version == rows

        wait_until(look)

    race(write, read)


def test_snapshot_of_a_quiet_model_counts_updates():
    one, two = gates(2)
    model = np.zeros(4, np.float32)
    hogwild_add(model, np.ones(4, np.float32), gate=one)
    hogwild_add_at(model, np.array([1]), np.ones(1, np.float32), gate=two)
    indptr = np.array([0, 1, 2])
    hogwild_add_rows(
        model, indptr, np.array([0, 0]), np.ones(2, "f4"), np.ones(2, "f4"), gate=two
    )
    labels = np.ones(2, "f4")
    hogwild_svm_rows(
        model, indptr, np.array([3, 3]), labels, labels, np.ones(4, "f4"), 1, 0, gate=two
    )
    out = np.empty_like(model)
    assert one.snapshot(model, out) == 6
    np.testing.assert_array_equal(out, [3, 2, 1, 1])
    assert two.version() == 6


def test_snapshot_gives_up_on_a_writer_that_died():
    dead, alive = gates(2)
    model, out = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert dead.enter()
    assert alive.snapshot(model, out, 1000) is None
    assert alive.inside() == [0]
    assert alive.closed_by == -1  # the others go on
    hogwild_add(model, out, gate=alive)
    np.testing.assert_array_equal(out, 1)  # not touched
    dead.leave(0)  # it was not dead, only slow
    assert alive.snapshot(model, out, 1000) == 1
    assert alive.inside() == []


def test_writers_give_up_on_a_snapshot_whose_taker_died():
    memory = mmap.mmap(-1, gate_bytes(2))
    gate = Gate(memory, 0, 2)
    memory[0] = 2  # as member 1 left it
    model, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert gate.closed_by == 1
    with pytest.raises(
        TimeoutError,
        match=r"^hogwild_add: the gate stayed closed by member 1 within 1000 us: 0 of 1",
    ):
        hogwild_add(model, ones, gate=gate, timeout_us=1000)
    assert not gate.enter(0)
    assert gate.snapshot(model, ones, 0) is None
    assert gate.inside() == []
    assert not model.any()
    memory[0] = 0  # it was only slow
    hogwild_add(model, ones, gate=gate)
    assert model.all()


@pytest.mark.parametrize("how", ["spinlock", "mutex"])
def test_writers_give_up_on_a_lock_whose_owner_died(how):
    (gate,) = gates(1)
    model = np.zeros(2, np.float32)
    with pytest.raises(
        TimeoutError,
        match=r"^hogwild_add_rows: the lock was not given back within 1000 us: 0 of 2",
    ):
        hogwild_add_rows(
            model,
            np.array([0, 1, 2]),
            np.array([0, 1]),
            np.ones(2, "f4"),
            np.ones(2, "f4"),
            how,
            np.ones(1, np.uint32),
            gate,
            1000,
        )
    assert not model.any()
    assert (gate.version(), gate.inside()) == (0, [])


def test_a_waiting_writer_lets_other_threads_run():
    """It holds the GIL while it adds a few numbers, and not while it waits."""
    first, second = gates(2)
    memory_model = np.zeros(2, np.float32)
    assert first.enter()
    out = np.empty_like(memory_model)
    versions = []

    def read():
        versions.append(second.snapshot(memory_model, out, 60_000_000))

    def write():
        wait_until(lambda: second.closed_by == 1)  # the snapshot waits for `first`
        first.leave(7)

    race(read, write)
    assert versions == [7]


# --- what is refused ----------------------------------------------------------------

GOOD_ROWS = {
    "model": np.zeros(3, "f4"),
    "indptr": np.array([0, 1, 3]),
    "indices": np.array([0, 1, 2]),
    "values": np.ones(3, "f4"),
    "coefficients": np.ones(2, "f4"),
}
GOOD_SVM = {
    **{k: v for k, v in GOOD_ROWS.items() if k != "coefficients"},
    "labels": np.ones(2, "f4"),
    "degrees": np.ones(3, "f4"),
    "eta": 1.0,
    "mu": 1.0,
}
BAD_CSR = [
    ({"indices": np.array([0, 1, 3])}, "indices: expected 0 to 2, got 3 at position 2"),
    ({"indices": np.array([0, -1, 3], "i4")}, "indices: expected 0 to 2, got -1 at position 1"),
    ({"indices": np.array([-(2**40), 1, 2])}, "indices: expected 0 to 2, got -1099511627776"),
    ({"indices": np.array([0.0, 1, 2])}, "indices: expected int32 or int64, got format 'd'"),
    ({"indices": np.zeros(3, "u4")}, "indices: expected int32 or int64, got format 'I' of 4"),
    ({"indptr": np.array([0, 2, 1])}, "indptr: expected 2 to 3, got 1 at position 2"),
    ({"indptr": np.array([0, 1, 4], "i4")}, "indptr: expected 1 to 3, got 4 at position 2"),
    ({"indptr": np.array([-1, 1, 3])}, "indptr: expected 0 to 3, got -1 at position 0"),
    ({"indptr": np.empty(0, "i4")}, r"indptr: expected rows \+ 1 elements, got 0"),
    ({"values": np.ones(2, "f4")}, "values: expected 3 elements as indices has, got 2"),
    ({"values": np.ones(3, "f8")}, "values: expected float32 as the model has, got float64"),
    ({"model": np.zeros(3, "f2")}, "model: expected float32 or float64, got format 'e' of 2"),
    ({"model": bytearray(12)}, "model: expected float32 or float64, got format 'B' of 1 byte"),
    (
        {"model": np.frombuffer(bytearray(13), "f4", 3, 1)},
        "model: expected memory aligned to 4 bytes",
    ),
    ({"how": "fast"}, "how: expected atomic, racy, spinlock or mutex, got 'fast'"),
    ({"how": "mutex"}, "lock: expected 4 bytes of shared memory for how='mutex', got None"),
    ({"how": "spinlock", "lock": bytearray(3)}, "lock: expected 4 bytes or more"),
    ({"timeout_us": -1}, "timeout_us: expected 0 or more, got -1"),
]


def refused(function, good, change, text):
    arguments = {"timeout_us": 0, **good, **change}
    before = bytes(memoryview(arguments["model"]).cast("B"))
    with pytest.raises(ValueError, match=f"^{function.__name__}: {text}"):
        function(**arguments)
    assert bytes(memoryview(arguments["model"]).cast("B")) == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *BAD_CSR,
        ({"coefficients": np.ones(3, "f4")}, "coefficients: expected 2 elements as there are"),
        ({"coefficients": np.ones(2)}, "coefficients: expected float32 as the model has"),
    ],
)
def test_bad_rows(change, text):
    refused(hogwild_add_rows, GOOD_ROWS, change, text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *BAD_CSR,
        (
            {"labels": np.array([1, 0], "f4")},
            "labels: expected 1 or -1, got 0.0+ at position 1",
        ),
        ({"labels": np.ones(3, "f4")}, "labels: expected 2 elements as there are rows, got 3"),
        ({"degrees": np.ones(2, "f4")}, "degrees: expected 3 elements as the model has, got 2"),
        (
            {"degrees": np.array([1, 1, 0], "f4")},
            "degrees: expected a positive .* at position 2",
        ),
        ({"order": np.array([0, 2])}, "order: expected 0 to 2 without the end, got 2 at posi"),
        ({"order": np.array([-1], "i4")}, "order: expected 0 to 2 without the end, got -1 at"),
        ({"eta": float("nan")}, "eta, mu: expected finite"),
    ],
)
def test_bad_svm(change, text):
    refused(hogwild_svm_rows, GOOD_SVM, change, text)


def test_bad_dense_and_sparse_adds():
    model = np.zeros(3, "f4")
    refused(
        hogwild_add,
        {"model": model, "values": np.ones(2, "f4")},
        {},
        "values: expected 3 elements as the model has, got 2",
    )
    good = {"model": model, "indices": np.array([0, 5]), "values": np.ones(2, "f4")}
    refused(hogwild_add_at, good, {}, "indices: expected 0 to 2, got 5 at position 1")
    refused(
        hogwild_add_at,
        good,
        {"model": np.empty(0, "f4")},
        "indices: expected none, as the model is empty, got 0 at position 0",
    )


def test_memory_must_be_writable_and_contiguous():
    frozen = np.zeros(4, "f4")
    frozen.flags.writeable = False
    with pytest.raises(BufferError, match="hogwild_add: model: expected writable memory"):
        hogwild_add(frozen, np.zeros(4, "f4"))
    with pytest.raises(BufferError, match="hogwild_add: values: expected C-contiguous"):
        hogwild_add(np.zeros(4, "f4"), np.zeros(8, "f4")[::2])
    with pytest.raises(TypeError):
        hogwild_add(None, np.zeros(4, "f4"))


def test_bad_gates():
    memory = mmap.mmap(-1, gate_bytes(2))
    with pytest.raises(ValueError, match=r"^Gate: index: expected 0 to 1, got 2"):
        Gate(memory, 2, 2)
    with pytest.raises(ValueError, match=r"^Gate: memory: expected 384 bytes, got 300"):
        Gate(memoryview(memory)[:300], 0, 2)
    with pytest.raises(ValueError, match=r"^Gate: memory: expected an alignment of 128"):
        Gate(memoryview(memory)[64:], 0, 1)
    with pytest.raises(ValueError, match=r"^gate_bytes: size: expected 1 or more, got 0"):
        gate_bytes(0)
    gate = Gate(memory, 0, 2)
    model = np.zeros(4, "f4")
    with pytest.raises(ValueError, match="out: expected 16 bytes as the model has, got 12"):
        gate.snapshot(model, model[1:])
    with pytest.raises(ValueError, match="out overlaps the model"):
        gate.snapshot(model[1:], model[:3])
