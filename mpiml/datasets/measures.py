"""How sparse a problem is, in the measures of Hogwild!."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiml.datasets.csr import CSR
from mpiml.whole import whole_number

__all__ = ["Sparsity", "sparsity"]


class Sparsity(NamedTuple):
    """Omega, Delta and rho of the hypergraph whose edges are the rows and nodes the columns."""

    omega: int
    """Most nonzeros in a row."""
    delta: float
    """Largest part of the rows that a column occurs in."""
    rho: float
    """Largest part of the rows that share a column with one row, that row among them."""
    exact: bool
    """Whether `rho` is the largest; else it is a lower bound."""


def sparsity(csr: CSR, most: int | None = 1000) -> Sparsity:
    """Return Hogwild!'s measures of sparsity: near-linear speed-up asks for small delta and rho.

    Local: no MPI; of a shard these are the shard's measures.

    Parameters
    ----------
    csr : CSR
    most : int, optional
        How many rows are compared with all others at most, for `rho`; None for as many as it
        takes to be exact. A row shares columns with no more rows than the sum of its columns'
        degrees: rows are compared by falling sum, and `rho` is exact once no row that is left
        can exceed it. A comparison costs that sum.

    Returns
    -------
    Sparsity
        Zeros of no rows.

    Raises
    ------
    UsageError
        `most` is below 1.

    References
    ----------
    F. Niu, B. Recht, C. Re, S. J. Wright, "Hogwild!: A Lock-Free Approach to Parallelizing
    Stochastic Gradient Descent", NIPS 2011, section 2.
    """
    if most is not None:
        most = whole_number("sparsity: most, if not None", most, 1)
    rows = len(csr)
    if rows == 0:
        return Sparsity(0, 0.0, 0.0, True)
    lengths = np.diff(csr.indptr)
    degrees = csr.degrees()
    delta = int(degrees.max()) / rows if degrees.size else 0.0
    rho, exact = _rho(csr, lengths, degrees, rows if most is None else most)
    return Sparsity(int(lengths.max()), delta, rho / rows, exact)


def _rho(
    csr: CSR, lengths: NDArray[np.int64], degrees: NDArray[np.int64], most: int
) -> tuple[int, bool]:
    """Return the most rows that one row meets, and whether that is sure."""
    rows = len(csr)
    bounds = np.zeros(rows, np.int64)
    filled = lengths > 0
    if csr.nonzeros:
        bounds[filled] = np.add.reduceat(degrees[csr.indices], csr.indptr[:-1][filled])
    np.minimum(bounds, rows, out=bounds)
    row_of = np.repeat(np.arange(rows), lengths)  # (nonzeros,)
    by_column = row_of[np.argsort(csr.indices, kind="stable")]
    ends = np.concatenate(([0], np.cumsum(degrees)))
    best = 0
    order = np.argsort(-bounds, kind="stable")
    for done, row in enumerate(order):
        if bounds[row] <= best:
            return best, True
        if done == most:
            return best, False
        met = np.zeros(rows, bool)
        for column in csr.indices[csr.indptr[row] : csr.indptr[row + 1]]:
            met[by_column[ends[column] : ends[column + 1]]] = True
        best = max(best, int(np.count_nonzero(met)))
    return best, True
