"""Where the numbers of a tree are: which server has them, and at which byte of its memory.

Pure; the same on servers and workers, who make it of the same arrays. The leaves lie one after
another in a block, each on a cache line. A server holds the part of this block that its pieces
lie in, so that what it sends, or copies, is one range of bytes.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpiml.errors import UsageError
from mpiml.roles.parameter_server.layout import Piece, split

__all__ = ["LINE", "LeafSpec", "Plan", "Selected"]

LINE = 64  #: bytes of a cache line

_SMALL = 4000  # bytes of a gradient that goes within the call

_FLOATS = ("float32", "float64")


class LeafSpec(NamedTuple):
    """One array of the tree.

    Attributes
    ----------
    path : str
        How one writes it: ``['w'][0]``.
    shape : tuple of int
    dtype : str
    table : bool
        Whether it is a key range, of which there are rows only.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    table: bool = False

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.path or 'the array'} {self.shape} {self.dtype}"


class Selected(NamedTuple):
    """Some elements of a leaf, on one server.

    Attributes
    ----------
    piece : int
        Which of the server's pieces.
    indices : ndarray or None
        Elements, or rows of a key range, from the beginning of the piece; None: all.
    places : ndarray or slice
        Where they belong among what was asked for, which is one axis of elements, or rows.
    """

    piece: int
    indices: Any
    places: Any


class Plan:
    """The parts of a tree on its servers. Local; pure.

    Parameters
    ----------
    leaves : sequence of LeafSpec
        In the order of the tree.
    shards : int
        How many servers.

    Attributes
    ----------
    pieces : list of list of Piece
        Of each server.
    spans : list of (int, int)
        The bytes of the block, from the first to behind the last, that each server holds.
    nbytes : int
        Of the whole block.
    tables : list of int
        The leaves that are key ranges; they have no part in the block.

    Raises
    ------
    UsageError
        A leaf is neither float32 nor float64; there are more servers than parts.
    """

    def __init__(self, leaves: Sequence[LeafSpec], shards: int) -> None:
        self.leaves = tuple(leaves)
        for leaf in self.leaves:
            if leaf.dtype not in _FLOATS:
                raise UsageError(
                    f"ParameterServerNode: init: expected arrays of float32 or float64, got {leaf}"
                )
        sizes = [leaf.shape[0] if leaf.table else leaf.size for leaf in self.leaves]
        items = [np.dtype(leaf.dtype).itemsize for leaf in self.leaves]
        self.tables = [i for i, leaf in enumerate(self.leaves) if leaf.table]
        self.pieces = split(sizes, items, shards, self.tables)
        self._items = items
        self._at: list[int] = []
        end = 0
        for leaf, size, item in zip(self.leaves, sizes, items, strict=True):
            self._at.append(end)
            end += 0 if leaf.table else -(-size * item // LINE) * LINE
        self.nbytes = end
        self.spans = [self._span(pieces) for pieces in self.pieces]
        self._small = [self._is_small(pieces) for pieces in self.pieces]
        # of each leaf: server, number of the piece there, piece
        self._of_leaf: list[list[tuple[int, int, Piece]]] = [[] for _ in self.leaves]
        for shard, pieces in enumerate(self.pieces):
            for number, piece in enumerate(pieces):
                self._of_leaf[piece.leaf].append((shard, number, piece))

    def _span(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        dense = [piece for piece in pieces if not self.leaves[piece.leaf].table]
        if not dense:
            return 0, 0
        first, last = dense[0], dense[-1]
        begin = self._at[first.leaf] + first.start * self._items[first.leaf]
        return begin, self._at[last.leaf] + last.stop * self._items[last.leaf]

    def _is_small(self, pieces: Sequence[Piece]) -> bool:
        sizes = [(p.stop - p.start) * self._items[p.leaf] for p in pieces]
        return sum(sizes) <= _SMALL and not any(self.leaves[p.leaf].table for p in pieces)

    def message(self, shard: int, parts: list[Any]) -> Any:
        """Return dense parts for a server as they are sent: bytes, if they are few."""
        return b"".join([part.tobytes() for part in parts]) if self._small[shard] else parts

    def received(self, shard: int, message: Any) -> list[Any]:
        """Return the parts of which `message` was made; read-only, where they came as bytes."""
        if type(message) is not bytes:
            return message  # type: ignore[no-any-return]
        found, at = [], 0
        for leaf, start, stop in self.pieces[shard]:
            found.append(np.frombuffer(message, self.leaves[leaf].dtype, stop - start, at))
            at += found[-1].nbytes
        return found

    def arrays(self, shard: int, memory: Any) -> list[Any]:
        """Return the pieces of a server, each as one axis, in the memory that holds its span.

        None stands for one of a key range.
        """
        begin, _ = self.spans[shard]
        found: list[Any] = []
        for leaf, start, stop in self.pieces[shard]:
            if self.leaves[leaf].table:
                found.append(None)
                continue
            at = self._at[leaf] + start * self._items[leaf] - begin
            found.append(np.frombuffer(memory, self.leaves[leaf].dtype, stop - start, at))
        return found

    def whole(self, block: Any) -> "list[np.ndarray[Any, Any]]":
        """Return the leaves in memory of the whole block. There must be no key range."""
        return [
            np.frombuffer(block, leaf.dtype, leaf.size, at).reshape(leaf.shape)
            for leaf, at in zip(self.leaves, self._at, strict=True)
        ]

    def joined(self, spans: Sequence[Any]) -> "list[np.ndarray[Any, Any]]":
        """Return the leaves, where the memory of each server's span is given.

        There must be no key range. Leaves that lie on one server are views of its memory.
        """
        return self.assembled([self.arrays(i, memory) for i, memory in enumerate(spans)])

    def assembled(self, arrays: Sequence[Sequence[Any]]) -> "list[np.ndarray[Any, Any]]":
        """Return the leaves, where the pieces of each server are given, each as one axis."""
        found = []
        for leaf, places in zip(self.leaves, self._of_leaf, strict=True):
            parts = [arrays[shard][number] for shard, number, _ in places]
            if not parts:
                found.append(np.empty(leaf.shape, leaf.dtype))
                continue
            flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
            found.append(flat.reshape(leaf.shape))
        return found

    def parts(self, leaves: "Sequence[np.ndarray[Any, Any]]") -> list[list[Any]]:
        """Return what of the leaves belongs to each server: an array for each piece, a view.

        There must be no key range.
        """
        flat = [leaf.reshape(-1) for leaf in leaves]
        return [
            [flat[piece.leaf][piece.start : piece.stop] for piece in pieces]
            for pieces in self.pieces
        ]

    def select(self, leaf: int, rows: Any = None) -> list[tuple[int, Selected]]:
        """Return where a leaf is, or some rows of it: for each server that has some.

        Parameters
        ----------
        leaf : int
            Which.
        rows : ndarray, optional
            (n,) int64, along the first axis; all by default. Of a key range: keys.
        """
        found: list[tuple[int, Selected]] = []
        places = self._of_leaf[leaf]
        if rows is None:
            for shard, number, piece in places:
                whole = slice(piece.start, piece.stop)
                found.append((shard, Selected(number, None, whole)))
            return found
        spec = self.leaves[leaf]
        width = 1 if spec.table else prod(spec.shape[1:])
        flat = rows if width == 1 else (rows[:, None] * width + np.arange(width)).reshape(-1)
        bounds = [piece.start for _, _, piece in places]
        which = np.searchsorted(bounds, flat, side="right") - 1
        for i, (shard, number, piece) in enumerate(places):
            here = np.flatnonzero(which == i)
            if len(here):
                found.append((shard, Selected(number, flat[here] - piece.start, here)))
        return found
