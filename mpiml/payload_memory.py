"""Memory that values land in: pooled blocks for large ones, bytearrays for small."""

from typing import Any

try:
    from mpiml import _native
except ImportError:  # REMOVE once the native module is built in every checkout
    _native = None  # type: ignore[assignment]

__all__ = ["copied", "take"]

# Below it, malloc reuses memory well; above, a bytearray would be mapped and faulted in afresh.
_POOLED = 64 * 1024


def take(nbytes: int) -> Any:
    """Return `nbytes` of writable memory; it goes back to the pool when nothing uses it."""
    if nbytes < _POOLED or _native is None:
        return bytearray(nbytes)
    return _native.take(nbytes)


def copied(source: Any) -> memoryview:
    """Return a copy of a bytes-like object, as writable bytes in memory of our own."""
    block = take(len(source))
    if _native is None:
        memoryview(block)[:] = source
    else:
        _native.copy(block, source)
    return memoryview(block)
