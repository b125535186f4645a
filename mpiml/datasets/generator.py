"""Sparse SVM problems made to measure: nonzeros per row, column skew, a known answer."""

import math
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiml.datasets.csr import CSR, MOST_FEATURES, float_dtype, shard_of
from mpiml.errors import UsageError
from mpiml.whole import whole_number

__all__ = ["SparseSVM", "rcv1_like", "sparse_svm"]

_BLOCK: Final = 1024  # rows that share a seed, at most
_DRAWN: Final = 1 << 17  # columns that do, about: what is drawn at a time is in memory
_ROUNDS: Final = 4  # of drawing columns before the rest is drawn column by column


class SparseSVM(NamedTuple):
    """A made problem."""

    data: CSR
    """Rows of unit length with labels +1 and -1."""
    w: NDArray[np.float64]
    """What gave the labels: ``sign(data.dot(w))``, but for the noise. Shape (features,)."""
    flipped: NDArray[np.bool_]
    """Which rows have the other label, shape (rows,)."""


def sparse_svm(
    rows: int,
    features: int,
    nonzeros: int = 75,
    skew: float = 1.0,
    noise: float = 0.05,
    seed: int = 0,
    dtype: Any = "float32",
    *,
    rank: int = 0,
    size: int = 1,
) -> SparseSVM:
    """Make a sparse, linearly separable problem, with noise in its labels.

    Local: no MPI. Each block of up to 1024 rows has its own seed: the shards of all ranks, one after
    the other, are the same rows whatever `size` is, and `w` is the same on every rank.

    Parameters
    ----------
    rows, features : int
        Of the whole problem.
    nonzeros : int
        In each row, in different columns.
    skew : float
        Zipf's exponent s >= 0: columns are drawn one after the other, without repetition, with
        probability proportional to ``k**-s`` for the k-th most frequent one. 0 is uniform. Which
        column is the k-th is random, as in data: frequent ones are no neighbours in memory.
    noise : float
        Probability from 0 to 0.5 that a label is turned.
    seed : int
        >= 0.
    dtype : {'float32', 'float64'}
    rank, size : int
        Which shard of how many; rows are shared evenly.

    Returns
    -------
    SparseSVM

    Raises
    ------
    UsageError
        An argument is out of its range.

    Notes
    -----
    Values are log-normal, then each row is scaled to length 1, as the term weights of RCV1 are.
    The signs of `w`'s normal elements make both classes about equally frequent.
    """
    rows = whole_number("sparse_svm: rows", rows, 0)
    features = whole_number("sparse_svm: features", features, 1, MOST_FEATURES)
    nonzeros = whole_number("sparse_svm: nonzeros", nonzeros, 1, features)
    skew, noise = _number("skew", skew, 0, 10), _number("noise", noise, 0, 0.5)
    seed = whole_number("sparse_svm: seed", seed, 0)
    rank, size = shard_of("sparse_svm", rank, size)
    kind = float_dtype("sparse_svm", dtype)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    w = rng.standard_normal(features)
    places = rng.permutation(features).astype(np.int32)  # of the k-th most frequent
    weights = np.arange(1, features + 1, dtype=np.float64) ** -skew
    start, stop = rows * rank // size, rows * (rank + 1) // size
    count = stop - start
    indices = np.empty((count, nonzeros), np.int32)
    values = np.empty((count, nonzeros), kind)
    flipped = np.empty(count, bool)
    share = max(1, min(_BLOCK, _DRAWN // nonzeros))
    for block in range(start // share, -(-stop // share) if count else 0):
        begin = block * share
        own = slice(max(start, begin) - begin, min(stop, begin + share) - begin)
        here = slice(begin + own.start - start, begin + own.stop - start)
        # always the whole block, also of a last one: a longer problem begins with the same rows
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1, block)))
        columns = places[_draw(rng, weights, share, nonzeros)]  # (share, nonzeros)
        weight = rng.lognormal(size=columns.shape)
        turned = rng.random(share) < noise
        indices[here] = np.sort(columns, axis=1)[own]
        values[here] = (weight / np.linalg.norm(weight, axis=1, keepdims=True))[own]
        flipped[here] = turned[own]
    indptr = np.arange(count + 1, dtype=np.int64) * nonzeros
    labels = np.empty(count, kind)
    csr = CSR(indptr, indices.reshape(-1), values.reshape(-1), labels, (count, features))
    labels[:] = np.where((csr.dot(w) >= 0) != flipped, 1, -1)
    return SparseSVM(csr, w, flipped)


def rcv1_like(
    rows: int = 20_242, seed: int = 0, *, dtype: Any = "float32", rank: int = 0, size: int = 1
) -> SparseSVM:
    """Make a problem of the shape of RCV1's training set: 20 242 x 47 236, 75 nonzeros a row.

    Local: no MPI. RCV1's rows have 74 nonzeros on average and differ in length; these do not.
    The most frequent column is in nearly all rows, so Hogwild!'s Delta and rho are close to 1.

    Parameters
    ----------
    rows, seed, dtype, rank, size
        As `sparse_svm` takes them; RCV1's test set has 677 399 rows.
    """
    return sparse_svm(rows, 47_236, 75, 1.0, 0.05, seed, dtype, rank=rank, size=size)


def _draw(
    rng: np.random.Generator, weights: NDArray[np.float64], rows: int, k: int
) -> NDArray[np.intp]:
    """Draw `k` different columns for each row, each time by `weights` among those left.

    The first k different ones of a sequence drawn with repetition are such a draw. Rows that
    have fewer after some rounds, as of few or very skewed columns, are finished by the smallest
    of exponential times with rates `weights` (P. Efraimidis, P. Spirakis, 2006).

    Returns
    -------
    ndarray of intp, shape (rows, k)
    """
    chosen = np.empty((rows, k), np.intp)
    lacking = np.arange(rows)
    drawn = np.empty((rows, 0), np.intp)
    if 4 * k <= weights.size:
        cumulative = np.cumsum(weights)
        for _ in range(_ROUNDS):
            points = rng.random((lacking.size, 2 * k)) * cumulative[-1]
            new = np.searchsorted(cumulative, points, side="right")
            np.minimum(new, weights.size - 1, out=new)  # where the product is rounded up
            drawn = np.concatenate((drawn, new), axis=1)
            first = _first_ones(drawn)
            number = np.cumsum(first, axis=1)
            done = number[:, -1] >= k
            chosen[lacking[done]] = drawn[done][(first & (number <= k))[done]].reshape(-1, k)
            lacking, drawn = lacking[~done], drawn[~done]
    for row, before in zip(lacking, drawn, strict=True):
        own = np.unique(before)
        times = rng.exponential(size=weights.size) / weights
        times[own] = np.inf
        left = k - own.size
        chosen[row] = np.concatenate((own, np.argpartition(times, left - 1)[:left]))
    return chosen


def _first_ones(drawn: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Tell of each element whether it is the first of its kind in its row."""
    order = np.argsort(drawn, axis=1, kind="stable")
    ordered = np.take_along_axis(drawn, order, axis=1)
    new = np.ones(drawn.shape, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.empty(drawn.shape, bool)
    np.put_along_axis(first, order, new, axis=1)
    return first


def _number(name: str, value: Any, least: float, most: float) -> float:
    """Return a real number in its range."""
    number = math.nan
    with suppress(TypeError, ValueError):
        number = float(value)
    if not least <= number <= most:
        raise UsageError(
            f"sparse_svm: {name}: expected a number from {least} to {most}, got {value!r}"
        )
    return number
