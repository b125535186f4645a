"""Linear algebra that is the same everywhere: right first, then in a written order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.collectives.compression.orthogonal import add_product, dots, orthonormal


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "r"), [(1, 1), (7, 3), (300, 4), (1025, 2)])
def test_columns_are_orthonormal_and_span_the_same(n, r, dtype):
    columns = np.random.default_rng(0).standard_normal((n, r)).astype(dtype)
    got = orthonormal(columns)
    assert (got.shape, got.dtype) == (columns.shape, columns.dtype)
    limit = 1e-6 if dtype == np.float32 else 1e-14
    np.testing.assert_allclose(got.T @ got, np.eye(r), atol=limit)
    np.testing.assert_allclose(got @ (got.T @ columns), columns, atol=10 * limit)


def test_nearly_parallel_columns_are_still_orthogonal():
    rng = np.random.default_rng(0)
    base = rng.standard_normal((200, 1))
    columns = base + 1e-9 * rng.standard_normal((200, 3))
    got = orthonormal(columns)
    np.testing.assert_allclose(got.T @ got, np.eye(3), atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dependent_columns_become_zero(dtype):
    one, two = np.random.default_rng(0).standard_normal((2, 50)).astype(dtype)
    got = orthonormal(np.stack([one, 3 * one, two, one - two, 0 * one], axis=1))
    lengths = np.linalg.norm(got, axis=0)
    np.testing.assert_allclose(lengths, [1, 0, 1, 0, 0], atol=1e-6)


@pytest.mark.parametrize("size", [1e-35, 1e35])
def test_the_size_of_columns_does_not_matter(size):
    columns = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    got = orthonormal((columns * size).astype(np.float32))
    np.testing.assert_allclose(got, orthonormal(columns), atol=1e-5)


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_dots_are_products_added_as_a_binary_tree(r, n, seed):
    rng = np.random.default_rng(seed)
    rows, vector = rng.standard_normal((r, n)), rng.standard_normal(n)

    def tree(terms):
        if len(terms) == 1:
            return terms[0]
        half = len(terms) // 2
        return tree([a + b for a, b in zip(terms[:half], terms[half:], strict=True)])

    width = 1 << max(0, n - 1).bit_length()
    expected = [tree([*(row * vector), *[0.0] * (width - n)]) for row in rows]
    assert dots(rows, vector).tolist() == expected


@pytest.mark.parametrize(
    ("n", "m", "r"), [(3, 4, 1), (1000, 333, 3), (2, 70_000, 2), (0, 4, 1)]
)
def test_add_product_adds_column_by_column(n, m, r):
    rng = np.random.default_rng(0)
    left, right, start = (rng.standard_normal(s) for s in ((n, r), (m, r), (n, m)))
    expected = start.copy()
    for k in range(r):
        expected += np.multiply.outer(left[:, k], right[:, k] * -0.5)
    out = start.copy()
    assert add_product(left, right, -0.5, out) is out
    np.testing.assert_array_equal(out, expected)
