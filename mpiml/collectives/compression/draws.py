"""Random numbers from counters: the same for the same seed, array, step and member.

Philox [1]_ computes block i of a stream from key and counter alone. So nothing has to be kept
but the number of the step, a run can be repeated from any step, and two members can draw the
same numbers without talking, or different ones without caring.

.. [1] J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
   SC 2011.
"""

from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["generator", "uniform"]

_EVERYONE: Final = (1 << 64) - 1  # stands for the member where all draw the same


def generator(
    seed: int, kind: str, name: str, step: int, member: int | None
) -> np.random.Generator:
    """Return a generator at its own place of its own stream.

    Parameters
    ----------
    seed : int
        The user's.
    kind, name : str
        What the numbers are for, and for which array.
    step : int
        How often this array has been reduced before.
    member : int, optional
        Who draws; None: all members draw the same.
    """
    text = f"{seed}\n{kind}\n{name}".encode("utf-8", "backslashreplace")
    key = int.from_bytes(blake2b(text, digest_size=16).digest(), "little")
    # the lowest of the counter's four words counts the blocks that are drawn
    counter = np.array([0, 0, _EVERYONE if member is None else member, step], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def uniform(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Return numbers between 0 and 1, never 0 or 1 themselves.

    They are the midpoints of 2**23 intervals, so a number is below p with the probability p
    rounded to the nearest such interval: no drift to either side.

    Returns
    -------
    ndarray of float32, shape (count,)
    """
    raw: Any = rng.bit_generator.random_raw(-(-count // 2))
    drawn: NDArray[np.float32] = (raw.view(np.uint32)[:count] >> np.uint32(9)).astype(
        np.float32
    )
    drawn += np.float32(0.5)
    drawn *= np.float32(2.0**-23)
    return drawn
