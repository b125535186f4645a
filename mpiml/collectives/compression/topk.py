"""The largest elements, with their places."""

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.codec import Codec, count_of
from mpiml.collectives.compression.coding import Layout, Payload

__all__ = ["TopK", "largest", "number_of"]

_SAMPLED: Final = 1 << 14  # elements from which guessing the threshold pays


class TopK(Codec):
    """Send the elements of largest magnitude of each array, and where they were.

    Biased, so the rest is kept and added to the next step's array. Of equal magnitudes the
    first ones are sent.

    Parameters
    ----------
    ratio : float, optional
        Part of each array's elements that is sent, in (0, 1]; at least one element is.
    k : int, optional
        Number of elements instead; all, of a smaller array.

    Raises
    ------
    UsageError
        None or both are given, or one out of its range.

    References
    ----------
    Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep Gradient Compression", ICLR 2018. Its
    momentum correction, clipping and warm-up are the optimizer's and the user's.
    """

    biased = True
    _settings: ClassVar[tuple[str, ...]] = ("ratio", "k")

    def __init__(self, ratio: float | None = None, *, k: int | None = None) -> None:
        self.ratio, self.k = count_of(ratio, k, "TopK")

    def encode(self, array: NDArray[Any]) -> Payload:
        """Return indices, ascending, into the flat array, and the elements there."""
        flat = array.reshape(-1)
        chosen = largest(flat, number_of(flat.size, self.ratio, self.k))
        return chosen.astype(_index_dtype(flat.size)), flat[chosen]

    def decode(self, payload: Payload, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """Return zeros but for the elements that were sent."""
        indices, values = payload
        array = np.zeros(shape, dtype)
        array.reshape(-1)[indices] = values
        return array

    def combine(self, payloads: Sequence[Payload], total: NDArray[Any], members: int) -> None:
        """Fill `total` with the sum of what the payloads stand for, added in their order."""
        total.fill(0)
        flat = total.reshape(-1)
        for indices, values in payloads:
            flat[indices] += values  # no index twice in one payload

    def subtract(self, array: NDArray[Any], payload: Payload) -> None:
        """Take what a payload stands for from `array`, in place."""
        indices, values = payload
        array.reshape(-1)[indices] -= values

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""
        size = prod(shape)
        k = number_of(size, self.ratio, self.k)
        return [(_index_dtype(size), (k,)), (dtype, (k,))]


def number_of(size: int, ratio: float | None, k: int | None) -> int:
    """Return how many of `size` elements are sent."""
    if k is not None:
        return min(k, size)
    assert ratio is not None
    return min(max(1, round(ratio * size)), size)


def largest(array: NDArray[Any], k: int) -> NDArray[np.intp]:
    """Return the indices of the `k` elements of largest magnitude, ascending.

    Parameters
    ----------
    array : ndarray, shape (n,)
        Finite numbers.
    k : int
        0 to n.

    Returns
    -------
    ndarray of intp, shape (k,)
        Of equal magnitudes the first.
    """
    size = array.size
    if k >= size or k == 0:
        return np.arange(k)
    magnitude = np.abs(array)
    candidates: NDArray[np.intp] | None = None
    if size >= _SAMPLED and 8 * k < size:
        # A threshold that a few more than k elements reach, guessed from a sample, leaves few
        # to partition: five to ten times faster, and exact whenever k or more do reach it.
        sample = magnitude[:: max(1, size >> 14)]
        expected = k * sample.size / size
        rank = min(sample.size, int(expected + 3 * expected**0.5 + 8))
        threshold = np.partition(sample, sample.size - rank)[sample.size - rank]
        candidates = np.flatnonzero(magnitude >= threshold)
        if candidates.size < k:
            candidates = None
    values = magnitude if candidates is None else magnitude[candidates]
    last = np.partition(values, values.size - k)[values.size - k]
    chosen = values > last
    ties = np.flatnonzero(values == last)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    found = np.flatnonzero(chosen)
    return found if candidates is None else candidates[found]


def _index_dtype(size: int) -> Any:
    return np.dtype(
        np.uint16 if size <= 1 << 16 else np.uint32 if size <= 1 << 32 else np.uint64
    )
