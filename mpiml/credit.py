"""Credit between two ranks: how far a caller may be ahead of a service. Pure state.

A completed send is not a delivered message, and MPI's receive side is otherwise unbounded.
So a first-level request takes credit when it is sent and the receiver hands it back when the
request starts, in batches or on the back of a reply. One message larger than the whole byte
window passes when the window is empty.
"""

import threading
from collections import deque
from collections.abc import Sequence

from mpiml.waits import Wait

__all__ = ["Peer"]


class Peer:
    """The account with one peer, both ways.

    Parameters
    ----------
    messages, size
        The window: messages, and bytes, that may be under way.
    """

    __slots__ = ("_blocked", "_bytes", "_free", "_half", "_lock", "_owed", "_sizes")

    def __init__(self, messages: int, size: int) -> None:
        self._half = max(1, messages // 2)
        self._free = messages
        self._bytes = size
        self._sizes: deque[int] = deque()
        self._blocked: list[Wait] = []
        self._owed: deque[None] = deque()  # a counter that threads share without a lock
        self._lock = threading.Lock()

    def take(self, size: int) -> Wait | None:
        """Take credit for a message of `size` bytes; else return what to wait for."""
        with self._lock:
            if self._free > 0 and (size <= self._bytes or not self._sizes):
                self._free -= 1
                self._bytes -= size
                self._sizes.append(size)
                return None
            ticket = Wait("credit: the service is too far behind")
            self._blocked.append(ticket)
            return ticket

    def restore(self, messages: int) -> Sequence[Wait]:
        """Give credit back, oldest messages first; return the waits that may try again."""
        sizes = self._sizes
        with self._lock:
            while messages and sizes:
                messages -= 1
                self._free += 1
                self._bytes += sizes.popleft()
            if self._blocked:
                blocked, self._blocked = self._blocked, []
                return blocked
        return ()

    def owe(self, messages: int = 1) -> int:
        """Note messages taken in; return the debt once it reaches half the window, else 0."""
        owed = self._owed
        for _ in range(messages):
            owed.append(None)
        return self.settle() if len(owed) >= self._half else 0

    def settle(self) -> int:
        """Return the whole debt and forget it: it travels on a reply."""
        owed = self._owed
        count = 0
        while owed:
            try:
                owed.popleft()
            except IndexError:  # another thread was first
                break
            count += 1
        return count

    @property
    def under_way(self) -> int:
        """Messages sent and not yet started by the peer."""
        return len(self._sizes)
