"""A parsed shard in an HDF5 file, so that the next start need not parse."""

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from mpiml.datasets.csr import CSR
from mpiml.datasets.drafts import draft_of
from mpiml.errors import UsageError

__all__ = ["Cache"]

_VERSION: Final = 1  # of what is written; another one is not read
_ARRAYS: Final = ("indptr", "indices", "values", "labels")


class Cache:
    """Where one shard of one file, read with some options, is kept.

    Local: no MPI; each rank has a file of its own, so no parallel HDF5 is needed. Its name tells
    file and options, so that another version of the source replaces it. It holds size and time
    of the source and a checksum of its arrays, and is renamed to its name when it is whole: what
    is stale or torn is not read.

    Parameters
    ----------
    path : Path
        The source.
    where : bool, str or path
        True for the source's folder, or another one, made when it is not there.
    options : mapping
        All that changes what is read, as JSON can hold it.

    Raises
    ------
    UsageError
        h5py is not installed.
    """

    def __init__(
        self, path: Path, where: bool | str | os.PathLike[str], options: Mapping[str, Any]
    ) -> None:
        try:
            import h5py
        except ImportError:
            raise UsageError(
                "read_libsvm: cache: h5py is not installed: `pip install 'mpiml[checkpoint]'`, "
                "or leave cache= out"
            ) from None
        self._h5py = h5py
        self._source = path
        self.folder = path.parent if isinstance(where, bool) else Path(where)
        source = None if isinstance(where, bool) else str(path.resolve())
        named = {**options, "path": source}
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
        self.file = self.folder / f"{path.name}.{digest}.h5"
        self._options = dict(options)
        self._key = self._key_now()

    def load(self) -> CSR | None:
        """Return what is kept; None if nothing, or nothing that is whole and up to date."""
        try:
            with self._h5py.File(self.file, "r") as file:
                if file.attrs["key"] != self._key:
                    return None
                names = [*_ARRAYS, "qid"] if "qid" in file else _ARRAYS
                arrays = {name: np.ascontiguousarray(file[name][...]) for name in names}
                rows, features = (int(n) for n in file.attrs["shape"])
                if _checksum(arrays, (rows, features)) != int(file.attrs["checksum"]):
                    return None
            return CSR(shape=(rows, features), **arrays)
        except (OSError, KeyError, ValueError, RuntimeError):  # none, torn, or of another kind
            return None

    def prepare(self) -> None:
        """Make the folder, before the time to parse is spent.

        Raises
        ------
        UsageError
            Nothing can be written there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError:
            writable = False
        if not writable:
            raise UsageError(
                f"read_libsvm: cache: expected a folder to write to, got {self.folder}. Pass "
                "another one as cache="
            )

    def store(self, csr: CSR) -> None:
        """Keep a shard, unless its source has changed since this object was made.

        A full disk is a warning: the rows are there all the same.
        """
        if self._key_now() != self._key:
            return
        arrays = {name: getattr(csr, name) for name in _ARRAYS}
        if csr.qid is not None:
            arrays["qid"] = csr.qid
        try:
            with draft_of(self.file) as draft, self._h5py.File(draft, "x") as file:
                for name, array in arrays.items():
                    file[name] = array
                file.attrs["shape"] = csr.shape
                file.attrs["checksum"] = _checksum(arrays, csr.shape)
                file.attrs["key"] = self._key
        except (OSError, RuntimeError) as error:
            warnings.warn(
                f"read_libsvm: cache: could not write {self.file}: {error}. If its file system "
                "has no locks, set HDF5_USE_FILE_LOCKING=FALSE.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _key_now(self) -> str:
        now = self._source.stat()
        key = {"size": now.st_size, "mtime_ns": now.st_mtime_ns, "version": _VERSION}
        return json.dumps({**self._options, **key}, sort_keys=True)


def _checksum(arrays: Mapping[str, Any], shape: tuple[int, int]) -> int:
    total = zlib.crc32(repr(shape).encode())
    for name in sorted(name for name in arrays if arrays[name].size):  # no cast of nothing
        total = zlib.crc32(f"{name} {arrays[name].dtype}".encode(), total)
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).data.cast("B"), total)
    return total
