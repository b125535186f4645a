"""Files that get their name when they are whole."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["draft_of"]


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield where to write a file that is renamed to `path` when the block ends without an error.

    Local: no MPI. It lies beside `path`, as only within a file system a rename is at once, and is
    gone after an error.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
