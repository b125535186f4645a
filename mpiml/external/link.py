"""The link of a rank that talks to guests: to other Python ranks as ever, to guests beside it."""

from collections.abc import Sequence
from typing import Any

from mpiml.wire import CREDIT

__all__ = ["GuestLink"]


class GuestLink:
    """Two links that look like one: ranks from `size` on are guests. Local.

    Attributes
    ----------
    inner
        To the Python ranks.
    outer
        To the guests, over the communicator that they share with these.
    gone : set of int
        Guests that nothing is sent to any more.
    """

    def __init__(self, inner: Any, outer: Any, engine: Any, guests: Sequence[int]) -> None:
        self.inner = inner
        self.outer = outer
        self.bell = inner.bell
        self.errors = inner.errors
        self.far = True  # a guest need not ring
        self.gone: set[int] = set()
        self._size = engine.size
        self._taken = engine.note_received
        self._guests = guests
        self._send = inner.send

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self.inner.busy or self.outer.busy)

    def send(self, rank: int, message: bytes, buffers: Sequence[Any] = ()) -> None:
        """Start sending a frame and its buffers; returns at once. As `MpiLink.send`."""
        if rank < self._size:
            self._send(rank, message, buffers)
            return
        guest = rank - self._size
        if guest not in self.gone and message[1] != CREDIT:  # its calls take none
            self.outer.send(self._guests[guest], message, buffers)
        # Guests do not count frames, and the sums of all ranks must come out even.
        self._taken()

    def poll(self) -> bool:
        """Take a frame from either side, if there is one; whether anything moved."""
        moved: bool = self.inner.poll()
        return self.outer.poll() or moved

    def drain(self, seconds: float) -> bool:
        """Finish what is being sent; whether all of it left, each within `seconds`."""
        left: bool = self.outer.drain(seconds)
        return self.inner.drain(seconds) and left

    def close(self) -> None:
        """Take the posted receives back. Local; a second call does nothing."""
        self.outer.close()
        self.inner.close()
