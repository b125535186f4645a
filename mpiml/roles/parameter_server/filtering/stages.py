"""The single filters at work: which entries they choose, and values as a codec's payloads."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.codec import reducer_of
from mpiml.collectives.compression.coding import Coding, Draw, Payload
from mpiml.collectives.compression.draws import generator, uniform
from mpiml.collectives.compression.feedback import Coded
from mpiml.collectives.compression.sign import SignMajority
from mpiml.errors import UsageError
from mpiml.filters import KKT, Filter, RandomSkip, SignificantlyModified
from mpiml.roles.parameter_server.filtering.wire import Entries

__all__ = ["Coder", "Stage", "nonzero", "stages_of"]


class Stage(ABC):
    """A filter that chooses entries."""

    @abstractmethod
    def push(self, piece: int, entries: Entries, parameters: Any) -> Entries:
        """Return what is sent of a gradient; `parameters` are what the worker pulled last."""

    @abstractmethod
    def pull(self, piece: int, entries: Entries, sent: Any) -> Entries:
        """Return what is sent of the parameters; `sent` is what the worker has of them."""


class _KKT(Stage):
    """`KKT`."""

    def __init__(self, spec: KKT) -> None:
        self._limit = spec.lam - spec.delta

    def push(self, piece: int, entries: Entries, parameters: Any) -> Entries:
        """Leave out what would not move a zero parameter."""
        mine = parameters if entries.indices is None else parameters[entries.indices]
        chosen = np.abs(entries.values) >= self._limit
        chosen |= mine != 0
        return entries.kept(chosen)

    def pull(self, piece: int, entries: Entries, sent: Any) -> Entries:
        """Leave all: it is for gradients only."""
        return entries


class _Significant(Stage):
    """`SignificantlyModified`.

    Parameters
    ----------
    spec : SignificantlyModified
    sizes, dtypes : sequence
        Of the pieces.
    """

    def __init__(
        self, spec: SignificantlyModified, sizes: Sequence[int], dtypes: Sequence[Any]
    ) -> None:
        self._threshold = spec.threshold
        self._kinds = list(zip(sizes, dtypes, strict=True))
        self._sums: dict[int, NDArray[Any]] = {}  # piece -> what was not sent

    def push(self, piece: int, entries: Entries, parameters: Any) -> Entries:
        """Add up; return the sums beyond the threshold, which begin at zero again."""
        sums = self._sums.get(piece)
        if sums is None:
            sums = self._sums[piece] = np.zeros(*self._kinds[piece])
        if entries.indices is None:
            sums += entries.values
            chosen = np.abs(sums) > self._threshold
            sent = Entries(None, sums).kept(chosen)
            if sent.values is sums:
                sent = Entries(None, sums.copy())
            np.copyto(sums, 0, where=chosen)
            return sent
        # no other sum is beyond: it would have been sent before
        some = sums[entries.indices]
        some += entries.values
        chosen = np.abs(some) > self._threshold
        sums[entries.indices] = np.where(chosen, some.dtype.type(0), some)
        return Entries(entries.indices, some).kept(chosen)

    def pull(self, piece: int, entries: Entries, sent: Any) -> Entries:
        """Return the entries that are further from what was sent than the threshold."""
        known = sent if entries.indices is None else sent[entries.indices]
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(entries.values - known) <= self._threshold
        return entries.kept(~near)  # NaN is near to nothing, and sent


class _Skip(Stage):
    """`RandomSkip`.

    Parameters
    ----------
    spec : RandomSkip
    what : str
        ``"push"`` or ``"pull"``.
    stream : int
        Who draws: others draw other numbers.
    """

    def __init__(self, spec: RandomSkip, what: str, stream: int) -> None:
        self._spec = spec
        self._what = what
        self._stream = stream
        self._drawn: dict[int, int] = {}  # piece -> how often

    def push(self, piece: int, entries: Entries, parameters: Any) -> Entries:
        """Leave some out, and divide the others by the probability that they are sent."""
        left = self.pull(piece, entries, None)
        scale = entries.values.dtype.type(1 - self._spec.probability)
        return Entries(left.indices, left.values / scale)

    def pull(self, piece: int, entries: Entries, sent: Any) -> Entries:
        """Leave some out."""
        step = self._drawn.get(piece, 0)
        self._drawn[piece] = step + 1
        name = f"{self._what} {piece}"
        rng = generator(self._spec.seed, "RandomSkip", name, step, self._stream)
        return entries.kept(uniform(rng, len(entries.values)) > self._spec.probability)


def stages_of(
    filters: Sequence[Filter],
    sizes: Sequence[int],
    dtypes: Sequence[Any],
    what: str,
    stream: int,
) -> list[tuple[str, Stage]]:
    """Return names and stages of the filters that choose entries, in their order."""
    stages: list[tuple[str, Stage]] = []
    for each in filters:
        name = type(each).__name__
        if isinstance(each, KKT):
            stages.append((name, _KKT(each)))
        elif isinstance(each, SignificantlyModified):
            stages.append((name, _Significant(each, sizes, dtypes)))
        elif isinstance(each, RandomSkip):
            stages.append((name, _Skip(each, what, stream)))
    return stages


def nonzero(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell where there is another number than +0: -0 is one, its bits are not zero."""
    found: NDArray[np.bool_] = (
        np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}") != 0
    )
    return found


class Coder:
    """`Compressed`: the codec of a compressor, and what its error feedback keeps.

    Parameters
    ----------
    compressor : object
        What `Compressed` holds.
    where : str
        Opens the message of an error.
    what : str
        ``"push"`` or ``"pull"``.
    stream : int
        Who encodes: others draw other numbers.

    Raises
    ------
    UsageError
        It is no codec, or one that needs all workers.
    """

    def __init__(self, compressor: Any, where: str, what: str, stream: int) -> None:
        reducer = reducer_of(compressor, f"{where}: Compressed")
        if not isinstance(reducer, Coded) or isinstance(reducer.codec, SignMajority):
            raise UsageError(
                f"{where}: Compressed: expected a codec that encodes the array of one worker, got "
                f"{compressor!r}, which needs those of all. Take TopK, QSGD, TernGrad, EFSign, "
                "OneBit, RandomK or Cast."
            )
        self.feedback = reducer.feedback
        self._coding = Coding(reducer.codec)
        self._kind = type(reducer.codec).__qualname__
        self._what = what
        self._member = stream if self._coding.draws == "own" else None
        self._residuals: dict[int, NDArray[Any]] = {}
        # `Coding` learns from `encode` what `decode` takes: the end that decodes encodes once;
        # and a codec that cannot is found before anything is sent
        probe = np.ones(8, np.float32)
        self.decode(0, 0, self.encode(0, 0, probe), probe)

    def _draw(self, piece: int, step: int) -> Draw:
        name = f"{self._what} {piece}"
        return functools.partial(
            generator, self._coding.seed, self._kind, name, step, self._member
        )

    def encode(self, piece: int, step: int, array: NDArray[Any]) -> Payload:
        """Return the payload of the array, which shares no memory with it."""
        payload = self._coding.encode(array, self._draw(piece, step))
        return tuple([p.copy() if np.may_share_memory(p, array) else p for p in payload])

    def decode(
        self, piece: int, step: int, payload: Payload, like: NDArray[Any]
    ) -> NDArray[Any]:
        """Return what a payload stands for, in shape and dtype of `like`."""
        draw = self._draw(piece, step)
        return self._coding.decode(payload, like.shape, like.dtype, draw)

    def push(self, piece: int, step: int, entries: Entries, size: int) -> Payload:
        """Return the payload of a gradient and the error of those before, where that is kept."""
        indices, values = entries
        if not self.feedback:
            return self.encode(piece, step, values)
        kept = self._residuals.get(piece)
        if kept is None:
            kept = self._residuals[piece] = np.zeros(size, values.dtype)
        array = kept if indices is None else kept[indices]
        array += values
        payload = self.encode(piece, step, array)
        self._coding.subtract(array, payload, self._draw(piece, step))
        if indices is not None:
            kept[indices] = array
        return payload

    def nbytes(self, count: int, dtype: Any) -> int:
        """Return the bytes of the payload of so many values."""
        return self._coding.nbytes((count,), np.dtype(dtype))
