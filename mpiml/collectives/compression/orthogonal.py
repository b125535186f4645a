"""Orthonormal columns and low-rank products, to the last bit the same on every processor.

Members compute these from a sum they all have, and their models must not drift apart. A
matrix product of BLAS, and a sum of NumPy, add in an order that depends on the processor. Here
numbers are only multiplied and added element by element, in an order that is written down.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["add_product", "dots", "orthonormal"]

_BLOCK: Final = 1 << 15  # elements of a product that are added up while they are in the cache


def dots(rows: NDArray[np.float64], vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the product of each row with `vector`, added in the order of a binary tree.

    Parameters
    ----------
    rows : ndarray of float64, shape (r, n)
    vector : ndarray of float64, shape (n,)

    Returns
    -------
    ndarray of float64, shape (r,)
    """
    count = rows.shape[1]
    width = 1 << max(0, count - 1).bit_length()
    terms = np.zeros((rows.shape[0], width))
    np.multiply(rows, vector, out=terms[:, :count])
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]  # (r, 2w) -> (r, w)
    return terms[:, 0]


def orthonormal(columns: NDArray[Any]) -> NDArray[Any]:
    """Return orthonormal columns that span the same space, by Gram-Schmidt, twice over.

    Parameters
    ----------
    columns : ndarray of float32 or float64, shape (n, r)

    Returns
    -------
    ndarray of the same dtype and shape
        A column that depends on those before it, up to rounding, is zero.
    """
    dtype = columns.dtype
    rows = np.ascontiguousarray(columns.T, np.float64)  # (n, r) -> (r, n)
    least = 1e-5 if dtype == np.float32 else 1e-13  # of the length that may be noise
    for number, row in enumerate(rows):
        row /= max(float(np.abs(row).max(initial=0)), np.finfo(np.float64).tiny)
        before = float(dots(row[None], row)[0]) ** 0.5
        earlier = rows[:number]
        for _ in range(2):
            for factor, other in zip(dots(earlier, row), earlier, strict=True):
                row -= factor * other
        length = float(dots(row[None], row)[0]) ** 0.5
        if length > least * before:
            row /= length
        else:
            row[:] = 0
    return np.ascontiguousarray(rows.T.astype(dtype))  # (r, n) -> (n, r)


def add_product(
    left: NDArray[Any], right: NDArray[Any], scale: float, out: NDArray[Any]
) -> NDArray[Any]:
    """Add ``scale * left @ right.T`` to `out`, in place.

    Parameters
    ----------
    left : ndarray, shape (n, r)
    right : ndarray, shape (m, r)
    scale : float
    out : ndarray, shape (n, m)
    """
    rows, ranks = left.shape
    columns = right.shape[0]
    height = max(1, _BLOCK // max(1, columns))
    scaled = np.ascontiguousarray(right.T) * np.asarray(scale, right.dtype)  # (m, r) -> (r, m)
    term = np.empty((min(height, rows), columns), out.dtype)
    for start in range(0, rows, height):
        block = out[start : start + height]
        part = term[: block.shape[0]]
        for rank in range(ranks):
            np.multiply(left[start : start + height, rank, None], scaled[rank], out=part)
            block += part
    return out
