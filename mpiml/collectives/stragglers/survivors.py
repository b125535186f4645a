"""The numbers of a cyclic gradient code: its matrix, and what undoes it for who is left."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Solved", "best_matrix", "solve"]

_DRAWS: Final = 16  # matrices of which the best is taken
_ELEMENTS: Final = 140_000  # n * n times sets tried on each: all sets up to n = 12
_LEAST: Final = 64  # sets, at least
_ROUNDOFF: Final = 2.0**-53


class Solved(NamedTuple):
    """The combination of some rows of B that is the vector of ones, and how good it is."""

    coefficients: NDArray[np.float64]  #: shape (rows,)
    condition: float  #: of the rows: largest singular value over the (n - s)-th
    growth: float  #: max over j of sum_i abs(a_i B_ij): how much rounding errors grow
    residual: float  #: max over j of abs(1 - sum_i a_i B_ij)

    def error(self, s: int, roundoff: float) -> float:
        """Bound the error of the sum, as a part of the sum of the gradients' magnitudes.

        A message is a sum of s + 1 products, the result one of all messages; both are computed
        in float64 and rounded to what the arrays are of (N. J. Higham, "Accuracy and Stability
        of Numerical Algorithms", 2002, section 3.1). The residual is computed likewise.
        """
        terms = 2 * len(self.coefficients) + s + 8
        return self.residual + self.growth * (roundoff + terms * _ROUNDOFF) + 2 * roundoff


def best_matrix(n: int, s: int, seed: int) -> tuple[NDArray[np.float64], Solved]:
    """Draw B several times and keep the one whose rounding errors grow least.

    Returns
    -------
    matrix : ndarray of float64, shape (n, n)
        Row i is zero but at i to i + s, around the end, and 1 or -1 in its largest element.
    worst : Solved
        Of the sets of n - s rows that were tried, that in which errors grow most, with the
        largest condition number of all sets.
    """
    random = np.random.RandomState(seed)  # NumPy never changes the stream of this class
    sets = _sets(n, s, random)
    best: tuple[NDArray[np.float64], Solved] | None = None
    for _ in range(_DRAWS if 0 < s < n - 1 else 1):
        matrix = _draw(n, s, random)
        coefficients, conditions, growths, residuals = _solve_all(matrix[sets], n - s)
        k = int(np.argmax(growths))
        worst = Solved(
            coefficients[k], float(conditions.max()), float(growths[k]), float(residuals.max())
        )
        if best is None or worst.growth < best[1].growth:
            best = matrix, worst
    assert best is not None
    return best


def solve(rows: NDArray[np.float64], rank: int) -> Solved:
    """Find the shortest combination of rows that is the vector of ones.

    Parameters
    ----------
    rows : ndarray of float64, shape (workers, n)
        Those of B that are there; `rank` or more.
    rank : int
        Of any so many rows: n - s.
    """
    coefficients, conditions, growths, residuals = _solve_all(rows[np.newaxis], rank)
    return Solved(coefficients[0], float(conditions[0]), float(growths[0]), float(residuals[0]))


def _draw(n: int, s: int, random: np.random.RandomState) -> NDArray[np.float64]:
    if s == n - 1:  # then H B[i] = 0 has one solution for all H
        return np.ones((n, n))
    parity = random.standard_normal((s, n))
    parity[:, -1] = -parity[:, :-1].sum(axis=1)  # rows sum to zero: ones are in the null space
    support = (np.arange(n)[:, np.newaxis] + np.arange(s + 1)) % n
    columns = parity[:, support].transpose(1, 0, 2)  # (s, n, s + 1) -> (n, s, s + 1)
    rest = -np.linalg.solve(columns[:, :, 1:], columns[:, :, :1])[:, :, 0]
    rows = np.concatenate([np.ones((n, 1)), rest], axis=1)
    rows /= np.abs(rows).max(axis=1, keepdims=True)
    matrix = np.zeros((n, n))
    np.put_along_axis(matrix, support, rows, axis=1)
    return matrix


def _sets(n: int, s: int, random: np.random.RandomState) -> NDArray[np.intp]:
    """Return sets of n - s rows, all or many, as an array of shape (sets, n - s)."""
    count = max(_LEAST, _ELEMENTS // (n * n))
    if math.comb(n, s) <= count:
        return np.array(list(itertools.combinations(range(n), n - s)), dtype=np.intp)
    beside = (np.arange(n)[:, np.newaxis] + np.arange(n - s)) % n  # neighbours are missing
    order = np.argsort(random.random_sample((count, n)), axis=1)
    return np.concatenate([beside, order[:, : n - s]])


def _solve_all(rows: NDArray[np.float64], rank: int) -> Sequence[NDArray[Any]]:
    """Solve for many sets at once: rows of shape (sets, workers, n)."""
    left, singular, right = np.linalg.svd(rows, full_matrices=False)
    left, singular, right = left[:, :, :rank], singular[:, :rank], right[:, :rank]
    ones = np.ones(rows.shape[::2])  # (sets, n)
    coefficients = np.zeros(rows.shape[:2])
    for _ in range(2):  # the second time refines
        left_over = ones - np.einsum("km,kmn->kn", coefficients, rows)
        inside = np.einsum("krn,kn->kr", right, left_over) / singular
        coefficients += np.einsum("kmr,kr->km", left, inside)
    residuals = np.abs(ones - np.einsum("km,kmn->kn", coefficients, rows)).max(axis=1)
    growths = np.einsum("km,kmn->kn", np.abs(coefficients), np.abs(rows)).max(axis=1)
    return coefficients, singular[:, 0] / singular[:, -1], growths, residuals
