"""Reading LIBSVM and SVMlight files, each rank its own rows."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from mpiml.datasets.blocks import blocks, compressed, lines_before, rows_from, survey
from mpiml.datasets.cache import Cache
from mpiml.datasets.csr import CSR, MOST_FEATURES, float_dtype, shard_of
from mpiml.datasets.text import Malformed, Part, Style, parse
from mpiml.errors import UsageError
from mpiml.whole import whole_number

__all__ = ["read_libsvm"]

_BALANCES: Final = ("bytes", "rows")


def read_libsvm(
    path: str | os.PathLike[str],
    rank: int = 0,
    size: int = 1,
    features: int | None = None,
    dtype: Any = "float32",
    cache: bool | str | os.PathLike[str] | None = None,
    *,
    zero_based: bool | Literal["auto"] = "auto",
    allow_nan: bool = False,
    balance: Literal["bytes", "rows"] = "bytes",
) -> CSR:
    """Read a rank's rows of a text file with lines ``label [qid:n] index:value ... [# ...]``.

    Local: no MPI. The shards of ranks 0 to size - 1 hold each row of the file once, and one
    after the other in its order. A rank keeps its own rows only, and parses no others.

    Parameters
    ----------
    path : str or path
        Plain, or packed by gzip, bzip2 or xz, which its first bytes tell. Of a packed file
        every rank unpacks all, twice where `size` > 1 or `zero_based` is ``"auto"``.
    rank, size : int
        Which shard of how many, e.g. ``comm.rank, comm.size``.
    features : int, optional
        Number of columns; a larger index is an error. Left out, the largest index of this
        shard decides: then let the ranks agree on the largest ``shape[1]`` and pass it to
        `CSR.with_features`.
    dtype : {'float32', 'float64'}
        Of values and labels.
    cache : bool or path, optional
        True keeps the parsed shard as an HDF5 file next to `path`, a path in that folder, for
        the next start with the same arguments. Needs h5py, the extra ``checkpoint``. A cache
        goes by the file's size and time of change.
    zero_based : bool or 'auto'
        Whether the first feature is 0 or 1. ``"auto"`` says 0 if an index 0 stands anywhere in
        the file, which each rank looks for in all of it; True or False saves that.
    allow_nan : bool
        Whether values may be NaN or infinite.
    balance : {'bytes', 'rows'}
        What the shards of a plain file have in about equal number. ``"bytes"``, so nonzeros:
        each rank reads its own part of the file. ``"rows"``, exact to one row: each rank counts
        the rows of the whole file first. Packed files always go by rows.

    Returns
    -------
    CSR

    Raises
    ------
    UsageError
        An argument is wrong, a line is malformed (with its number), or h5py is missing.
    OSError
        The file cannot be read.
    """
    path = Path(path)
    rank, size = shard_of("read_libsvm", rank, size)
    features, kind = _checked(features, dtype, zero_based, balance)
    if path.exists() and not path.is_file():
        raise UsageError(
            f"read_libsvm: {path}: expected a file, as it is read from several places. Write "
            "what a pipe gives to one"
        )
    if compressed(path):
        balance = "rows"
    kept = None
    if cache is not None and cache is not False:
        options = {
            "rank": rank,
            "size": size,
            "features": features,
            "dtype": kind.name,
            "zero_based": zero_based,
            "allow_nan": bool(allow_nan),
            "balance": balance,
        }
        kept = Cache(path, cache, options)
        found = kept.load()
        if found is not None:
            return found
        kept.prepare()
    by_rows = balance == "rows" and size > 1
    seen = survey(path, rows=by_rows, zero_based=zero_based == "auto")
    first_index = 0 if (seen.zero_based if zero_based == "auto" else zero_based) else 1
    source = blocks(path) if by_rows else blocks(path, rank, size)
    if seen.rows is not None:
        first, last = seen.rows * rank // size, seen.rows * (rank + 1) // size
        source = rows_from(source, first, last - first)
    csr = _read(path, source, Style(first_index, features, kind, allow_nan))
    if kept is not None:
        kept.store(csr)
    return csr


def _read(path: Path, source: Iterator[tuple[int, bytes]], style: Style) -> CSR:
    parts: list[Part] = []
    for at, block in source:
        try:
            parts.append(parse(block, style))
        except Malformed as error:
            line = lines_before(path, at) + error.line + 1
            raise UsageError(f"read_libsvm: {path}, line {line}: {error}.") from None
    return _joined(parts, style)


def _joined(parts: list[Part], style: Style) -> CSR:
    """Join the parts, field by field, so that little is held twice; empties the list."""
    columns: list[list[Any]] = [list(fields) for fields in zip(*parts, strict=True)]
    parts.clear()
    if not columns:
        kinds: tuple[Any, ...] = (np.int64, np.int32, style.dtype, style.dtype)
        columns = [[np.zeros(0, kind)] for kind in kinds] + [[None]]
    qid = None
    if any(part is not None for part in columns[4]):
        rows = [labels.size for labels in columns[3]]
        filled = zip(rows, columns[4], strict=True)
        qid = np.concatenate([np.full(n, -1) if q is None else q for n, q in filled])
    joined = []
    for column in columns[:4]:
        joined.append(np.concatenate(column))
        column.clear()
    counts, indices, values, labels = joined
    indptr = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    features = style.features
    if features is None:
        features = int(indices.max()) + 1 if indices.size else 0
    return CSR(indptr, indices, values, labels, (labels.size, features), qid)


def _checked(
    features: Any, dtype: Any, zero_based: Any, balance: str
) -> tuple[int | None, np.dtype[Any]]:
    """Refuse arguments that are wrong; return the number of features, and the dtype."""
    if features is not None:
        where = "read_libsvm: features, if not None"
        features = whole_number(where, features, 1, MOST_FEATURES)
    if not (zero_based == "auto" or isinstance(zero_based, bool)):
        raise UsageError(
            f"read_libsvm: zero_based: expected True, False or 'auto', got {zero_based!r}"
        )
    if balance not in _BALANCES:
        raise UsageError(f"read_libsvm: balance: expected 'bytes' or 'rows', got {balance!r}")
    return features, float_dtype("read_libsvm", dtype)
