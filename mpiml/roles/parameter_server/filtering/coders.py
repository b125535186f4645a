"""Filters of gradients and parameters on their way between a worker and a server.

A worker has a `PushEncoder` and a `PullDecoder` for each server, a server a `PushDecoder` and a
`PullEncoder` for each worker. Pure: what travels is plain, and messages are decoded all, in
order. Sources: Li et al., OSDI 2014, section 5, and NIPS 2014; `mpiml.filters` says what each
filter does.

On a pull, server and worker hold the same copy of what the worker was sent. Filters choose from
the difference between the parameters and this copy, so what one message leaves out, or a codec
rounds off, is still there to be sent by a later one.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.errors import UsageError
from mpiml.filters import KKT, Compressed, RandomSkip, SignificantlyModified
from mpiml.roles.parameter_server.filtering.ends import Decoder, Encoder
from mpiml.roles.parameter_server.filtering.stages import Coder
from mpiml.roles.parameter_server.filtering.wire import Entries, out_of_step
from mpiml.roles.parameter_server.store import Sparse, summed

__all__ = ["PullDecoder", "PullEncoder", "PushDecoder", "PushEncoder"]


class PushEncoder(Encoder):
    """At a worker, one for each server: gradients to messages. Local.

    Parameters are those of `mpiml.roles.parameter_server.filtering.ends.End`.
    """

    @property
    def needs_parameters(self) -> bool:
        """Whether `encode` has to be given what the worker pulled last."""
        return self._has(KKT)

    def encode(self, piece: int, gradient: Any, parameters: NDArray[Any] | None = None) -> Any:
        """Return the message for a gradient of a piece; without filters the gradient itself.

        Parameters
        ----------
        piece : int
        gradient : ndarray, Sparse or None
            Of finite numbers. It is not changed, and may be part of the message. Entries of a
            `Sparse` that come twice are added up.
        parameters : ndarray, optional
            Those of the piece that the worker pulled last.

        Returns
        -------
        tuple, ndarray, Sparse or None
            None: there is nothing to send.

        Raises
        ------
        UsageError
            A filter needs the parameters, and there are none.
        """
        if not self._filters or gradient is None:
            return gradient
        if parameters is None and self.needs_parameters:
            raise UsageError(
                "push: the filter KKT looks at the parameters that were pulled last, and there are "
                "none. pull() first."
            )
        entries = _entries(gradient, self._dtypes[piece])
        self._count("all", len(entries.values), 0, self._nbytes(piece, entries), 0)
        entries = self._filtered(piece, entries, parameters)
        if entries.indices is not None and not len(entries.values):
            return None
        left = self._suppressed(piece, entries, self._coder is not None)
        form = _form(entries, left)
        payload = None
        if self._coder is not None and len(left.values):
            number = self._numbers[piece]
            payload = self._coder.push(piece, number, left, self._sizes[piece])
        return self._message(piece, form, left, payload)


class PushDecoder(Decoder):
    """At a server, one for each worker: messages to gradients. Local.

    Parameters are those of `mpiml.roles.parameter_server.filtering.ends.End`.
    """

    def decode(self, piece: int, message: Any) -> Any:
        """Return the gradient that a message stands for: an ndarray, a `Sparse`, or None.

        Entries that a filter left out are not in it: where the message has only some, it is a
        `Sparse`.

        Raises
        ------
        UsageError
            It is not the next message of this piece.
        """
        if not self._filters or message is None:
            return message
        form, indices, values = self._read(piece, message)
        if form[0] == "d":
            return values
        if form[0] == "s":
            return Sparse(indices, values)
        dense = np.zeros(self._sizes[piece], self._dtypes[piece])
        dense[indices] = values
        return dense


class PullEncoder(Encoder):
    """At a server, one for each worker: parameters to messages. Local.

    Parameters are those of `mpiml.roles.parameter_server.filtering.ends.End`.
    """

    _pull = True

    def _begin(self, stream: int) -> None:
        super()._begin(stream)
        self._remembers = self._has(SignificantlyModified, Compressed)
        self._sent: dict[int, NDArray[Any]] = {}  # piece -> what the worker has

    def encode(self, piece: int, values: NDArray[Any]) -> Any:
        """Return the message for the parameters of a piece; without filters the array itself.

        Parameters
        ----------
        piece : int
        values : ndarray
            All of the piece. It is not changed, and may be part of the message.

        Returns
        -------
        tuple, ndarray or None
            None: there is nothing to send, the worker's copy is good.
        """
        if not self._filters:
            return values
        whole = Entries(None, values)
        self._count("all", len(values), 0, values.nbytes, 0)
        first = self._numbers[piece] == 0  # the worker has nothing that could be kept
        entries = whole if first else self._filtered(piece, whole, self._sent.get(piece))
        if entries.indices is not None and not len(entries.values):
            return None
        if self._coder is not None and not first:
            known = self._sent[piece]
            known = known if entries.indices is None else known[entries.indices]
            with np.errstate(invalid="ignore", over="ignore"):
                change = Entries(entries.indices, entries.values - known)
            if np.isfinite(change.values).all():
                return self._difference(piece, self._coder, change)
            # the training is lost, and codecs refuse it: the worker gets to see it as it is
        left = self._suppressed(piece, entries, False)
        form = _form(entries, left)
        if self._remembers:
            if entries.indices is not None:
                self._sent[piece][entries.indices] = entries.values
            elif first:
                self._sent[piece] = np.array(entries.values)
            else:
                self._sent[piece][:] = entries.values
        return self._message(piece, form, left, None)

    def _difference(self, piece: int, coder: Coder, change: Entries) -> Any:
        """Return a message that brings the worker's copy nearer, as a codec allows."""
        number = self._numbers[piece]
        left = self._suppressed(piece, change, True)
        if not len(left.values):
            return None
        payload = coder.encode(piece, number, left.values)
        arrived = coder.decode(piece, number, payload, left.values)
        _add(self._sent[piece], left.indices, arrived)
        return self._message(piece, "d" if left.indices is None else "s", left, payload)


class PullDecoder(Decoder):
    """At a worker, one for each server: messages to parameters. Local.

    Parameters are those of `mpiml.roles.parameter_server.filtering.ends.End`.
    """

    _pull = True

    def _begin(self, stream: int) -> None:
        super()._begin(stream)
        self._partial = self._has(SignificantlyModified, RandomSkip, Compressed)
        self._copies: dict[int, NDArray[Any]] = {}

    def decode(self, piece: int, message: Any) -> NDArray[Any]:
        """Return the parameters of a piece, in an array that may be kept.

        Raises
        ------
        UsageError
            It is not the next message of this piece.
        """
        if not self._filters:
            array: NDArray[Any] = message
            return array
        copy = self._copies.get(piece)
        if message is None:
            if copy is None:
                raise out_of_step(
                    f"a message with all of piece {piece} first, got an empty one"
                )
            return copy.copy()
        form, indices, values = self._read(piece, message)
        if not self._partial and form[0] == "d":
            return values.copy()
        if copy is None or not self._partial:
            copy = np.zeros(self._sizes[piece], self._dtypes[piece])
        if "c" in form:
            _add(copy, indices, values)
        elif indices is None:
            copy[:] = values
        else:
            if form[0] == "z":
                copy[:] = 0
            copy[indices] = values
        if not self._partial:
            return copy
        self._copies[piece] = copy
        return copy.copy()


def _form(entries: Entries, left: Entries) -> str:
    """Return the letter of a message of what zero suppression has left of some entries."""
    if left.indices is None:
        return "d"
    return "s" if left.indices is entries.indices else "z"


def _entries(gradient: Any, dtype: Any) -> Entries:
    """Return a gradient's entries, ascending, each once; values that come twice are added up."""
    if not isinstance(gradient, Sparse):
        return Entries(None, np.asarray(gradient, dtype))
    indices = np.asarray(gradient.indices, np.int64)
    return Entries(*summed(indices, np.asarray(gradient.values, dtype)))


def _add(array: NDArray[Any], indices: NDArray[np.int64] | None, values: NDArray[Any]) -> None:
    if indices is None:
        array += values
    else:
        array[indices] += values  # none twice
