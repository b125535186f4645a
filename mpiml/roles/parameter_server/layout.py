"""Which server holds which part of a tree: ranges of about as many bytes, large arrays split.

Pure. The leaves of the tree, flattened and one after another, are one line of bytes; server i of
S holds those from i/S to (i+1)/S of it (as ps-lite, `src/postoffice.cc`), except that a boundary
is moved to the next multiple of `GRAIN` elements of its leaf.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from mpiml.errors import UsageError

__all__ = ["GRAIN", "Piece", "split"]

GRAIN: Final = 16  #: elements: a cache line of float32


class Piece(NamedTuple):
    """A part of one flattened leaf.

    Attributes
    ----------
    leaf : int
        Which.
    start, stop : int
        Its elements.
    """

    leaf: int
    start: int
    stop: int


def split(sizes: Sequence[int], itemsizes: Sequence[int], servers: int) -> list[list[Piece]]:
    """Return the pieces of each server, in the order of the tree.

    Local: a pure function.

    Parameters
    ----------
    sizes, itemsizes : sequence of int
        Elements of each leaf, and bytes of an element.
    servers : int
        How many share them.

    Raises
    ------
    UsageError
        There is so little that a server would hold nothing.
    """
    ends = list(accumulate(n * b for n, b in zip(sizes, itemsizes, strict=True)))
    total = ends[-1] if ends else 0
    bounds = [_boundary(total * i // servers, sizes, itemsizes, ends) for i in range(servers)]
    bounds.append((len(sizes), 0))
    found = [_between(first, last, sizes) for first, last in pairwise(bounds)]
    if not all(found):
        raise UsageError(
            f"ParameterServerNode: shards: expected at most as many as have something to hold, got "
            f"{servers} for {sum(sizes)} numbers in {len(sizes)} arrays, in grains of {GRAIN}"
        )
    return found


def _boundary(
    at: int, sizes: Sequence[int], itemsizes: Sequence[int], ends: Sequence[int]
) -> tuple[int, int]:
    """Return leaf and element where the range begins that should begin at this byte."""
    leaf = bisect_right(ends, at)
    if leaf == len(sizes):
        return leaf, 0
    first = ends[leaf] - sizes[leaf] * itemsizes[leaf]
    element = -(-(at - first) // (itemsizes[leaf] * GRAIN)) * GRAIN
    return (leaf, element) if element < sizes[leaf] else (leaf + 1, 0)


def _between(
    first: tuple[int, int], last: tuple[int, int], sizes: Sequence[int]
) -> list[Piece]:
    pieces = []
    for leaf in range(first[0], min(last[0] + 1, len(sizes))):
        start = first[1] if leaf == first[0] else 0
        stop = last[1] if leaf == last[0] else sizes[leaf]
        if start < stop:
            pieces.append(Piece(leaf, start, stop))
    return pieces
