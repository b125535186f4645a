"""Labelled sparse rows in compressed form: plain arrays, as native kernels take them."""

from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.errors import UsageError
from mpiml.whole import whole_number

__all__ = ["CSR", "float_dtype", "shard_of"]

MOST_FEATURES: Final = 2**31 - 1  # what int32 indices can count


@dataclass(frozen=True, slots=True, eq=False)
class CSR:
    """Hold the nonzeros of a sparse matrix row by row, with a label for each row.

    Local: no MPI. The arrays are not copied; shapes and dtypes are checked, each index is not.

    Parameters
    ----------
    indptr : ndarray of int64, shape (rows + 1,)
        Row i owns the nonzeros ``indptr[i]:indptr[i + 1]``; begins with 0.
    indices : ndarray of int32, shape (nonzeros,)
        Columns from 0 on, ascending within a row, none twice.
    values : ndarray of float32 or float64, shape (nonzeros,)
    labels : ndarray of float32 or float64, shape (rows,)
        Of the dtype of `values`.
    shape : tuple of int
        Rows and features.
    qid : ndarray of int64, shape (rows,), optional
        The query that each row belongs to, in data for ranking; -1 where a row names none.

    Raises
    ------
    UsageError
        The arrays do not fit each other.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[Any]
    labels: NDArray[Any]
    shape: tuple[int, int]
    qid: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        rows, features = self.shape
        if not (rows >= 0 and 0 <= features <= MOST_FEATURES):
            raise UsageError(
                f"CSR: shape: expected rows >= 0 and features from 0 to {MOST_FEATURES}, "
                f"got {self.shape}"
            )
        if self.values.dtype not in (np.float32, np.float64):
            raise UsageError(
                f"CSR: values: expected float32 or float64, got {self.values.dtype}. "
                "Convert them with astype()."
            )
        self._expect("indptr", self.indptr, np.dtype(np.int64), rows + 1)
        if self.indptr[0] != 0:
            raise UsageError(
                f"CSR: indptr: expected 0 as its first element, got {self.indptr[0]}. "
                "Take a part of the rows with rows(start, stop)."
            )
        nonzeros = int(self.indptr[-1])
        self._expect("indices", self.indices, np.dtype(np.int32), nonzeros)
        self._expect("values", self.values, self.values.dtype, nonzeros)
        self._expect("labels", self.labels, self.values.dtype, rows)
        if self.qid is not None:
            self._expect("qid", self.qid, np.dtype(np.int64), rows)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nonzeros(self) -> int:
        """Number of elements stored, zeros that a file spells out among them."""
        return self.indices.size

    def rows(self, start: int, stop: int) -> "CSR":
        """Return some rows as a view: only `indptr` is new.

        Parameters
        ----------
        start, stop : int
            ``0 <= start <= stop <= rows``.
        """
        start = whole_number("CSR.rows: start", start, 0, self.shape[0])
        stop = whole_number("CSR.rows: stop", stop, start, self.shape[0])
        begin, end = self.indptr[start], self.indptr[stop]
        return CSR(
            self.indptr[start : stop + 1] - begin,
            self.indices[begin:end],
            self.values[begin:end],
            self.labels[start:stop],
            (stop - start, self.shape[1]),
            None if self.qid is None else self.qid[start:stop],
        )

    def dot(self, w: NDArray[Any]) -> NDArray[Any]:
        """Return each row's inner product with a dense vector.

        Parameters
        ----------
        w : ndarray of float, shape (features,)

        Returns
        -------
        ndarray, shape (rows,)
            In the wider of the dtypes of `values` and `w`.
        """
        if w.shape != (self.shape[1],):
            raise UsageError(f"CSR.dot: w: expected shape ({self.shape[1]},), got {w.shape}")
        products = self.values * w[self.indices]  # (nonzeros,)
        out = np.zeros(self.shape[0], products.dtype)
        filled = self.indptr[1:] > self.indptr[:-1]  # reduceat knows no empty part
        if products.size:
            out[filled] = np.add.reduceat(products, self.indptr[:-1][filled])
        return out

    def degrees(self) -> NDArray[np.int64]:
        """Return in how many rows each column occurs, shape (features,)."""
        return np.bincount(self.indices, minlength=self.shape[1]).astype(np.int64, copy=False)

    def with_features(self, features: int) -> "CSR":
        """Return the same rows with another number of features, without a copy.

        For shards that were read without ``features=``: agree on the largest of their
        ``shape[1]`` and give it to each.
        """
        used = int(self.indices.max()) + 1 if self.nonzeros else 0
        where = "CSR.with_features: features"
        if (features := whole_number(where, features, 0)) < used:
            raise UsageError(
                f"{where}: expected at least {used}, as column {used - 1} occurs, got {features}"
            )
        return replace(self, shape=(self.shape[0], features))

    def to_scipy(self) -> Any:
        """Return a scipy.sparse.csr_array on the same memory; labels stay behind.

        Raises
        ------
        UsageError
            SciPy is not installed.
        """
        try:
            sparse = import_module("scipy.sparse")
        except ImportError:
            raise UsageError(
                "CSR.to_scipy: SciPy is not installed: `pip install scipy`, or use the arrays "
                "indptr, indices and values as they are."
            ) from None
        return sparse.csr_array((self.values, self.indices, self.indptr), shape=self.shape)

    def _expect(self, name: str, array: NDArray[Any], dtype: np.dtype[Any], size: int) -> None:
        if array.dtype != dtype or array.shape != (size,):
            raise UsageError(
                f"CSR: {name}: expected {dtype} of shape ({size},), "
                f"got {array.dtype} of shape {array.shape}"
            )


def shard_of(where: str, rank: Any, size: Any) -> tuple[int, int]:
    """Return which shard of how many a caller asks for.

    Raises
    ------
    UsageError
        They are no whole numbers, ``0 <= rank < size``; begins with `where`.
    """
    size = whole_number(f"{where}: size", size, 1)
    return whole_number(f"{where}: rank", rank, 0, size - 1), size


def float_dtype(where: str, dtype: Any) -> np.dtype[Any]:
    """Return the dtype of values and labels that a caller asks for.

    Raises
    ------
    UsageError
        It is neither float32 nor float64; begins with `where`.
    """
    for kind in (np.dtype(np.float32), np.dtype(np.float64)):
        with suppress(TypeError):  # of what is no dtype at all
            if dtype is not None and np.dtype(dtype) == kind:
                return kind
    raise UsageError(f"{where}: dtype: expected float32 or float64, got {dtype!r}")
