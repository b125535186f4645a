"""Each codec against its definition: by hand on small arrays, by mean over many draws."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.collectives.compression import (
    QSGD,
    Cast,
    EFSign,
    OneBit,
    RandomK,
    SignMajority,
    TernGrad,
    TopK,
)
from mpiml.collectives.compression.blocked import BLOCK
from mpiml.collectives.compression.draws import generator
from mpiml.collectives.compression.topk import largest
from mpiml.errors import UsageError

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def through(codec, array, *rng):
    """What arrives; and that the payload is what was declared."""
    payload = codec.encode(array, *rng)
    parts = payload if isinstance(payload, tuple) else (payload,)
    declared = codec.layout(array.shape, array.dtype)
    assert [(p.dtype, p.shape) for p in parts] == [(np.dtype(d), s) for d, s in declared]
    assert sum(p.nbytes for p in parts) == codec.nbytes(array.shape, array.dtype)
    return codec.decode(payload, array.shape, array.dtype)


def mean_of(make, array, count):
    """Mean of what arrives over `count` independent draws, and its standard error."""
    draws = np.array([through(make(step), array).ravel() for step in range(count)], np.float64)
    error = draws.std(axis=0) / np.sqrt(count)
    return draws.mean(axis=0).reshape(array.shape), error.reshape(array.shape)


def normal(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


DENSE = [QSGD(), QSGD(bits=3, bucket=7), QSGD(bits=8, bucket=None, norm="l2"), TernGrad()]
DENSE += [SignMajority(), EFSign(), OneBit(), Cast("float16"), Cast("bfloat16")]
SHAPES = [(), (0,), (1,), (7, 3), (0, 4), (3, 0), (2, 5, 3), (2 * BLOCK + 77,), (3, BLOCK + 9)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("codec", [*DENSE, TopK(0.1), TopK(k=5)], ids=repr)
def test_any_shape_arrives_in_its_shape_and_dtype(codec, shape, dtype):
    array = normal(shape, dtype=dtype)
    array = np.asarray(array)
    got = through(codec, array)
    assert (got.shape, got.dtype) == (array.shape, array.dtype)
    # what is added up and what is fed back are what is decoded
    payload = codec.encode(array)
    rest = array.copy()
    codec.subtract(rest, payload)
    np.testing.assert_array_equal(rest, array - codec.decode(payload, shape, dtype))
    if isinstance(payload, tuple):
        total = np.full(shape, np.nan, dtype)
        codec.combine([payload, payload], total, 2)
        one = codec.decode(payload, shape, dtype)
        np.testing.assert_array_equal(total, one + one)


@pytest.mark.parametrize("codec", [*DENSE, TopK(0.5)], ids=repr)
def test_zeros_stay_zeros_or_small(codec):
    got = through(codec, np.zeros((4, 4), np.float32))
    expected = 1 if isinstance(codec, SignMajority) else 0  # zero counts as positive
    np.testing.assert_array_equal(got, np.full((4, 4), expected))


SCALED = [codec for codec in DENSE if not isinstance(codec, Cast | SignMajority)]


@pytest.mark.parametrize("codec", [*SCALED, TopK(0.5)], ids=repr)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_very_small_and_very_large_numbers(codec, size):
    array = (normal((4, 6)) * size).astype(np.float32)
    got = through(codec, array)
    assert np.isfinite(got).all()
    assert np.abs(got - array).max() <= 3 * np.abs(array).max()


@pytest.mark.parametrize("codec", [EFSign(), OneBit(), QSGD(norm="l2")], ids=repr)
def test_a_scale_beyond_all_numbers_is_refused(codec):
    with pytest.raises(UsageError, match="is a finite number"):
        codec.encode(np.full(1000, 1e308))


# -- Cast --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cast_rounds_to_the_nearest_even(dtype):
    small = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = normal(1000)
    np.testing.assert_array_equal(Cast(dtype).encode(array), array.astype(small))
    step = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    ties = np.float32([1 + step / 2, 1 + 3 * step / 2])  # the even neighbours: 1, 1 + 2 step
    np.testing.assert_array_equal(through(Cast(dtype), ties), [1, 1 + 2 * step])


def test_cast_lets_nan_and_infinity_pass():
    got = through(Cast("float16"), np.float32([np.nan, -np.inf, 1e6]))
    np.testing.assert_array_equal(got, [np.nan, -np.inf, np.inf])


@pytest.mark.parametrize("dtype", ["float32", "int8", None])
def test_cast_knows_two_dtypes(dtype):
    with pytest.raises(UsageError, match="'bfloat16' or 'float16'"):
        Cast(dtype)


# -- TopK --------------------------------------------------------------------------------------


def test_topk_by_hand():
    array = np.float32([[0.5, -3, 0], [2, -0.1, 1]])
    indices, values = TopK(k=3).encode(array)
    assert indices.tolist() == [1, 3, 5]
    assert values.tolist() == [-3, 2, 1]
    assert indices.dtype == np.uint16
    np.testing.assert_array_equal(through(TopK(k=3), array), [[0, -3, 0], [2, 0, 1]])


def test_topk_counts():
    for ratio, size, k in [(0.01, 1000, 10), (0.01, 10, 1), (1, 7, 7), (0.25, 10, 2)]:
        assert TopK(ratio).encode(np.ones(size))[0].size == k
    assert TopK(k=9).encode(np.ones(5))[0].size == 5


def test_topk_sends_the_first_of_equals():
    assert TopK(k=2).encode(np.float32([1, -2, 1, 1]))[0].tolist() == [0, 1]


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_topk_indices_are_as_short_as_they_can_be(size, dtype):
    indices, _ = TopK(k=1).encode(np.arange(size, dtype=np.float32))
    assert indices.dtype == dtype
    assert indices[0] == size - 1


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 100, 20_000, 50_000]), st.data())
def test_largest_is_what_sorting_gives(seed, size, data):
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(0, size) | st.integers(0, min(size, 64)))
    kind = data.draw(st.sampled_from(["normal", "few values", "striped"]))
    array = rng.standard_normal(size).astype(np.float32)
    if kind == "few values":
        array = np.round(array)
    elif kind == "striped":  # a sample of every second or so sees one kind only
        array[::2] *= 1e-3
    order = np.argsort(-np.abs(array), kind="stable")[:k]
    np.testing.assert_array_equal(largest(array, k), np.sort(order))


def test_largest_where_a_sample_sees_large_ones_only():
    array = np.random.default_rng(0).standard_normal(50_000)
    array[::3] *= 1000  # the sample is every third element
    order = np.argsort(-np.abs(array), kind="stable")[:100]
    np.testing.assert_array_equal(largest(array, 100), np.sort(order))


# -- RandomK -----------------------------------------------------------------------------------


def test_randomk_sends_elements_of_the_array_and_no_index():
    array = np.arange(1, 11, dtype=np.float32)
    codec = RandomK(k=4, seed=3)
    values = codec.encode(array, generator(3, "k", "w", 0, None))
    got = codec.decode(values, (10,), F32, generator(3, "k", "w", 0, None))
    assert values.shape == (4,)
    assert np.count_nonzero(got) == 4
    np.testing.assert_array_equal(got[got != 0], array[got != 0])
    assert codec.nbytes((10,), np.float32) == 16


def test_randomk_is_uniform_over_places_and_unbiased():
    array = np.arange(1.0, 21.0)
    codec = RandomK(k=5, unbiased=True)
    total, hits = np.zeros(20), np.zeros(20)
    for step in range(2000):
        places = [generator(0, "RandomK", "w", step, None) for _ in range(2)]
        got = codec.decode(codec.encode(array, places[0]), (20,), F64, places[1])
        total += got
        hits += got != 0
    # 500 hits of 2000 each, give or take 19.4
    assert np.abs(hits - 500).max() < 5 * 19.4
    np.testing.assert_allclose(total / 2000, array, rtol=5 * 19.4 / 500)


def test_randomk_keeps_the_rest_unless_unbiased():
    assert RandomK(k=1).biased
    assert not RandomK(k=1, unbiased=True).biased
    assert through(RandomK(k=1, unbiased=True), np.float32([2, 2])).sum() == 4
    assert through(RandomK(k=1), np.float32([2, 2])).sum() == 2


# -- QSGD --------------------------------------------------------------------------------------


def test_qsgd_levels_are_the_neighbours():
    array = normal(40)
    codec = QSGD(levels=5, bucket=16, norm="l2")
    norms, _ = codec.encode(array)
    expected = [np.linalg.norm(part) for part in (array[:16], array[16:32], array[32:])]
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    unit = np.repeat(norms, 16)[:40] / 5
    r = array / unit
    got = through(codec, array) / unit
    np.testing.assert_allclose(got, np.round(got), atol=1e-5)
    assert (np.floor(r) - 1e-5 <= got).all()
    assert (got <= np.ceil(r) + 1e-5).all()


def test_qsgd_max_norm():
    array = normal(40)
    norms, _ = QSGD(bucket=16, norm="max").encode(array)
    np.testing.assert_array_equal(norms, [np.abs(p).max() for p in np.split(array, [16, 32])])
    got = through(QSGD(bits=8, bucket=None), array)
    assert np.abs(got - array).max() <= np.abs(array).max() / 127


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_qsgd_is_unbiased(norm):
    array = normal((5, 7))
    mean, error = mean_of(lambda s: QSGD(levels=2, bucket=16, norm=norm, seed=s), array, 2000)
    assert (np.abs(mean - array) <= 5 * error + 1e-6).all()


def test_qsgd_elements_that_are_a_level_are_exact():
    array = np.float32([4, -2, 0, 1])
    np.testing.assert_array_equal(through(QSGD(levels=4), array), array)


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (2, 3), (3, 3), (7, 4), (8, 5), (127, 8)])
def test_qsgd_bits(levels, bits):
    assert QSGD(levels).bits == bits
    assert QSGD(levels, bucket=None).nbytes((100,), np.float32) == 4 + -(-100 * bits // 8)
    if levels == 2 ** (bits - 1) - 1:
        assert QSGD(bits=bits).levels == levels


# -- TernGrad ----------------------------------------------------------------------------------


def test_terngrad_has_three_values_and_the_right_signs():
    array = normal(1000)
    got = through(TernGrad(), array)
    limit = np.float32(2.5 * np.sqrt(np.mean(array.astype(np.float64) ** 2)))
    assert set(np.abs(got)) == {0, limit}  # the largest of 1000 is beyond 2.5 sigma
    assert (got * array >= 0).all()
    assert (np.abs(got)[np.abs(array) >= limit] == limit).all()


def test_terngrad_without_clipping_takes_the_largest():
    array = np.float32([1, -4, 2, 0])
    got = through(TernGrad(clip=None), array)
    assert set(np.abs(got)) <= {0, 4}
    assert got[1] == -4
    assert got[3] == 0


def test_terngrad_is_unbiased():
    array = normal(30)
    mean, error = mean_of(lambda s: TernGrad(clip=None, seed=s), array, 2000)
    assert (np.abs(mean - array) <= 5 * error + 1e-6).all()
    limit = np.sqrt(np.mean(array**2))
    mean, error = mean_of(lambda s: TernGrad(clip=1, seed=s), array, 2000)
    assert (np.abs(mean - np.clip(array, -limit, limit)) <= 5 * error + 1e-6).all()


def test_terngrad_does_not_clip_equal_elements_away():
    np.testing.assert_array_equal(through(TernGrad(), np.full(3, 5.0)), np.full(3, 5.0))
    assert through(TernGrad(), np.float32([-2])) == [-2]


def test_terngrad_takes_two_bits():
    assert TernGrad().nbytes((10,), np.float32) == 4 + 3


# -- signs -------------------------------------------------------------------------------------


def test_efsign_by_hand():
    scale, bits = EFSign().encode(np.float32([[1, -2], [3, 0]]))
    assert scale == 1.5
    assert bits.tolist() == [0b1101]
    np.testing.assert_array_equal(
        through(EFSign(), np.float32([[1, -2], [3, 0]])), [[1.5, -1.5], [1.5, 1.5]]
    )


@pytest.mark.parametrize("members", [1, 2, 3, 4, 300])
def test_the_majority_wins(members):
    array = normal((members, 50))
    codec = SignMajority()
    payloads = [(codec.encode(row),) for row in array]
    total = np.full(50, np.nan, np.float32)
    codec.combine(payloads, total, members)
    vote = np.sign(np.where(array >= 0, 1, -1).sum(axis=0))
    np.testing.assert_array_equal(total, members * vote)
    if members == 2:
        assert 0 in vote


def test_signs_take_one_bit():
    assert SignMajority().nbytes((10, 10), np.float32) == 13
    assert EFSign().nbytes((10, 10), np.float64) == 8 + 13


# -- OneBit ------------------------------------------------------------------------------------


def test_onebit_by_hand():
    array = np.float32([[1, -2], [3, -4], [-5, 0]])
    means, bits = OneBit().encode(array)
    np.testing.assert_array_equal(means, [[-5, -3], [2, 0]])
    assert bits.tolist() == [0b100101]
    np.testing.assert_array_equal(through(OneBit(), array), [[2, -3], [2, -3], [-5, 0]])


def test_onebit_keeps_the_sum_of_each_column():
    for shape in [(40, 6), (40, 2, 3), (17,)]:
        array = normal(shape)
        got = through(OneBit(), array)
        np.testing.assert_allclose(got.sum(axis=0), array.sum(axis=0), atol=1e-4)
        columns = array.reshape(shape[0], -1), got.reshape(shape[0], -1)
        for column, sent in zip(columns[0].T, columns[1].T, strict=True):
            assert len(set(sent)) <= 2
            assert ((column >= 0) == (sent >= 0)).all()
            np.testing.assert_allclose(sent[column >= 0], column[column >= 0].mean(), rtol=1e-5)


def test_onebit_counts_two_values_for_each_column():
    assert OneBit().nbytes((40, 6), np.float32) == 2 * 6 * 4 + 30
    assert OneBit().nbytes((40,), np.float32) == 2 * 4 + 5


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TopK, RandomK])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "got neither"),
        ({"ratio": 0.1, "k": 3}, "got both"),
        ({"ratio": 0}, r"ratio: expected a number in \(0, 1\]"),
        ({"ratio": 1.5}, "ratio"),
        ({"k": 0}, "k: expected a whole number from 1"),
        ({"k": 2.5}, "k"),
        ({"k": True}, "k"),
    ],
)
def test_what_is_to_be_sent_is_said_once(kind, arguments, said):
    with pytest.raises(UsageError, match=said):
        kind(**arguments)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: QSGD(3, bits=4), "got both"),
        (lambda: QSGD(bits=1), "bits: expected a whole number from 2 to 8, got 1"),
        (lambda: QSGD(128), "levels: expected a whole number from 1 to 127"),
        (lambda: QSGD(bucket=0), "bucket"),
        (lambda: QSGD(norm="l1"), "norm: expected 'l2' or 'max'"),
        (lambda: QSGD(seed=1.5), "QSGD: seed"),
        (lambda: TernGrad(clip=0), "clip"),
        (lambda: TernGrad(seed="a"), "TernGrad: seed"),
        (lambda: RandomK(k=1, seed=None), "RandomK: seed"),
    ],
)
def test_arguments_out_of_range_are_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()


def test_codecs_show_their_settings():
    assert repr(TopK(0.01)) == "TopK(ratio=0.01)"
    assert repr(TopK(k=3)) == "TopK(k=3)"
    assert repr(QSGD(bits=4)) == "QSGD(levels=7, bucket=512, norm='max', seed=0)"
    assert repr(TernGrad(clip=None)) == "TernGrad(clip=None, seed=0)"
    assert repr(EFSign()) == "EFSign()"
