"""HogWild++ with the token: both branches by hand, racing adds kept, two forms that agree."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml._native import hogwild_add, ring_prepare, ring_sync, use_isa

DTYPES = [np.float32, np.float64]
BETA, LAM = 0.75, 0.625  # exact in binary; three numbers that tell beta, lam and both apart


def by_hand(own, snapshot, following, step, beta, lam, tolerance):
    """The two branches as the authors' code has them, in double: three new values."""
    delta = step * (own - snapshot)
    if abs(delta) > tolerance:
        new = lam * following + (1 - lam) * own + (beta + lam - 1) * delta
        return new, new, following + beta * delta
    new = lam * following + (1 - lam) * own + lam * delta
    return new, new - delta, following


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_branches_of_exact_numbers(dtype):
    """Eighths and small whole numbers: nothing rounds, so the formula is met exactly."""
    rng = np.random.default_rng(1)
    models = rng.integers(-8, 9, (3, 1000)).astype(dtype)
    expected = np.array(
        [by_hand(*map(float, at), 0.5, BETA, LAM, 2.0) for at in models.T], dtype
    ).T
    moved, kept = ring_sync(*models, 0.5, BETA, LAM, 2.0)
    np.testing.assert_array_equal(models, expected)
    assert moved + kept == 1000
    assert 200 < moved < 800


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 15, 17, 255, 256, 257, 600])
def test_random_numbers_of_any_length(dtype, count):
    rng = np.random.default_rng(count)
    models = rng.standard_normal((3, count)).astype(dtype)
    args = (0.9, 0.7245, 0.6197, 0.5)
    expected = np.array([by_hand(*map(float, at), *args) for at in models.T]).reshape(-1, 3).T
    deltas = np.abs(0.9 * (models[0] - models[1]))
    assert ring_sync(*models, *args) == (np.sum(deltas > 0.5), np.sum(deltas <= 0.5))
    np.testing.assert_allclose(models, expected, rtol=0, atol=40 * np.finfo(dtype).eps)


def test_a_delta_of_the_tolerance_itself_is_kept():
    own, snapshot, following = np.array([2.0, 2.5, -2.0, -2.5]), np.zeros(4), np.zeros(4)
    assert ring_sync(own, snapshot, following, 1.0, BETA, LAM, 2.0) == (2, 2)
    np.testing.assert_array_equal(following, [0, 2.5 * BETA, 0, -2.5 * BETA])
    np.testing.assert_array_equal(own, [2, 2.5 * BETA, -2, -2.5 * BETA])
    np.testing.assert_array_equal(snapshot, [0, 2.5 * BETA, 0, -2.5 * BETA])


@pytest.mark.parametrize("dtype", DTYPES)
def test_models_that_agree_stay_to_the_bit(dtype):
    model = np.random.default_rng(2).standard_normal(1000).astype(dtype)
    models = np.stack([model] * 3)
    assert ring_sync(*models, 1.0, 0.7245, 0.6197, 0.0) == (0, 1000)
    assert models.tobytes() == np.stack([model] * 3).tobytes()


def test_not_a_number_is_averaged_and_not_passed_on():
    nan = np.nan
    own, snapshot, following = np.array([nan, 1.0, 1.0]), np.ones(3), np.array([5.0, nan, 3.0])
    assert ring_sync(own, snapshot, following, 1.0, BETA, LAM, 0.1) == (0, 3)
    np.testing.assert_array_equal(following, [5, nan, 3])
    np.testing.assert_array_equal(own, [nan, nan, 1 + LAM * 2])


@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    count=st.integers(0, 700),
    tolerance=st.sampled_from([0.0, 1e-2, 0.7, 1e30]),
    step=st.sampled_from([1.0, 0.01]),
)
@settings(max_examples=60, deadline=None)
def test_split_form_equals_the_whole(dtype, seed, count, tolerance, step):
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((3, count)).astype(dtype)
    whole[rng.integers(0, 3, count // 2), rng.integers(0, max(count, 1), count // 2)] = -0.0
    own, snapshot, following = split = whole.copy()
    args = (step, 0.6823, 0.5344, tolerance)
    copy, delta = following.copy(), np.full(count, 9, dtype)
    copy.flags.writeable = False
    assert ring_prepare(own, snapshot, copy, *args, delta) == ring_sync(*whole, *args)
    assert following.tobytes() == copy.tobytes()
    hogwild_add(following, delta)
    assert split.tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree(dtype):
    models = np.random.default_rng(5).standard_normal((3, 1001)).astype(dtype)
    seen = []
    best = use_isa("avx512")
    try:
        for name in ("plain", "avx2", "avx512"):
            use_isa(name)
            mine = models.copy()
            counts = ring_sync(*mine, 0.9, 0.7245, 0.6197, 0.5)
            seen.append((counts, mine.tobytes()))
    finally:
        use_isa(best)
    assert seen == [seen[0]] * 3


# --- others write meanwhile -----------------------------------------------------------


def race(sync, *models, turns=40):
    """Call `sync` while a thread of each model adds 1 everywhere; how often each of them did.

    Until all have had so many turns: threads that start late would find nobody to race with.
    """
    ones = np.ones_like(models[0])
    start, stop = threading.Barrier(len(models) + 1), threading.Event()
    added = [0] * len(models)

    def add(number):
        start.wait(60)
        while not stop.is_set():
            hogwild_add(models[number], ones)
            added[number] += 1

    threads = [threading.Thread(target=add, args=(i,), daemon=True) for i in range(len(models))]
    for thread in threads:
        thread.start()
    try:
        start.wait(60)
        end, calls = time.monotonic() + 60, 0
        while min(calls, *added) < turns:
            assert time.monotonic() < end, "a writer hangs"
            sync()
            calls += 1
    finally:
        stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a writer hangs"
    sync()
    return added


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_racing_adds_are_not_lost(dtype, split, moves):
    """What stays equal in each branch, whatever comes between; all numbers are exact.

    Moved, with beta = 1/2 and lam = 0: half of a delta goes, half stays, so the sum of the two
    models is what was added to both. Kept, with lam = 1: own becomes following + delta and the
    snapshot following, so that own - snapshot is all that was added to own.
    """
    own, snapshot, following, out = np.zeros((4, 50_000), dtype)
    args = (1.0, 0.5, 0.0, 0.0) if moves else (1.0, 0.5, 1.0, 1e9)
    counts = []

    def sync():
        if split:
            counts.append(ring_prepare(own, snapshot, following.copy(), *args, out))
            hogwild_add(following, out)
        else:
            counts.append(ring_sync(own, snapshot, following, *args))

    to_own, to_following = race(sync, own, following)
    moved, kept = np.sum(counts, 0)
    if moves:
        assert moved > 0
        np.testing.assert_array_equal(own + following, to_own + to_following)
        np.testing.assert_array_equal(own, snapshot)
    else:
        assert (moved, kept) == (0, len(counts) * len(own))
        np.testing.assert_array_equal(following, to_following)
        np.testing.assert_array_equal(own - snapshot, to_own)


# --- what is refused ------------------------------------------------------------------

NUMBERS = {"step": 1.0, "beta": 0.7, "lam": 0.6, "tolerance": 0.01}
BAD = [
    ({"step": np.nan}, "step: expected 0 or more, finite in the models' dtype, got nan"),
    ({"step": -1.0}, "step: expected 0 or more, finite in the models' dtype, got -1"),
    ({"step": 1e39}, "step: expected 0 or more, finite"),
    ({"beta": 1.5}, "beta: expected 0 to 1, got 1.5"),
    ({"lam": -0.5}, "lam: expected 0 to 1, got -0.5"),
    ({"tolerance": -1.0}, "tolerance: expected 0 or more"),
    ({"tolerance": np.inf}, "tolerance: expected 0 or more, finite"),
    ({"own": np.zeros(3, "f2")}, "own: expected float32 or float64, got format 'e' of 2"),
    ({"own": np.zeros(3, "i4")}, "own: expected float32 or float64, got format 'i' of 4"),
    ({"snapshot": np.zeros(2, "f4")}, "snapshot: expected 3 elements as own has, got 2"),
    ({"snapshot": np.zeros(3)}, "snapshot: expected float32 as own has, got float64"),
    ({"following": np.zeros(4, "f4")}, "following: expected 3 elements as own has, got 4"),
    ({"following": np.zeros(3)}, "following: expected float32 as own has, got float64"),
]


@pytest.mark.parametrize(("change", "text"), BAD)
@pytest.mark.parametrize("split", [False, True])
def test_bad_arguments(change, text, split):
    models = {name: np.ones(3, "f4") for name in ("own", "snapshot", "following")}
    given = {**models, **NUMBERS, **change}
    if split:
        given["following_copy"] = given.pop("following")
        given["out_delta"] = np.ones(3, "f4")
    function = ring_prepare if split else ring_sync
    with pytest.raises(ValueError, match=f"^{function.__name__}: {text}"):
        function(**given)
    assert all((model == 1).all() for model in models.values())


def test_models_must_be_different_memory():
    """With one cluster the next model is the own one, and half of its delta would be lost."""
    own, other, third = np.zeros((3, 4))
    with pytest.raises(ValueError, match=r"^ring_sync: own overlaps following"):
        ring_sync(own, other, own, **NUMBERS)
    with pytest.raises(ValueError, match=r"^ring_sync: own overlaps snapshot"):
        ring_sync(own, own, other, **NUMBERS)
    with pytest.raises(ValueError, match=r"^ring_sync: snapshot overlaps following"):
        ring_sync(own, other, other, **NUMBERS)
    for taken, name in ((own, "own"), (other, "snapshot"), (third, "following_copy")):
        with pytest.raises(ValueError, match=f"^ring_prepare: out_delta overlaps {name}"):
            ring_prepare(own, other, third, *NUMBERS.values(), taken)


def test_memory_must_be_writable_and_contiguous():
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for at, name in enumerate(("own", "snapshot", "following")):
        models = list(np.zeros((3, 4)))
        models[at] = frozen
        with pytest.raises(BufferError, match=f"^ring_sync: {name}: expected writable memory"):
            ring_sync(*models, **NUMBERS)
    with pytest.raises(BufferError, match=r"^ring_prepare: out_delta: expected writable"):
        ring_prepare(*np.zeros((3, 4)), *NUMBERS.values(), frozen)
    with pytest.raises(BufferError, match=r"^ring_sync: own: expected C-contiguous"):
        ring_sync(np.zeros(8)[::2], *np.zeros((2, 4)), **NUMBERS)
