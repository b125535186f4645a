"""Some elements at random, the same ones on every member."""

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.codec import Codec, check_seed, count_of
from mpiml.collectives.compression.coding import Layout, Payload
from mpiml.collectives.compression.draws import generator
from mpiml.collectives.compression.topk import number_of

__all__ = ["RandomK"]


class RandomK(Codec):
    """Send elements at random places, the same ones on every member.

    So their values alone are sent, and summed. Other places in every step, and for every array.

    Parameters
    ----------
    ratio : float, optional
        Part of each array's elements that is sent, in (0, 1]; at least one element is.
    k : int, optional
        Number of elements instead; all, of a smaller array.
    seed : int
        Of the places; the same on every member.
    unbiased : bool
        Multiply by n/k, so that the result is right on average, and keep nothing. Else (the
        default) the elements are sent as they are, and the rest is kept for the next step.

    Raises
    ------
    UsageError
        None or both of `ratio` and `k` are given, or one out of its range.

    References
    ----------
    S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    reducible = True
    draws: ClassVar[Literal["own", "shared"] | None] = "shared"
    _settings: ClassVar[tuple[str, ...]] = ("ratio", "k", "seed", "unbiased")

    def __init__(
        self,
        ratio: float | None = None,
        *,
        k: int | None = None,
        seed: int = 0,
        unbiased: bool = False,
    ) -> None:
        self.ratio, self.k = count_of(ratio, k, "RandomK")
        self.seed = check_seed(seed, "RandomK")
        self.unbiased = bool(unbiased)
        self.biased = not self.unbiased
        self._kept: tuple[Any, NDArray[np.intp]] | None = None

    def encode(
        self, array: NDArray[Any], rng: np.random.Generator | None = None
    ) -> NDArray[Any]:
        """Return the elements at the places that `rng` draws."""
        flat = array.reshape(-1)
        values: NDArray[Any] = flat[self._places(flat.size, rng)]
        if self.unbiased and values.size:
            values *= np.asarray(flat.size / values.size, flat.dtype)
        return values

    def decode(
        self,
        payload: NDArray[Any],
        shape: Sequence[int],
        dtype: Any,
        rng: np.random.Generator | None = None,
    ) -> NDArray[Any]:
        """Return zeros but for the elements that were sent; `rng` at the same place."""
        array = np.zeros(shape, dtype)
        array.reshape(-1)[self._places(array.size, rng)] = payload
        return array

    def combine(
        self,
        payloads: Sequence[Payload],
        total: NDArray[Any],
        members: int,
        rng: np.random.Generator | None = None,
    ) -> None:
        """Fill `total` with what one payload stands for, of which all are the sum."""
        ((payload,),) = payloads
        total.fill(0)
        total.reshape(-1)[self._places(total.size, rng)] = payload

    def subtract(
        self, array: NDArray[Any], payload: NDArray[Any], rng: np.random.Generator | None = None
    ) -> None:
        """Take what a payload stands for from `array`, in place."""
        array.reshape(-1)[self._places(array.size, rng)] -= payload

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""
        return [(dtype, (number_of(prod(shape), self.ratio, self.k),))]

    def _places(self, size: int, rng: np.random.Generator | None) -> NDArray[np.intp]:
        """Return indices, ascending, none twice."""
        rng = generator(self.seed, "RandomK", "", 0, None) if rng is None else rng
        k = number_of(size, self.ratio, self.k)
        if k == size:
            return np.arange(size)
        # a step needs the same places three times; members that are threads do, too
        key = size, k, _place(rng)
        kept = self._kept
        if kept is None or key[2] is None or kept[0] != key:
            chosen = np.zeros(size, np.uint8)
            chosen[rng.choice(size, k, replace=False, shuffle=False)] = 1
            kept = self._kept = key, np.flatnonzero(chosen)
        return kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


def _place(rng: np.random.Generator) -> bytes | None:
    """Return where a generator by counters stands; None of another."""
    state = rng.bit_generator.state
    if state["bit_generator"] != "Philox" or state["buffer_pos"] != 4:  # 4: at a whole block
        return None
    inside: Any = state["state"]
    return bytes(inside["key"].tobytes() + inside["counter"].tobytes())
