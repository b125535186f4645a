"""Filtered messages: which entries of a piece are in it, and lists of them that both ends keep.

A message is None (nothing to tell) or a tuple ``(number, form, places, *arrays)``:

number : int
    How many came before it, of this piece: both ends count.
form : str
    Letters: ``d`` all entries, ``s`` those at the places, ``z`` those at the places and zero
    elsewhere; then ``c`` if the arrays are a codec's payload and no values; then ``k`` if both
    ends keep the list of places.
places : ndarray, int or None
    uint16, uint32 and uint64 are indices, uint8 is one bit for each entry of the piece, an int is the
    hash of a list that is kept.
"""

from collections import OrderedDict
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiml.errors import UsageError

__all__ = ["Entries", "Lists", "Statistics", "out_of_step", "places_nbytes", "read", "write"]


class Entries(NamedTuple):
    """Some entries of a piece, or all.

    Attributes
    ----------
    indices : ndarray or None
        int64, ascending, none twice; None: all.
    values : ndarray
    """

    indices: NDArray[np.int64] | None
    values: NDArray[Any]

    def kept(self, chosen: NDArray[np.bool_]) -> "Entries":
        """Return those that are chosen; the same object if all are."""
        count = int(np.count_nonzero(chosen))
        if count == len(chosen):
            return self
        places = np.flatnonzero(chosen).astype(np.int64, copy=False)
        indices = places if self.indices is None else self.indices[places]
        return Entries(indices, self.values[places])


class Statistics(NamedTuple):
    """What one filter did so far.

    Attributes
    ----------
    entries_seen, entries_sent : int
        That came in, and that it let through.
    bytes_before, bytes_after : int
        Of a message made of what came in, and of what went out.
    """

    entries_seen: int = 0
    entries_sent: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def places_nbytes(size: int, count: int) -> int:
    """Return the bytes of the places of `count` entries of a piece: indices or bits."""
    return min(count * _index_dtype(size).itemsize, -(-size // 8))


def write(indices: NDArray[np.int64], size: int) -> NDArray[Any]:
    """Return places as an array of the fewest bytes.

    Parameters
    ----------
    indices : ndarray of int64
        Ascending, none twice.
    size : int
        Entries of the piece.
    """
    dtype = _index_dtype(size)
    if len(indices) * dtype.itemsize <= -(-size // 8):
        return indices.astype(dtype)
    chosen = np.zeros(size, np.bool_)
    chosen[indices] = True
    return np.packbits(chosen, bitorder="little")


def read(places: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Return what `write` has written, as int64."""
    if places.dtype == np.uint8:
        # 0 and 1 as bools: NumPy finds those several times faster
        chosen = np.unpackbits(places, count=size, bitorder="little").view(np.bool_)
        return np.flatnonzero(chosen).astype(np.int64, copy=False)
    return places.astype(np.int64)


class Lists:
    """Lists by their hashes, those used last; one at each end, fed by the same messages.

    What is thrown away depends on the order of the messages only, so both ends hold the same.

    Parameters
    ----------
    most : int
        How many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lists: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lists)

    def find(self, places: NDArray[Any]) -> tuple[int, bool]:
        """Return the hash of a list, and whether this very list is kept; it is from now on."""
        name = _hash(places)
        kept = self._lists.get(name)
        # two lists of one hash: the newer one is sent and takes the place of the older
        same = kept is not None and np.array_equal(kept, places)
        self.keep(name, kept if same and kept is not None else places)
        return name, same

    def keep(self, name: int, places: NDArray[Any]) -> None:
        """Put a list in as the one used last."""
        self._lists[name] = places
        self._lists.move_to_end(name)
        if len(self._lists) > self._most:
            self._lists.popitem(last=False)

    def take(self, places: NDArray[Any] | int) -> NDArray[Any]:
        """Return the list that a message has brought, or named by its hash; it is kept.

        Raises
        ------
        UsageError
            There is none of this hash: messages were lost.
        """
        if not isinstance(places, int):
            self.keep(_hash(places), places.copy())  # not the memory of a message
            return places
        kept = self._lists.get(places)
        if kept is None:
            raise out_of_step(f"a list of places that both ends keep, got its hash {places:x}")
        self._lists.move_to_end(places)
        return kept


def out_of_step(expected: str) -> UsageError:
    """Return the error for a message that is not the next one."""
    return UsageError(
        f"ParameterServerNode: filters: expected {expected}. Messages of one worker and one "
        "server have to be decoded all, each once and in their order, those too whose gradients "
        "are not used; begin again with new encoders and decoders at both ends."
    )


def _hash(places: NDArray[Any]) -> int:
    # one bit for each entry and indices of the same bytes are told apart
    found = blake2b(places.dtype.char.encode(), digest_size=8)
    found.update(np.ascontiguousarray(places).view(np.uint8).data)
    return int.from_bytes(found.digest(), "little")


def _index_dtype(size: int) -> "np.dtype[Any]":
    return np.dtype(
        np.uint16 if size <= 1 << 16 else np.uint32 if size <= 1 << 32 else np.uint64
    )
