"""What compression needs of the members: a sum and a gather. Nothing here knows MPI."""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.labels import mismatch
from mpiml.errors import MpimlError, RemoteError, UsageError

__all__ = ["Exchange", "agree", "sum_together"]

_Bytes = NDArray[np.uint8]
_RECORD: Final = struct.Struct("<B7xQ8s")  # failed, bytes that follow, what I am doing
#: bytes of the record with which each call begins
RECORD_BYTES: Final = _RECORD.size
_MOST_TEXT: Final = 20_000  # bytes of a text about a failure


class Exchange(Protocol):
    """The members of a collective, as compression sees them.

    Members call the same methods in the same order. A method raises on all members or on none,
    ends of the program apart.

    Attributes
    ----------
    index : int
        This member.
    size : int
        Number of members.
    names : sequence of str
        How messages call each member.
    """

    @property
    def index(self) -> int:
        """Number of the member who calls."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def names(self) -> Sequence[str]:
        """How messages call each member."""

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Sum a 1-D array over the members, in place; return it.

        Collective: same length and dtype. Bitwise the same result on every member.
        """

    def gather(self, array: _Bytes, lengths: Sequence[int]) -> list[_Bytes]:
        """Return the array of each member.

        Collective: `lengths`, of each member's array, is the same on all of them.
        """


def agree(
    exchange: Exchange,
    where: str,
    text: str,
    length: int,
    error: Exception | None,
    what: str = "",
) -> list[int]:
    """Go on together, or raise the same error together.

    Collective over `exchange`.

    Parameters
    ----------
    exchange : Exchange
        The members.
    where : str
        Opens the message of an error.
    text : str
        What this member does, as `mpiml.collectives.labels.mismatch` takes it. Compared.
    length : int
        Of what this member will gather next; returned to the others.
    error : Exception, optional
        Why this member cannot go on.
    what : str
        What it wanted to do, for the message.

    Returns
    -------
    list of int
        The `length` of each member.

    Raises
    ------
    UsageError
        A member cannot go on, for a reason that the user can remove; or they do different
        things.
    RemoteError
        A member cannot go on since the user's own code failed there. The exception itself is
        the ``__cause__`` on that member.
    """
    digest = blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    own = _RECORD.pack(error is not None, length, digest)
    records = [
        _RECORD.unpack(record.tobytes())
        for record in exchange.gather(_bytes(own), [RECORD_BYTES] * exchange.size)
    ]
    failed = [bool(record[0]) for record in records]
    if not any(failed) and len({record[2] for record in records}) == 1:
        return [record[1] for record in records]
    said = text if error is None else _said(error, what)
    texts = _texts(exchange, said)
    if any(failed):
        raise _failure(exchange, where, texts, failed) from error
    raise mismatch(texts, where)


def sum_together(exchange: Exchange, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Sum many arrays over the members by one message for each dtype.

    Collective over `exchange`: same shapes and dtypes in the same order.

    Parameters
    ----------
    exchange : Exchange
        The members.
    arrays : sequence of ndarray
        C-contiguous; an array that is the only one of its dtype is overwritten.

    Returns
    -------
    list of ndarray
        Of the same shapes and dtypes.
    """
    kinds: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        kinds.setdefault(array.dtype, []).append(number)
    sums: dict[int, NDArray[Any]] = {}
    for numbers in kinds.values():
        flat = arrays[numbers[0]].reshape(-1)
        if len(numbers) > 1:
            flat = np.concatenate([arrays[number].reshape(-1) for number in numbers])
        if flat.size:
            flat = exchange.sum(flat)
        start = 0
        for number in numbers:
            stop = start + arrays[number].size
            sums[number] = flat[start:stop].reshape(arrays[number].shape)
            start = stop
    return [sums[number] for number in range(len(arrays))]


def _bytes(text: bytes) -> _Bytes:
    return np.frombuffer(text, np.uint8)


def _said(error: Exception, what: str) -> str:
    kind = "" if isinstance(error, MpimlError) else f"{type(error).__name__}: "
    wanted = f"{what}: " if what else ""
    return f"{'u' if isinstance(error, UsageError) else 'r'}{wanted}{kind}{error}"


def _texts(exchange: Exchange, said: str) -> list[str]:
    """Return what each member has to say: a gather of lengths, then one of texts."""
    own = said.encode("utf-8", "backslashreplace")[:_MOST_TEXT]
    lengths = exchange.gather(_bytes(len(own).to_bytes(8, "little")), [8] * exchange.size)
    counts = [int.from_bytes(length.tobytes(), "little") for length in lengths]
    return [
        said.tobytes().decode("utf-8", "replace")
        for said in exchange.gather(_bytes(own), counts)
    ]


def _failure(
    exchange: Exchange, where: str, texts: Sequence[str], failed: Sequence[bool]
) -> MpimlError:
    who = [number for number, bad in enumerate(failed) if bad]
    shown = "; ".join([f"{exchange.names[n]}: {texts[n][1:]}" for n in who[:3]])
    more = f"; and {len(who) - 3} members more" if len(who) > 3 else ""
    kind = UsageError if all(texts[n][:1] == "u" for n in who) else RemoteError
    return kind(f"{where}: {shown}{more}")
