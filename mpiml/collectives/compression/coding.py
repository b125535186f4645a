"""Any codec, ours or the user's, as `mpiml.collectives.compression.feedback` uses it.

A codec needs `encode` and `decode` only. All else has a default here.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.ops import DTYPES, dtype_name
from mpiml.errors import UsageError

__all__ = ["Coding", "Draw", "Encodes", "Layout", "Payload", "name_of"]

Payload = tuple[NDArray[Any], ...]
Layout = Sequence[tuple[Any, tuple[int, ...]]]  # dtype and shape of each array of a payload
Draw = Callable[[], np.random.Generator]  # each time a new one at the same place


@runtime_checkable
class Encodes(Protocol):
    """What a codec is: two methods. The attributes below may be added.

    `biased` : bool
        What is decoded is not the array on average: use error feedback. False.
    `reducible` : bool
        Payloads may be summed, array by array, and the sum decoded. Then all members send
        arrays of the same shapes and dtypes. False: each member's is decoded.
    `draws` : None, "own" or "shared"
        `encode` gets a second argument, a `numpy.random.Generator` at a place that depends on
        seed, array and step, and for ``"own"`` on the member too. With ``"shared"`` all draw
        the same, and `decode` gets such a generator too, as its fourth argument. None.
    `seed` : int
        Of these. 0.
    `finite` : bool
        Refuse NaN and infinity before `encode`. `biased`.
    ``nbytes(shape, dtype)``
        Bytes of a payload; without it a payload of zeros is measured.
    """

    def encode(self, array: NDArray[Any]) -> NDArray[Any] | Payload:
        """Return the payload for an array of float32 or float64, which is read-only."""

    def decode(
        self, payload: Any, shape: tuple[int, ...], dtype: "np.dtype[Any]"
    ) -> NDArray[Any]:
        """Return an array of that shape and dtype; `payload` as `encode` returned it."""


def name_of(codec: Any) -> str:
    """Return how members tell codecs apart: ours with their settings, others by class."""
    return repr(codec) if hasattr(codec, "_settings") else f"{type(codec).__qualname__}()"


class Coding:
    """A codec with all defaults filled in.

    Parameters
    ----------
    codec : Encodes
        Ours or the user's.
    """

    def __init__(self, codec: Any) -> None:
        self.codec = codec
        self.biased = bool(getattr(codec, "biased", False))
        self.reducible = bool(getattr(codec, "reducible", False))
        self.draws: Literal["own", "shared"] | None = getattr(codec, "draws", None)
        self.seed = 0 if self.draws is None else int(getattr(codec, "seed", 0))
        self.finite = bool(getattr(codec, "finite", self.biased))
        self._ours = hasattr(codec, "_settings")
        self._single = False  # `encode` returned an array, so `decode` gets one
        if self.draws not in (None, "own", "shared"):
            raise UsageError(
                f"{name_of(codec)}.draws: expected None, 'own' or 'shared', got {self.draws!r}"
            )

    def encode(self, array: NDArray[Any], draw: Draw) -> Payload:
        """Return the payload as a tuple of C-contiguous arrays in native byte order."""
        view = array.view()
        view.flags.writeable = False
        got = self.codec.encode(view) if self.draws is None else self.codec.encode(view, draw())
        self._single = isinstance(got, np.ndarray | np.generic)
        parts = (got,) if self._single else got
        if not isinstance(parts, tuple) or not all(
            isinstance(part, np.ndarray | np.generic) for part in parts
        ):
            raise UsageError(
                f"{name_of(self.codec)}.encode: expected it to return an ndarray or a tuple of "
                f"ndarrays, got {_kinds(got)}"
            )
        return tuple([self._plain(part) for part in parts])

    def decode(
        self, payload: Payload, shape: tuple[int, ...], dtype: Any, draw: Draw
    ) -> NDArray[Any]:
        """Return what a payload stands for."""
        given = payload[0] if self._single else payload
        got = self.codec.decode(given, shape, dtype, *self._places(draw))
        if isinstance(got, np.generic):  # what NumPy makes of an array without dimensions
            got = np.asarray(got)
        if not isinstance(got, np.ndarray) or got.shape != shape or got.dtype != dtype:
            raise UsageError(
                f"{name_of(self.codec)}.decode: expected it to return an array {shape} "
                f"{np.dtype(dtype).name}, got {_kinds(got)}"
            )
        return got

    def combine(
        self, payloads: Sequence[Payload], total: NDArray[Any], members: int, draw: Draw
    ) -> None:
        """Fill `total` with the sum of what the payloads stand for, added in their order."""
        if self._ours:
            self.codec.combine(payloads, total, members, *self._places(draw))
            return
        total.fill(0)
        for payload in payloads:
            total += self.decode(payload, total.shape, total.dtype, draw)

    def fill(self, total: NDArray[Any], summed: Payload, draw: Draw) -> None:
        """Fill `total` with what the sum of the members' payloads stands for."""
        if self._ours:
            self.codec.combine([summed], total, 1, *self._places(draw))
        else:
            np.copyto(total, self.decode(summed, total.shape, total.dtype, draw))

    def subtract(self, array: NDArray[Any], payload: Payload, draw: Draw) -> None:
        """Take what a payload stands for from `array`, in place."""
        if self._ours:
            given = payload[0] if self._single else payload
            self.codec.subtract(array, given, *self._places(draw))
        else:
            array -= self.decode(payload, array.shape, array.dtype, draw)

    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout | None:
        """Return what each payload looks like, or None if that depends on the numbers."""
        layout: Layout | None = self.codec.layout(shape, dtype) if self._ours else None
        return layout

    def nbytes(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Return the bytes of a payload."""
        layout = self.layout(shape, dtype)
        if layout is not None:
            return sum(prod(s) * np.dtype(d).itemsize for d, s in layout)
        if (own := getattr(self.codec, "nbytes", None)) is not None:
            return int(own(shape, dtype))
        zeros = np.zeros(shape, dtype)
        return sum(part.nbytes for part in self.encode(zeros, lambda: np.random.default_rng(0)))

    def _places(self, draw: Draw) -> tuple[np.random.Generator, ...]:
        """Return what `decode` takes beside the rest."""
        return (draw(),) if self.draws == "shared" else ()

    def _plain(self, part: Any) -> NDArray[Any]:
        if dtype_name(part) not in DTYPES:
            raise UsageError(
                f"{name_of(self.codec)}.encode: expected arrays of the dtypes "
                f"{', '.join(DTYPES)}, got {part.dtype}. View another one as its bytes: "
                "x.view('uint8')."
            )
        return np.asarray(part, part.dtype.newbyteorder("="), order="C")


def _kinds(got: Any) -> str:
    if isinstance(got, np.ndarray):
        return f"an array {got.shape} {got.dtype.name}"
    if isinstance(got, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in got) or 'nothing'}"
    return type(got).__name__
