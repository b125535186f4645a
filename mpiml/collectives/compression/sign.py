"""One bit for each element: its sign."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.bits import pack_signs, packed_size, signs, unpack
from mpiml.collectives.compression.blocked import BLOCK, BlockedCodec
from mpiml.collectives.compression.checks import check_scale
from mpiml.collectives.compression.codec import Codec
from mpiml.collectives.compression.coding import Layout, Payload

__all__ = ["EFSign", "SignMajority"]


class SignMajority(Codec):
    """Send signs; the result is the sign that most members have.

    The mean is 1, -1, or 0 where as many are for as against; the sum is the mean times the
    number of members. Zero counts as positive. This is a direction and no estimate of the
    gradient: choose a step size to go with it (the update is of the same size in every
    element), and let it become smaller. Nothing is fed back, as in the paper.

    References
    ----------
    J. Bernstein, J. Zhao, K. Azizzadenesheli, A. Anandkumar, "signSGD with Majority Vote is
    Communication Efficient and Fault Tolerant", ICLR 2019.
    """

    biased = False  # there is nothing that it misses on its way to the sum

    def encode(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        """Return one bit for each element: 1 where it is 0 or more."""
        return pack_signs(array.reshape(-1))

    def decode(
        self, payload: NDArray[np.uint8], shape: Sequence[int], dtype: Any
    ) -> NDArray[Any]:
        """Return 1 and -1."""
        return signs(payload, prod(shape), 1, dtype).reshape(shape)

    def combine(self, payloads: Sequence[Payload], total: NDArray[Any], members: int) -> None:
        """Fill `total` with the vote of the payloads, times `members`."""
        size = total.size
        most = len(payloads)
        votes: NDArray[Any] = np.zeros(size, np.uint8 if most < 256 else np.uint32)
        for (packed,) in payloads:
            votes += unpack(packed, 1, size)
        vote = (votes > most // 2).view(np.int8)
        vote -= (votes < most - most // 2).view(np.int8)
        np.copyto(total, vote.reshape(total.shape))
        total *= members

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""
        return [(np.dtype(np.uint8), (packed_size(prod(shape), 1),))]


class EFSign(BlockedCodec):
    """Send signs and the mean magnitude of each array: ``mean(abs(a)) * sign(a)``.

    Biased, so the rest is kept and added to the next step's array. Zero counts as positive.

    References
    ----------
    S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and
    other Gradient Compression Schemes", ICML 2019.
    """

    biased = True

    def encode(self, array: NDArray[Any]) -> Payload:
        """Return the mean magnitude, and one bit for each element."""
        flat = array.reshape(-1)
        total = 0.0
        with np.errstate(over="ignore"):
            for start in range(0, flat.size, BLOCK):
                total += np.abs(flat[start : start + BLOCK]).sum(dtype=np.float64)
        scale = total / max(1, flat.size)
        check_scale(scale, "mean magnitude")
        return np.asarray(scale, flat.dtype), pack_signs(flat)

    def _piece(self, payload: Payload, start: int, stop: int, dtype: Any) -> NDArray[Any]:
        scale, packed = payload
        return signs(packed[start // 8 : -(-stop // 8)], stop - start, scale, dtype)

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""
        return [(dtype, ()), (np.dtype(np.uint8), (packed_size(prod(shape), 1),))]
