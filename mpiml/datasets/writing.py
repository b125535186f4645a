"""Writing LIBSVM files."""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mpiml.datasets.csr import CSR
from mpiml.datasets.drafts import draft_of
from mpiml.errors import UsageError

__all__ = ["write_libsvm"]

_ROWS: Final = 1024  # at a time
_OPEN: Final[Mapping[str, Callable[..., Any]]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


def write_libsvm(
    path: str | os.PathLike[str],
    csr: CSR,
    *,
    zero_based: bool = False,
    comment: str | None = None,
) -> None:
    """Write rows as LIBSVM text, with digits enough to read the same numbers again.

    Local: no MPI. The file gets its name when it is whole.

    Parameters
    ----------
    path : str or path
        Packed if it ends in .gz, .bz2 or .xz.
    csr : CSR
    zero_based : bool
        Whether the first column gets the index 0 instead of 1.
    comment : str, optional
        First lines, each written behind a #.

    Raises
    ------
    UsageError
        `comment` is not ASCII.
    """
    path = Path(path)
    if comment is not None and not comment.isascii():
        raise UsageError(f"write_libsvm: comment: expected ASCII, got {comment!r}")
    opener = _OPEN.get(path.suffix, open)
    with draft_of(path) as draft, opener(draft, "wt", encoding="ascii", newline="\n") as file:
        for line in (comment or "").splitlines():
            file.write(f"# {line}\n")
        for block in _texts(csr, 0 if zero_based else 1):
            file.write(block)


def _texts(csr: CSR, base: int) -> Iterator[str]:
    digits = 9 if csr.values.dtype.itemsize == 4 else 17  # so many tell any two numbers apart
    pair, label = f"%d:%.{digits}g", f"%.{digits}g"
    for start in range(0, len(csr), _ROWS):
        part = csr.rows(start, min(start + _ROWS, len(csr)))
        # int64: the largest int32 has no successor
        indices = (part.indices.astype("int64") + base).tolist()
        pairs = [pair % both for both in zip(indices, part.values.tolist(), strict=True)]
        heads = [label % number for number in part.labels.tolist()]
        if part.qid is not None:
            heads = [
                head if q < 0 else f"{head} qid:{q}"
                for head, q in zip(heads, part.qid.tolist(), strict=True)
            ]
        ends = part.indptr.tolist()
        lines = [
            " ".join([head, *pairs[begin:end]])
            for head, begin, end in zip(heads, ends[:-1], ends[1:], strict=True)
        ]
        yield "\n".join(lines) + "\n"
