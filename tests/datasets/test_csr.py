import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.datasets import CSR
from mpiml.errors import UsageError
from tests.datasets.joined import joined


def made(dense, labels=None, dtype=np.float64):
    """Return the CSR of a dense matrix."""
    dense = np.asarray(dense, dtype)
    row, column = np.nonzero(dense)
    indptr = np.searchsorted(row, np.arange(len(dense) + 1)).astype(np.int64)
    labels = np.zeros(len(dense), dtype) if labels is None else np.asarray(labels, dtype)
    return CSR(indptr, column.astype(np.int32), dense[row, column], labels, dense.shape)


DENSE = [[0, 0, 0, 0], [0, 2, 0, 3], [0, 0, 0, 0], [5, 0, 0, 1], [0, 0, 0, 0]]


def test_dot_by_hand_with_empty_rows_at_both_ends():
    np.testing.assert_array_equal(
        made(DENSE).dot(np.array([1.0, 10, 100, 1000])), [0, 3020, 0, 1005, 0]
    )


def test_degrees_by_hand():
    degrees = made(DENSE).degrees()
    np.testing.assert_array_equal(degrees, [1, 1, 0, 2])
    assert degrees.dtype == np.int64


def test_rows_is_a_view():
    csr = made(DENSE, [1, 2, 3, 4, 5])
    part = csr.rows(1, 4)
    assert (part.shape, len(part), part.nonzeros) == ((3, 4), 3, 4)
    np.testing.assert_array_equal(part.indptr, [0, 2, 2, 4])
    np.testing.assert_array_equal(part.labels, [2, 3, 4])
    part.values[0] = 7
    assert csr.values[0] == 7
    assert csr.rows(2, 2).shape == (0, 4)


def test_dot_takes_the_wider_dtype():
    csr = made(DENSE, dtype=np.float32)
    assert csr.dot(np.ones(4, np.float32)).dtype == np.float32
    assert csr.dot(np.ones(4)).dtype == np.float64


@given(
    st.integers(0, 5).flatmap(
        lambda columns: st.lists(
            st.lists(st.sampled_from([0, 0, 1, -2, 3]), min_size=columns, max_size=columns),
            min_size=1,
            max_size=6,
        )
    ),
    st.data(),
)
def test_dot_and_degrees_are_those_of_the_dense_matrix(dense, data):
    dense = np.array(dense, float).reshape(len(dense), -1)
    csr = made(dense)
    w = np.arange(1.0, dense.shape[1] + 1)
    np.testing.assert_array_equal(csr.dot(w), dense @ w)
    np.testing.assert_array_equal(csr.degrees(), (dense != 0).sum(axis=0))
    start = data.draw(st.integers(0, len(dense)))
    stop = data.draw(st.integers(start, len(dense)))
    np.testing.assert_array_equal(csr.rows(start, stop).dot(w), dense[start:stop] @ w)


def test_parts_that_rows_took_make_the_whole():
    csr = made(DENSE, [1, 2, 3, 4, 5])
    again = joined([csr.rows(0, 2), csr.rows(2, 2), csr.rows(2, 5)])
    for name in ("indptr", "indices", "values", "labels"):
        np.testing.assert_array_equal(getattr(again, name), getattr(csr, name))
    assert again.shape == csr.shape


def test_with_features_widens_and_does_not_cut():
    csr = made(DENSE)
    wide = csr.with_features(9)
    assert wide.shape == (5, 9)
    assert wide.values is csr.values
    with pytest.raises(UsageError, match="at least 4, as column 3 occurs, got 3"):
        csr.with_features(3)


def test_to_scipy():
    pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    np.testing.assert_array_equal(made(DENSE).to_scipy().toarray(), DENSE)


def test_to_scipy_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(UsageError, match="pip install scipy"):
        made(DENSE).to_scipy()


GOOD = {
    "indptr": np.array([0, 1], np.int64),
    "indices": np.array([0], np.int32),
    "values": np.array([1.0], np.float32),
    "labels": np.array([1.0], np.float32),
    "shape": (1, 1),
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"indptr": np.array([0, 1], np.int32)}, r"indptr: expected int64 of shape \(2,\)"),
        ({"indptr": np.array([1, 1], np.int64)}, "expected 0 as its first element, got 1"),
        ({"indices": np.array([0], np.int64)}, "indices: expected int32"),
        ({"indices": np.array([0, 0], np.int32)}, r"indices: .* got int32 of shape \(2,\)"),
        ({"values": np.array([1])}, "values: expected float32 or float64, got int64"),
        ({"labels": np.array([1.0])}, "labels: expected float32"),
        ({"shape": (1, -1)}, "shape: expected rows >= 0"),
        ({"qid": np.array([0.0])}, "qid: expected int64"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, match):
    CSR(**GOOD)
    with pytest.raises(UsageError, match=match):
        CSR(**GOOD | change)


def test_calls_that_do_not_fit_are_refused():
    csr = CSR(**GOOD)
    with pytest.raises(UsageError, match=r"stop: expected a whole number from 0 to 1, got 2"):
        csr.rows(0, 2)
    with pytest.raises(UsageError, match=r"stop: expected a whole number from 1 to 1, got 0"):
        csr.rows(1, 0)
    with pytest.raises(UsageError, match=r"start: .* from 0 to 1, got 0\.5"):
        csr.rows(0.5, 1)
    with pytest.raises(UsageError, match=r"features: expected a whole number >= 0, got 1\.5"):
        csr.with_features(1.5)
    with pytest.raises(UsageError, match=r"w: expected shape \(1,\), got \(2,\)"):
        csr.dot(np.ones(2))
