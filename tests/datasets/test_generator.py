import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.datasets import rcv1_like, sparse_svm
from mpiml.datasets.generator import _draw, _first_ones
from mpiml.errors import UsageError
from tests.datasets.joined import joined


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 40),
    st.integers(1, 60),
    st.data(),
    st.floats(0, 10),
    st.floats(0, 0.5),
    st.sampled_from(["float32", "float64"]),
)
def test_what_holds_for_every_problem(rows, features, data, skew, noise, dtype):
    nonzeros = data.draw(st.integers(1, features))
    csr, w, flipped = sparse_svm(rows, features, nonzeros, skew, noise, 3, dtype)
    assert csr.shape == (rows, features)
    assert csr.values.dtype == csr.labels.dtype == np.dtype(dtype)
    assert (np.diff(csr.indptr) == nonzeros).all()
    columns = csr.indices.reshape(rows, nonzeros)
    assert (np.diff(columns, axis=1) > 0).all()  # ascending, so none twice
    if rows:
        assert columns.min() >= 0
        assert columns.max() < features
    lengths = np.linalg.norm(csr.values.reshape(rows, nonzeros).astype(float), axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    assert set(csr.labels) <= {-1, 1}
    right = np.where(flipped, -csr.labels, csr.labels)
    assert (right * csr.dot(w) >= 0).all()


def test_the_rows_are_the_same_for_every_number_of_ranks():
    whole = sparse_svm(2500, 300, 5)  # three blocks, the last not full
    assert len(np.unique(whole.data.values)) > 5000  # blocks are not alike
    for size in range(1, 6):
        parts = [sparse_svm(2500, 300, 5, rank=rank, size=size) for rank in range(size)]
        lengths = [len(p.data) for p in parts]
        assert max(lengths) - min(lengths) <= 1
        again = joined([p.data for p in parts])
        for name in ("indptr", "indices", "values", "labels"):
            np.testing.assert_array_equal(getattr(again, name), getattr(whole.data, name))
        np.testing.assert_array_equal(np.concatenate([p.flipped for p in parts]), whole.flipped)
        for part in parts:
            np.testing.assert_array_equal(part.w, whole.w)


def test_a_longer_problem_begins_with_the_same_rows():
    short, long = sparse_svm(1500, 300, 5).data, sparse_svm(2100, 300, 5).data.rows(0, 1500)
    np.testing.assert_array_equal(short.indices, long.indices)
    np.testing.assert_array_equal(short.labels, long.labels)


def test_the_seed_decides():
    one, two = sparse_svm(50, 300, 5, seed=1), sparse_svm(50, 300, 5, seed=2)
    assert not np.array_equal(one.data.indices, two.data.indices)
    assert not np.array_equal(one.w, two.w)


def test_noise_is_the_part_of_turned_labels():
    assert not sparse_svm(3000, 50, 5, noise=0).flipped.any()
    assert abs(sparse_svm(20_000, 50, 5, noise=0.2).flipped.mean() - 0.2) < 0.02


def test_columns_follow_zipf_in_a_random_place():
    # one column a row: its frequency is k^-s / sum exactly, about 6 standard deviations are let
    count, features = 40_000, 20
    csr = sparse_svm(count, features, 1, skew=1.2).data
    expected = np.arange(1, features + 1) ** -1.2
    expected *= count / expected.sum()
    degrees = csr.degrees()
    assert not np.array_equal(np.sort(degrees)[::-1], degrees)
    np.testing.assert_allclose(np.sort(degrees)[::-1], expected, rtol=0, atol=600)
    flat = sparse_svm(count, features, 1, skew=0).data.degrees()
    np.testing.assert_allclose(flat, count / features, rtol=0, atol=300)


@pytest.mark.parametrize("k", [2, 3])
def test_columns_are_drawn_one_after_the_other_without_repetition(k):
    """Both ways to draw give column pairs (a, b) the probability p_a p_b / (1 - p_a) + ..."""
    rows = 40_000
    weights = np.array([4.0, 2, 1, 1, 1, 1, 1, 1])  # k = 2: by sequences; 3: by times
    chosen = np.sort(_draw(np.random.default_rng(0), weights, rows, k), axis=1)
    p = weights / weights.sum()

    def both(a, b):  # that 0 and 1 are the first two
        return p[a] * p[b] / (1 - p[a])

    expected = both(0, 1) + both(1, 0)
    if k == 3:
        for c in range(2, 8):
            for x, y, z in ((0, 1, c), (0, c, 1), (c, 0, 1), (1, 0, c), (1, c, 0), (c, 1, 0)):
                both_then = p[x] * p[y] / (1 - p[x]) * p[z] / (1 - p[x] - p[y])
                if z != c:
                    expected += both_then
    found = ((chosen == 0).any(axis=1) & (chosen == 1).any(axis=1)).mean()
    assert abs(found - expected) < 0.015


def test_the_first_of_its_kind_in_a_row():
    drawn = np.random.default_rng(0).integers(0, 30, (4, 200))
    expected = [[row[i] not in row[:i] for i in range(200)] for row in drawn]
    np.testing.assert_array_equal(_first_ones(drawn), expected)


def test_very_skewed_columns_end():
    csr = sparse_svm(5, 1000, 60, skew=10).data  # sequences alone would hardly ever do
    assert (np.diff(csr.indices.reshape(5, 60), axis=1) > 0).all()


def test_rcv1s_shape():
    csr, w, _ = rcv1_like(64, rank=1, size=2)
    assert csr.shape == (32, 47_236)
    assert w.shape == (47_236,)
    assert csr.nonzeros == 32 * 75


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rows": -1}, "rows: expected a whole number >= 0, got -1"),
        ({"rows": 1.5}, r"rows: expected a whole number >= 0, got 1\.5"),
        ({"rows": "3"}, "rows: expected a whole number >= 0, got '3'"),
        ({"features": 0}, "features: expected a whole number from 1 to 2147483647, got 0"),
        ({"nonzeros": 11}, "nonzeros: expected a whole number from 1 to 10, got 11"),
        ({"nonzeros": 0}, "nonzeros: expected a whole number from 1 to 10, got 0"),
        ({"skew": -1}, "skew: expected a number from 0 to 10, got -1"),
        ({"skew": float("nan")}, "skew: expected a number from 0 to 10, got nan"),
        ({"skew": None}, "skew: expected a number from 0 to 10, got None"),
        ({"noise": 0.6}, r"noise: expected a number from 0 to 0\.5, got 0\.6"),
        ({"seed": -1}, "seed: expected a whole number >= 0, got -1"),
        ({"rank": 1}, "rank: expected a whole number from 0 to 0, got 1"),
        ({"size": 0}, "size: expected a whole number >= 1, got 0"),
        ({"dtype": "int8"}, "dtype: expected float32 or float64, got 'int8'"),
        ({"dtype": "what"}, "dtype: expected float32 or float64, got 'what'"),
    ],
)
def test_arguments_that_are_wrong(given, match):
    with pytest.raises(UsageError, match=f"^sparse_svm: {match}"):
        sparse_svm(**{"rows": 3, "features": 10, "nonzeros": 2} | given)
