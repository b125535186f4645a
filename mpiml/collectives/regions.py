"""Where the arrays of a tree lie in one block of memory, and which part of it is whose.

Pure: no memory is taken here. Leaves of one dtype lie in one region, so that one pass reduces
them all. Each leaf and each region starts on a cache line; the elements in between are
reduced too, and nobody sees them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from mpiml.collectives.ops import dtype_code, dtype_name, numpy_dtype
from mpiml.errors import UsageError

__all__ = [
    "Leaf",
    "Region",
    "Regions",
    "first_difference",
    "itemsize_of",
    "members",
    "specs_of",
    "stripe",
]

#: bytes; of a cache line, and of the widest vector register
LINE: Final = 64

_MOST: Final = 1 << 47  # bytes that a process can address

_BYTES: Final = {"bfloat16": 2, "bool": 1}  # known without ml_dtypes


class Leaf(NamedTuple):
    """One array of the tree."""

    path: str  #: how one writes it: ``['w'][0]``
    shape: tuple[int, ...]
    dtype_name: str

    def text(self) -> str:
        """Return the line that members compare."""
        return f"{self.path or 'the array'} {self.shape} {self.dtype_name}"


class Region(NamedTuple):
    """All leaves of one dtype."""

    dtype_name: str
    code: int  #: mpiml::Dtype
    offset: int  #: bytes from the start of the block, a multiple of 64
    #: elements, those between two leaves included
    count: int  # type: ignore[assignment]  # hides tuple.count

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize_of(self.dtype_name)

    @property
    def nbytes(self) -> int:
        """Bytes of the region, a multiple of 64."""
        return self.count * self.itemsize


class Regions:
    """The layout of a tree's arrays in one block.

    Local: no MPI; equal leaves give the same layout in every process.

    Parameters
    ----------
    leaves : iterable of Leaf
        In the order of the tree. Regions stand in the order in which their dtypes appear.

    Raises
    ------
    UsageError
        They are larger than any memory.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self.leaves = tuple(leaves)
        groups: dict[str, list[int]] = {}
        for number, leaf in enumerate(self.leaves):
            groups.setdefault(leaf.dtype_name, []).append(number)
        offsets = [0] * len(self.leaves)
        regions: list[Region] = []
        end = 0
        for name, numbers in groups.items():
            start, size = end, itemsize_of(name)
            for number in numbers:
                offsets[number] = end
                end += _whole_lines(math.prod(self.leaves[number].shape) * size)
            code = dtype_code(name, "mpiml.collectives")
            regions.append(Region(name, code, start, (end - start) // size))
        if end > _MOST:
            raise UsageError(
                f"mpiml.collectives: expected at most {_MOST:,} bytes, which a process can "
                f"address, got arrays of {end:,} bytes together. Look at the shapes."
            )
        self.regions = tuple(regions)
        self.nbytes = end  #: of the block, a multiple of 64
        self._offsets = tuple(offsets)

    def leaf(self, number: int) -> tuple[int, tuple[int, ...], str]:
        """Return the offset in bytes, the shape and the dtype's name of a leaf."""
        leaf = self.leaves[number]
        return self._offsets[number], leaf.shape, leaf.dtype_name

    def views(self, memory: Any) -> list["np.ndarray[Any, Any]"]:
        """Return the leaves as arrays in `memory`, in the order of the tree.

        Parameters
        ----------
        memory : buffer
            At least `nbytes` bytes, C-contiguous. The views keep it, and are read-only
            where it is.
        """
        return [
            np.ndarray(leaf.shape, numpy_dtype(leaf.dtype_name), memory, offset)
            for leaf, offset in zip(self.leaves, self._offsets, strict=True)
        ]

    def flat(self, memory: Any) -> list["np.ndarray[Any, Any]"]:
        """Return each region as one array of shape (count,) in `memory`."""
        return [
            np.ndarray((r.count,), numpy_dtype(r.dtype_name), memory, r.offset)
            for r in self.regions
        ]

    def digest_text(self) -> str:
        """Return one line per leaf, path, shape and dtype: equal where the layouts are."""
        return "\n".join([leaf.text() for leaf in self.leaves])


def specs_of(leaves: Sequence[Any], paths: Sequence[str]) -> list[Leaf]:
    """Return what the layout needs to know of arrays of any library."""
    return [
        Leaf(path, tuple(map(int, leaf.shape)), dtype_name(leaf))
        for leaf, path in zip(leaves, paths, strict=True)
    ]


def stripe(count: int, itemsize: int, index: int, size: int) -> tuple[int, int]:
    """Return which elements of a region member `index` of `size` combines.

    Parameters
    ----------
    count : int
        Elements of the region.
    itemsize : int
        Bytes of one: 1, 2, 4, 8 or 16.
    index, size : int
        The member, and how many there are.

    Returns
    -------
    low, high : int
        A half-open range that starts on a cache line, so that no two members write to one.
        The stripes of all members follow each other and cover 0 to `count`.
    """
    line = LINE // itemsize
    lines = -(-count // line)
    return (
        min(lines * index // size * line, count),
        min(lines * (index + 1) // size * line, count),
    )


def first_difference(texts: Sequence[str], counted: str = "leaf") -> str:
    """Return the first line in which the members differ, and who says what.

    Parameters
    ----------
    texts : sequence of str
        What `Regions.digest_text` returned on each member, in their order.
    counted : str
        What a line is of; empty: lines are not numbered.

    Returns
    -------
    str
        For instance ``leaf 2: ['w'] (3,) float32 (members 0, 2-3), ['w'] (4,) float32
        (member 1)``; empty where all are equal.
    """
    tables = [text.splitlines() for text in texts]
    absent = f"no such {counted}" if counted else "nothing more"
    for number in range(max(map(len, tables), default=0)):
        groups: dict[str, list[int]] = {}
        for member, table in enumerate(tables):
            line = table[number] if number < len(table) else absent
            groups.setdefault(line, []).append(member)
        if len(groups) > 1:
            said = ", ".join([f"{line} ({members(who)})" for line, who in groups.items()])
            return f"{counted} {number}: {said}" if counted else said
    return ""


def members(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``members 0, 2-5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join([f"{a}" if a == b else f"{a}-{b}" for a, b in runs])
    return f"{'member' if len(numbers) == 1 else 'members'} {text}"


def itemsize_of(name: str) -> int:
    """Return the bytes of an element."""
    return _BYTES.get(name) or np.dtype(name).itemsize


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
