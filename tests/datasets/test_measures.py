import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.datasets import CSR, sparsity
from mpiml.errors import UsageError


def rows(*columns, features=8):
    indptr = np.cumsum([0, *map(len, columns)]).astype(np.int64)
    indices = np.array([c for row in columns for c in row], np.int32)
    ones = np.ones(indices.size, np.float32)
    return CSR(
        indptr, indices, ones, np.ones(len(columns), np.float32), (len(columns), features)
    )


def test_by_hand():
    # row 1 meets rows 0, 1, 2; column 1 is in two of five rows; the last row is empty
    found = sparsity(rows([0, 1], [1, 2, 3], [3], [7], []))
    assert found == (3, 2 / 5, 3 / 5, True)


def test_rows_that_share_nothing_and_rows_that_share_all():
    assert sparsity(rows([0], [1], [2], [3])) == (1, 1 / 4, 1 / 4, True)
    assert sparsity(rows([0, 1], [0, 2], [0, 3])) == (2, 1, 1, True)


def test_nothing():
    assert sparsity(rows()) == (0, 0, 0, True)
    assert sparsity(rows([], [])) == (0, 0, 0, True)
    assert sparsity(rows([], features=0)) == (0, 0, 0, True)


def test_few_comparisons_give_a_lower_bound():
    # sums of degrees: 8 of the last row, which meets 5, then 6 of the first: that could be more
    csr = rows([0, 1], [0, 1], [0, 1], [2], [3], [4], [5], [2, 3, 4, 5])
    assert sparsity(csr, most=None) == (4, 3 / 8, 5 / 8, True)
    assert sparsity(csr, most=1)[2:] == (5 / 8, False)
    csr = rows([0, 1], [0, 1], [0, 1], [2, 3], [2], [3], [7], [7, 6])
    assert sparsity(csr, most=1)[2:] == (3 / 8, False)
    assert sparsity(csr)[2:] == (3 / 8, True)
    with pytest.raises(
        UsageError, match="most, if not None: expected a whole number >= 1, got 0"
    ):
        sparsity(csr, most=0)


@given(
    st.lists(st.lists(st.integers(0, 9), unique=True, max_size=4).map(sorted), max_size=9),
    st.none() | st.integers(1, 9),
)
def test_as_defined(edges, most):
    found = sparsity(rows(*edges, features=10), most)
    n = len(edges)
    if n == 0:
        assert found == (0, 0, 0, True)
        return
    assert found.omega == max(map(len, edges))
    assert found.delta == max(sum(v in e for e in edges) for v in range(10)) / n
    rho = max(sum(bool(set(a) & set(b)) for b in edges) for a in edges) / n
    assert found.rho == rho if found.exact else found.rho <= rho
    assert found.exact or most is not None
