"""The base of mpiml's own codecs: the arithmetic, and by delegation the memory of a user.

A codec is a value: `encode` and `decode` depend on their arguments only. What has to be
remembered from step to step is kept by the `Reducer` behind it, which is error feedback for the
biased ones.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.coding import Encodes, Layout, Payload
from mpiml.collectives.compression.feedback import Coded
from mpiml.collectives.compression.reducer import Reducer
from mpiml.collectives.compression.state import Memory, Remembers
from mpiml.errors import UsageError

__all__ = ["Codec", "check_seed", "count_of", "reducer_of"]


class Codec(Remembers):
    """A codec of mpiml's own, with what it remembers when it is passed as `compress=`.

    Local: `encode` and `decode` talk to nobody.
    """

    biased: bool  #: error feedback is used
    reducible: ClassVar[bool] = False  #: payloads may be summed
    draws: ClassVar[Literal["own", "shared"] | None] = None  #: random numbers, as in `Encodes`
    finite: ClassVar[bool] = True  #: NaN and infinity are refused
    seed = 0
    _settings: ClassVar[
        tuple[str, ...]
    ] = ()  # attributes that `repr` shows and members compare

    #: the payload for an array, which may be read-only; takes a generator where it draws
    encode: Any

    @abstractmethod
    def layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return dtype and shape of each array of a payload."""

    @abstractmethod
    def decode(self, payload: Any, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return what a payload stands for, in that shape and dtype."""

    def combine(self, payloads: Sequence[Payload], total: NDArray[Any], members: int) -> None:
        """Fill `total` with the sum of what the payloads stand for, added in their order."""
        total.fill(0)
        for payload in payloads:
            total += self.decode(payload, total.shape, total.dtype)

    def subtract(self, array: NDArray[Any], payload: Any) -> None:
        """Take what a payload stands for from `array`, in place."""
        array -= self.decode(payload, array.shape, array.dtype)

    @property
    def reducer(self) -> Reducer:
        """What uses this codec: error feedback if it is biased."""
        made: Reducer | None = self.__dict__.get("_reducer")
        if made is None:
            # for threads that come at once: one of them puts its own in place
            made = self.__dict__.setdefault("_reducer", Coded(self, self.biased, True))
        return made

    def nbytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Return the bytes that a member sends for an array of that shape and dtype.

        Local: no MPI.
        """
        return self.reducer.nbytes(shape, dtype)

    @property
    def memory(self) -> Memory:
        """What is remembered."""
        return self.reducer.memory

    def __repr__(self) -> str:
        values = [(name, getattr(self, name)) for name in self._settings]
        shown = [f"{k}={v!r}" for k, v in values if v is not None or k not in ("ratio", "k")]
        return f"{type(self).__name__}({', '.join(shown)})"


def reducer_of(compress: Any, where: str) -> Reducer:
    """Return what does the work for a value of `compress=`.

    Local: no MPI.

    Parameters
    ----------
    compress : Reducer, Codec or codec of the user's
        The memory of the latter is kept on the object itself.
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        It is nothing that compresses.
    """
    if isinstance(compress, Reducer):
        return compress
    if isinstance(compress, Codec):
        return compress.reducer
    name = type(compress).__qualname__
    if isinstance(compress, type):
        name = compress.__qualname__
        if issubclass(compress, Reducer | Codec) or isinstance(compress, Encodes):
            raise UsageError(
                f"{where}: compress: expected an object, got the class {name} itself. Make one, "
                f"once, and pass it in every step: {name}(...)."
            )
    if not isinstance(compress, Encodes) or isinstance(compress, type):
        raise UsageError(
            f"{where}: compress: expected None, one of mpiml.collectives.compression, or an "
            f"object with the methods encode(array) and decode(payload, shape, dtype), got {name}"
        )
    try:
        kept = vars(compress)
    except TypeError:
        raise UsageError(
            f"{where}: compress: a {name} has no __dict__ to remember anything in. Wrap it "
            f"once, and pass that in every step: ErrorFeedback({name}(...)) or NoFeedback(...)."
        ) from None
    made: Reducer | None = kept.get("_mpiml_reducer")
    if made is None:
        biased = bool(getattr(compress, "biased", False))
        made = kept.setdefault("_mpiml_reducer", Coded(compress, biased, True))
    return made


def check_seed(seed: Any, where: str) -> int:
    """Return a seed.

    Raises
    ------
    UsageError
        It is no whole number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise UsageError(f"{where}: seed: expected a whole number, got {seed!r}")
    return int(seed)


def count_of(ratio: float | None, k: int | None, where: str) -> tuple[float | None, int | None]:
    """Check the two ways of saying how many elements are sent, of which one is given.

    Raises
    ------
    UsageError
        None or both are given, or one out of its range.
    """
    if (ratio is None) == (k is None):
        raise UsageError(
            f"{where}: expected ratio= (a part of the elements) or k= (a number of them), got "
            f"{'neither' if k is None else 'both'}"
        )
    if ratio is not None and not 0 < ratio <= 1:
        raise UsageError(f"{where}: ratio: expected a number in (0, 1], got {ratio!r}")
    if k is not None and (isinstance(k, bool) or int(k) != k or k < 1):
        raise UsageError(f"{where}: k: expected a whole number from 1 up, got {k!r}")
    return (None if ratio is None else float(ratio)), (None if k is None else int(k))
