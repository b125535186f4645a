"""What a frame carries: its body and buffers, and the value they encode."""

from collections.abc import Sequence
from typing import Any

from mpiml.payload import Packed, take, unpack
from mpiml.wire import FLAG_BODY_APART, Frame

__all__ = ["own", "parts", "value_in"]


def parts(frame: Frame, buffers: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return body and out-of-band buffers; a large body came as the first buffer."""
    if frame.flags & FLAG_BODY_APART:
        return buffers[0], buffers[1:]
    return frame.body, buffers


def value_in(frame: Frame, buffers: Sequence[Any]) -> Any:
    """Decode the value of a reply or item: it is the receiver's own."""
    body, rest = parts(frame, buffers) if buffers else (frame[8], buffers)
    return unpack(frame[1], body, rest)


def own(packed: Packed) -> Packed:
    """Copy the out-of-band buffers: inside a process nobody else does."""
    if not packed.buffers:
        return packed
    copies = []
    for buffer in packed.buffers:
        view = memoryview(buffer)
        copy = take(len(view))
        memoryview(copy)[:] = view
        copies.append(copy)
    return packed._replace(buffers=copies)
