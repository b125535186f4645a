"""Gradients as products of two thin matrices.

For a matrix M of n rows and m columns, and Q of m rows and r columns from the step before::

    P = orthonormal(sum of M Q)      an allreduce of r n numbers
    Q = sum of M^T P                 an allreduce of r m numbers
    result = P Q^T                   error: M - P Q^T / members

One step of the power iteration a step of training: Q turns towards the leading right singular
vectors as long as the gradient changes slowly.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.checks import check_finite, shown, work_dtype
from mpiml.collectives.compression.codec import check_seed
from mpiml.collectives.compression.draws import generator
from mpiml.collectives.compression.exchange import Exchange, sum_together
from mpiml.collectives.compression.orthogonal import add_product, orthonormal
from mpiml.collectives.compression.reducer import Job, Reducer, Transfer, Work
from mpiml.collectives.compression.state import Slot
from mpiml.errors import UsageError

__all__ = ["PowerSGD"]

_KIND: Final = "PowerSGD"


class _Factors(Job):
    """A call on its way: for each array its matrix and the first thing to be summed."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__(works)
        self.matrices: list[NDArray[Any] | None] = []  #: None: not compressed
        self.first: list[NDArray[Any]] = []  #: M Q, or the array itself


class PowerSGD(Reducer):
    """Send each matrix as the product of two of `rank` columns: two allreduces, r (n + m).

    Arrays of three and more dimensions are matrices of ``shape[0]`` rows. Those of one
    dimension, and matrices that would not become smaller, are summed as they are. What was not
    sent is kept and added to the next step's array.

    Local: the constructor.

    Parameters
    ----------
    rank : int
        r, from 1 up. 1 to 4 is usual.
    warm_start : bool
        Begin each step with the Q of the one before. Else with a random one.
    feedback : bool
        Keep what was not sent.
    seed : int
        Of the first Q; the same on every member.

    Raises
    ------
    UsageError
        `rank` is out of its range.

    References
    ----------
    T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
    for Distributed Optimization", NeurIPS 2019.
    """

    def __init__(
        self,
        rank: int = 2,
        *,
        warm_start: bool = True,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 1:
            raise UsageError(f"PowerSGD: rank: expected a whole number from 1 up, got {rank!r}")
        super().__init__(bool(feedback), _KIND)
        self.rank = int(rank)
        self.warm_start = bool(warm_start)
        self.seed = check_seed(seed, _KIND)

    def __repr__(self) -> str:
        return (
            f"PowerSGD(rank={self.rank}, warm_start={self.warm_start}, "
            f"feedback={self.feedback}, seed={self.seed})"
        )

    def nbytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Return the bytes that a member sends for an array of that shape and dtype.

        Local: no MPI. In both allreduces together.
        """
        itemsize = work_dtype(dtype).itemsize
        matrix = self._matrix(shape)
        return itemsize * (prod(shape) if matrix is None else self.rank * sum(matrix))

    def _matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return rows and columns, or None where compression saves nothing."""
        if len(shape) < 2:
            return None
        n, m = shape[0], prod(shape[1:])
        return (n, m) if self.rank * (n + m) < n * m else None

    def _prepare(self, works: Sequence[Work], exchange: Exchange) -> _Factors:
        job = _Factors(works)
        for work in works:
            shape = work.source.shape
            matrix = self._matrix(shape)
            array = work.slot.buffer(shape, work.dtype)
            np.copyto(array, work.source)
            check_finite(array, work.name)
            if matrix is None:
                job.matrices.append(None)
                job.first.append(array)
            else:
                residual = work.slot.get("residual", shape, work.dtype, work.name)
                if residual is not None and self.feedback:
                    array += residual
                    check_finite(array, work.name)
                job.matrices.append(array.reshape(matrix))
                with np.errstate(over="ignore", invalid="ignore"):  # looked at in the next line
                    job.first.append(array.reshape(matrix) @ self._start(work, matrix[1]))
                self._check_range(job.first[-1], work)
            job.slots.append(Slot(work.slot.step + 1, None, work.slot.arrays.get("residual")))
            job.sent += self.nbytes(shape, work.dtype)
        return job

    def _start(self, work: Work, columns: int) -> NDArray[Any]:
        """Return Q to begin with, shape (columns, rank): as it was, or random."""
        shape = (columns, self.rank)
        kept = work.slot.get("q", shape, work.dtype, work.name)
        largest = np.zeros(self.rank) if kept is None else np.abs(kept).max(axis=0)
        if not self.warm_start:
            largest[:] = 0
        if not largest.all():
            # a column of zeros, of a matrix of lower rank, would stay so for ever
            rng = generator(self.seed, _KIND, work.name, work.slot.step, None)
            fresh = rng.standard_normal(shape).astype(work.dtype)
            kept = fresh if kept is None else np.where(largest == 0, fresh, kept)
            largest = np.where(largest == 0, 1, largest)
        assert kept is not None
        # only its direction matters; its length is the gradient's, and M Q would have that twice
        started: NDArray[Any] = kept / largest.astype(work.dtype)
        return started

    def _check_range(self, product: NDArray[Any], work: Work) -> None:
        if not np.isfinite(product).all():
            raise UsageError(
                f"{shown(work.name)}: expected elements whose sums of products are finite "
                "numbers. Scale the gradient down, or clip it."
            )

    def _transfer(self, job: Job, to: Transfer) -> None:
        assert isinstance(job, _Factors)
        first = sum_together(to.exchange, job.first)
        lefts, products = [], []
        for work, summed, matrix in zip(job.works, first, job.matrices, strict=True):
            if matrix is not None:
                self._check_range(summed, work)  # the same on all members
                lefts.append(orthonormal(summed))  # (n, r)
                products.append(matrix.T @ lefts[-1])  # (m, n) (n, r) -> (m, r)
        factors = zip(lefts, sum_together(to.exchange, products), strict=True)
        for total, slot, summed, matrix in zip(
            to.totals, job.slots, first, job.matrices, strict=True
        ):
            if matrix is None:
                np.copyto(total, summed)
                continue
            left, right = next(factors)
            total.fill(0)
            add_product(left, right, 1, total.reshape(matrix.shape))
            if self.feedback:
                add_product(left, right, -1 / to.exchange.size, matrix)
                slot.arrays["residual"] = matrix.reshape(total.shape)
            if self.warm_start:
                slot.arrays["q"] = right
