"""Cyclic gradient codes: any number of workers, fractions as coefficients."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.stragglers.coding import GradientCode
from mpiml.collectives.stragglers.survivors import Solved, best_matrix, solve
from mpiml.errors import UsageError
from mpiml.whole import whole_number

__all__ = ["Cyclic"]

CONDITION: Final = 1e8  #: largest condition number of rows of B that messages are decoded from
_KEPT: Final = 1024  # sets of survivors whose coefficients are remembered
_ROUNDOFF: Final = {
    "float32": 2.0**-24,
    "float64": 2.0**-53,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}


class Cyclic(GradientCode):
    """Worker i holds the partitions i to i + s, around the end; any n and s.

    B is drawn as in the paper: a random H, s x n, whose rows sum to zero; row i of B is zero
    outside worker i's partitions, and ``H B[i] = 0``. Of 16 draws the one is taken whose
    rounding errors grow least in the worst set of n - s workers (all sets up to n = 12, many
    beyond). Rows are scaled to a largest coefficient of 1, so that no element of a message is
    larger than the sum of the gradients' magnitudes.

    Exact but for rounding: an element of the result differs from the sum by at most
    `error` times the sum of the gradients' magnitudes there. With seed 0 and any s, float64:
    2e-14 up to n = 4, 5e-14 up to n = 6, 5e-13 up to n = 8, 1e-11 up to n = 12. A message of
    float32 is rounded when it is sent, and that error grows as well: 1e-6, 2e-6, 1e-5, 2e-4.
    Convert the gradients to float64 where this matters. The last bits of the result depend on
    who was missing.

    Parameters
    ----------
    n, s : int
        See `GradientCode`.
    seed : int, optional
        Of H, 0 to 2**32 - 1; the same everywhere.

    Raises
    ------
    UsageError
        A number is out of its range; or the rows of some n - s workers have a condition number
        beyond 1e8 in the best draw.

    References
    ----------
    R. Tandon, Q. Lei, A. G. Dimakis, N. Karampatziakis, "Gradient Coding: Avoiding Stragglers
    in Distributed Learning", ICML 2017.
    """

    def __init__(self, n: int, s: int, *, seed: int = 0) -> None:
        self.seed = whole_number("Cyclic: seed", seed, 0, (1 << 32) - 1)
        self._known: dict[tuple[int, ...], Solved] = {}
        super().__init__(n, s)

    def __repr__(self) -> str:
        return f"Cyclic({self.n}, {self.s}, seed={self.seed})"

    def assignment(self, worker: int) -> tuple[int, ...]:
        """Return the s + 1 partitions that a worker computes the gradients of."""
        first = self._worker(worker, f"{self!r}.assignment")
        return tuple((first + k) % self.n for k in range(self.s + 1))

    def enough(self, workers: Iterable[int]) -> bool:
        """Tell whether these workers suffice: whether they are n - s or more."""
        return len(self._workers(workers, f"{self!r}.enough")) >= self.n - self.s

    def coefficients(self, workers: Iterable[int]) -> NDArray[np.float64]:
        """Return what the workers' messages are multiplied with, shape (n,); 0 for the others.

        Raises
        ------
        UsageError
            They are fewer than n - s, or the condition number of their rows is beyond 1e8.
        """
        where = f"{self!r}.coefficients"
        there = self._workers(workers, where)
        result = np.zeros(self.n)
        result[list(there)] = self._solved(there, where).coefficients
        return result

    def error(self, workers: Iterable[int] | None = None, dtype: Any = np.float64) -> float:
        """Bound the rounding error of `decode`, as a part of the sum of the magnitudes.

        Parameters
        ----------
        workers : iterable of int, optional
            Whose messages are there; without it, the worst n - s of those tried.
        dtype : optional
            Of gradients and messages: float32, float64, complex64, complex128.
        """
        name = np.dtype(dtype).name
        if name not in _ROUNDOFF:
            raise UsageError(
                f"{self!r}.error: dtype: expected one of {', '.join(_ROUNDOFF)}, got {name}"
            )
        where = f"{self!r}.error"
        found = (
            self._worst
            if workers is None
            else self._solved(self._workers(workers, where), where)
        )
        return found.error(self.s, _ROUNDOFF[name])

    def encode(self, worker: int, gradients: Mapping[int, Any]) -> Any:
        """Return the combination of its gradients that a worker sends.

        Parameters
        ----------
        worker : int
        gradients : mapping of int to tree of ndarrays
            Of each partition of ``assignment(worker)``; trees alike, float32, float64,
            complex64 or complex128. Not changed.

        Raises
        ------
        UsageError
            A gradient is missing or too many, they are not alike, or of another dtype.
        """
        trees, held = self._given(worker, gradients)
        return trees.combined({j: float(self._matrix[worker, j]) for j in held})

    def decode(self, messages: Mapping[int, Any] | Iterable[tuple[int, Any]]) -> Any:
        """Return the sum of the gradients of all n partitions.

        Parameters
        ----------
        messages : mapping of int to tree of ndarrays, or (worker, tree) pairs
            Worker and what it sent, of n - s workers or more; all are used.

        Raises
        ------
        UsageError
            They are too few, which says who is missing; a worker is unknown, or there twice;
            the trees differ; the condition number is beyond 1e8.
        """
        where = f"{self!r}.decode"
        trees, workers = self._arrived(messages, where)
        solved = self._solved(workers, where)
        return trees.combined(dict(zip(workers, solved.coefficients.tolist(), strict=True)))

    def _build(self) -> NDArray[np.float64]:
        matrix, self._worst = best_matrix(self.n, self.s, self.seed)
        self._check(self._worst, f"{self!r}", "Use another seed, or FractionalRepetition.")
        return matrix

    def _solved(self, workers: tuple[int, ...], where: str) -> Solved:
        solved = self._known.get(workers)
        if solved is None:
            if len(workers) < self.n - self.s:
                raise self._few(workers, where, "Wait for more.")
            solved = solve(self._matrix[list(workers)], self.n - self.s)
            cure = f"Wait for one worker more than {list(workers)}, or use another seed."
            self._check(solved, where, cure)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[workers] = solved
        return solved

    def _check(self, solved: Solved, where: str, cure: str) -> None:
        if not solved.condition <= CONDITION:
            raise UsageError(
                f"{where}: expected rows of a condition number up to {CONDITION:.0e}, got "
                f"{solved.condition:.1e}: too little would be left of the sum. {cure}"
            )
