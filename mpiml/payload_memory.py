"""Memory that values land in: pooled blocks for large ones, bytearrays for small."""

from pickle import PickleBuffer
from typing import Any

from mpiml import _native

__all__ = ["INLINE", "SLOT", "copied", "take"]

# Arrays below this many bytes travel inside the pickle. Measured: three copies of 16 KiB cost
# about as much as one more message and one more block of the pool.
INLINE = 16 * 1024

# The place of a buffer in the pickle. Writable, so that the one that arrives is passed on as
# it is: pickle would wrap it as read-only if it stood for the memory of a read-only array.
SLOT = PickleBuffer(bytearray(1))

# Below it, malloc reuses memory well; above, a bytearray would be mapped and faulted in afresh.
_POOLED = 64 * 1024


def take(nbytes: int) -> Any:
    """Return `nbytes` of writable memory; it goes back to the pool when nothing uses it."""
    return _native.take(nbytes) if nbytes >= _POOLED else bytearray(nbytes)


def copied(source: Any) -> memoryview:
    """Return a copy of a bytes-like object, as writable bytes in memory of our own."""
    block = take(len(source))
    _native.copy(block, source)
    return memoryview(block)
