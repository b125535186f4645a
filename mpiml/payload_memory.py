"""Memory that values land in: pooled blocks for large ones, bytearrays for small."""

from typing import Any

from mpiml import _native

__all__ = ["copied", "take"]

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
