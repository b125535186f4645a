"""Device memory reduced by way of the host, in chunks: in, combined, out, all at once.

While the members combine chunk c in host memory, chunk c+1 is on its way from the device and
chunk c-1 on its way back: two lanes, one per direction, since a link carries both at a time.
A slot of host memory goes to the next chunk only when its last copy to the device is done; the
lane waits for that, not the host.

The order of steps is `run_stages`, which knows nothing of devices; `Staging` carries the steps
out on anything that has lanes and events.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

__all__ = ["CHUNK", "SLOTS", "Event", "Lane", "Stages", "Staging", "chunk_size", "run_stages"]

#: bytes of a chunk: long enough that starting a copy costs little, short enough that the
#: first and the last chunk, which overlap with nothing, do
CHUNK: Final = 4 << 20
LEAST: Final = 64 << 10
TINY: Final = 4 << 10
#: chunks in host memory at a time: one comes, one is combined, one leaves
SLOTS: Final = 3


class Event(Protocol):
    """A point in a lane."""

    def wait(self) -> None:
        """Block until all that was begun before it is done."""


class Lane(Protocol):
    """Copies that happen one after the other, beside the caller."""

    def to_host(self, target: Any, source: int) -> None:
        """Begin a copy of device memory to a NumPy array of bytes."""

    def to_device(self, target: int, source: Any) -> None:
        """Begin a copy of a NumPy array of bytes to device memory."""

    def after(self, event: Event) -> None:
        """Let what is begun from now on wait for an event of any lane."""

    def mark(self) -> Event:
        """Return the point where the lane is now."""


class Stages(Protocol):
    """What happens to a chunk, step by step. A slot is the host memory it passes through."""

    def fetch(self, chunk: int, slot: int) -> None:
        """Begin to copy a chunk to the host, when the slot's last `put` is done."""

    def arrived(self, slot: int) -> None:
        """Wait for the slot's `fetch`."""

    def combine(self, chunk: int, slot: int) -> None:
        """Combine the slot with those of the other members, in place."""

    def put(self, chunk: int, slot: int) -> None:
        """Begin to copy the chunk back."""

    def drain(self) -> None:
        """Wait for all that was begun."""


def run_stages(stages: Stages, chunks: int, slots: int = SLOTS) -> None:
    """Pass chunks 0 to `chunks` - 1 through the stages.

    Local: what the stages' `combine` does is collective, chunk by chunk, in this order.

    Parameters
    ----------
    stages
        The steps.
    chunks : int
        How many there are.
    slots : int
        How many are in host memory at a time; with fewer than 3 less overlaps.
    """
    ahead = max(slots - 1, 1)
    try:
        for chunk in range(min(ahead, chunks)):
            stages.fetch(chunk, chunk % slots)
        for chunk in range(chunks):
            slot = chunk % slots
            stages.arrived(slot)
            stages.combine(chunk, slot)
            stages.put(chunk, slot)
            if chunk + ahead < chunks:
                stages.fetch(chunk + ahead, (chunk + ahead) % slots)
    finally:
        # An error must not leave copies under way into memory that its reader may free.
        stages.drain()


def chunk_size(nbytes: int) -> int:
    """Return the bytes of a chunk for so many bytes: a power of two.

    Local: the same on all members for the same argument. At least four chunks where that
    leaves them 64 KiB, so that something overlaps; few sizes, since each needs host memory
    of its own.
    """
    if nbytes <= LEAST:
        return TINY if nbytes <= TINY else LEAST
    return min(max(1 << (nbytes // 4).bit_length() - 1, LEAST), CHUNK)


class Staging:
    """`Stages` between one stretch of device memory and slots of host memory.

    Parameters
    ----------
    inward, outward : Lane
        To the host, to the device.
    pointer, nbytes : int
        The device memory.
    slots : sequence of numpy.ndarray
        Bytes; pinned, for the copies to overlap.
    size : int
        Bytes of a chunk, at most those of a slot.
    combine : function
        ``combine(slot, nbytes)``: combines the first bytes of a slot among the members.
        Collective over them.
    """

    def __init__(
        self,
        inward: Lane,
        outward: Lane,
        pointer: int,
        nbytes: int,
        slots: Sequence[Any],
        size: int,
        combine: Callable[[int, int], None],
    ) -> None:
        self._inward = inward
        self._outward = outward
        self._pointer = pointer
        self._nbytes = nbytes
        self._slots = slots
        self._size = size
        self._combine = combine
        self._came: list[Event | None] = [None] * len(slots)
        self._left: list[Event | None] = [None] * len(slots)

    def _part(self, chunk: int, slot: int) -> tuple[int, Any]:
        start = chunk * self._size
        return self._pointer + start, self._slots[slot][: min(self._size, self._nbytes - start)]

    def fetch(self, chunk: int, slot: int) -> None:
        """Begin to copy a chunk to the host, when the slot's last `put` is done."""
        left = self._left[slot]
        if left is not None:
            self._inward.after(left)
        pointer, host = self._part(chunk, slot)
        self._inward.to_host(host, pointer)
        self._came[slot] = self._inward.mark()

    def arrived(self, slot: int) -> None:
        """Wait for the slot's `fetch`."""
        came = self._came[slot]
        assert came is not None
        came.wait()

    def combine(self, chunk: int, slot: int) -> None:
        """Combine the slot with those of the other members, in place."""
        self._combine(slot, len(self._part(chunk, slot)[1]))

    def put(self, chunk: int, slot: int) -> None:
        """Begin to copy the chunk back."""
        pointer, host = self._part(chunk, slot)
        self._outward.to_device(pointer, host)
        self._left[slot] = self._outward.mark()

    def drain(self) -> None:
        """Wait for all that was begun."""
        for event in (*self._came, *self._left):
            if event is not None:
                event.wait()
