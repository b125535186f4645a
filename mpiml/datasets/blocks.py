"""Whole lines of a file, block by block, of the part that is a rank's."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiml.datasets.text import without_comments
from mpiml.errors import UsageError

__all__ = ["Survey", "blocks", "compressed", "lines_before", "rows_from", "survey"]

BLOCK: Final = 1 << 22  # bytes of text at a time
_MAGIC: Final[Mapping[bytes, Callable[..., Any]]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


class Survey(NamedTuple):
    """What a look at a whole file found; fields that were not asked for are None."""

    rows: int | None
    zero_based: bool | None


def compressed(path: Path) -> bool:
    """Tell whether the file's first bytes are those of gzip, bzip2 or xz."""
    return _opener(path) is not None


def blocks(path: Path, rank: int = 0, size: int = 1) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a rank's part of the bytes.

    Local: no MPI. The parts of all ranks hold each line once.

    Parameters
    ----------
    path : Path
    rank, size : int
        Part `rank` of `size`; of a compressed file only ``0, 1``.

    Yields
    ------
    int
        Position of the block in the (unpacked) file, in bytes.
    bytes
        Whole lines, about 4 MiB.
    """
    opener = _opener(path)
    if opener is not None:
        with _naming(path), opener(path, "rb") as file:
            yield from _blocks(file, None)
        return
    total = path.stat().st_size
    start, stop = total * rank // size, total * (rank + 1) // size
    with path.open("rb") as plain:
        if start:  # a line that begins before is another rank's
            plain.seek(start - 1)
            plain.readline()
        yield from _blocks(plain, stop)


def rows_from(
    source: Iterator[tuple[int, bytes]], first: int, count: int
) -> Iterator[tuple[int, bytes]]:
    """Cut what `blocks` yields to some of its rows.

    Parameters
    ----------
    source : iterator
    first, count : int
        Rows to leave out, and to take then.
    """
    for at, block in source:
        if count == 0:
            return
        begins = _row_begins(block)
        if first < begins.size:
            taken = min(count, begins.size - first)
            low = int(begins[first])
            last = first + taken
            high = int(begins[last]) if last < begins.size else len(block)
            yield at + low, block[low:high]
            count -= taken
        first = max(0, first - begins.size)


def survey(path: Path, *, rows: bool, zero_based: bool) -> Survey:
    """Look through a file without parsing it: much faster, or as fast as it can be unpacked.

    Local: no MPI.

    Parameters
    ----------
    path : Path
    rows : bool
        Whether to count them.
    zero_based : bool
        Whether to look for an index 0, which says that indices begin there.
    """
    count, found = 0, False
    for _, block in blocks(path):
        if rows:
            count += _row_begins(block).size
        if zero_based and not found:
            text = without_comments(block)
            found = b" 0:" in text or b"\t0:" in text
        if found and not rows:
            break
    return Survey(count if rows else None, found if zero_based else None)


def lines_before(path: Path, position: int) -> int:
    """Return how many lines end before a position in the (unpacked) file."""
    lines = 0
    for at, block in blocks(path):
        if at + len(block) > position:
            return lines + block.count(b"\n", 0, position - at)
        lines += block.count(b"\n")
    return lines


def _blocks(file: IO[bytes], stop: int | None) -> Iterator[tuple[int, bytes]]:
    at = file.tell()
    while stop is None or at < stop:
        block = file.read(BLOCK if stop is None else min(BLOCK, stop - at))
        if not block:
            return
        if not block.endswith(b"\n"):
            block += file.readline()
        yield at, block
        at += len(block)


def _row_begins(block: bytes) -> NDArray[np.intp]:
    """Return where the lines begin that hold more than blanks and a comment."""
    data = np.frombuffer(block, np.uint8)
    begins = np.concatenate(([0], np.flatnonzero(data[:-1] == 10) + 1))
    first = data[begins]
    rows = (first > 32) & (first != 35)
    for i in np.flatnonzero((first <= 32) & (first != 10)):  # indented: rare
        end = block.find(b"\n", begins[i])
        line = block[begins[i] : end if end >= 0 else None]
        rows[i] = bool(line.partition(b"#")[0].strip())
    found: NDArray[np.intp] = begins[rows]
    return found


def _opener(path: Path) -> Callable[..., IO[bytes]] | None:
    with path.open("rb") as file:
        head = file.read(6)
    return next((opener for magic, opener in _MAGIC.items() if head.startswith(magic)), None)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what the unpackers raise into one error; those of the system have a number."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UsageError(
            f"read_libsvm: {path}: expected a whole compressed file, got one that ends early or "
            f"is damaged ({error}). Copy it again."
        ) from error
