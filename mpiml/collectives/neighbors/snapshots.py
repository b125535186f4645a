"""Copies of what is sent, kept until it has been taken, and the memory for them.

Local: a thread sees to it that messages which a call has left on their way arrive while the
member computes, for MPI may send large ones only while somebody looks after them.
"""

import threading
import time
from contextlib import suppress
from typing import Any, Final

import numpy as np

from mpiml import threads
from mpiml.collectives.mail import Sending
from mpiml.collectives.office import Office
from mpiml.collectives.over import OVER, THREADED

__all__ = ["Snapshot", "Snapshots"]

_FREE: Final = 8  # blocks that are kept for later
_LOOK: Final = (2e-4, 2e-3)  # s between two looks at what is on its way: at first, at last


class Snapshot:
    """A block that is being sent; without memory: the messages have copies of their own."""

    __slots__ = ("memory", "sendings")

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.sendings: list[Sending] = []

    def land(self) -> bool:
        """Return whether it has been taken by all."""
        sendings = self.sendings
        while sendings and sendings[-1].test():
            sendings.pop()
        return not sendings


class Snapshots:
    """Those of one member.

    Parameters
    ----------
    office : Office
        Of the mail by which they go, and whose end is theirs.
    """

    def __init__(self, office: Office) -> None:
        self._office = office
        self._lock = threading.Lock()
        self._free: list[Any] = []
        self._flying: list[Snapshot] = []
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        THREADED.add(self)
        self._closed = False
        self._asleep = True  # whether the thread is to be woken
        office.guests.append(self.close)

    def take(self, nbytes: int) -> Snapshot:
        """Return a block to be filled and sent."""
        if self._flying:
            self._land()
        return Snapshot(self.memory(nbytes))

    def memory(self, nbytes: int) -> Any:
        """Return memory, perhaps used before. (nbytes,) uint8."""
        with self._lock:
            for i, block in enumerate(self._free):
                if block.nbytes == nbytes:
                    return self._free.pop(i)
        return np.empty(nbytes, np.uint8)

    def give_back(self, memory: Any) -> None:
        """Take memory back that nobody reads any more."""
        with self._lock:
            self._free.append(memory)
            del self._free[:-_FREE]

    def let_fly(self, snapshot: Snapshot) -> None:
        """Keep a block until all it was sent to have it."""
        if snapshot.land():
            if snapshot.memory is not None:
                self.give_back(snapshot.memory)
            if self._flying:
                self._land()
            return
        with self._lock:
            self._flying.append(snapshot)
        self._land()
        if self._flying and self._asleep and self._office.outside and not self._closed:
            self._asleep = False
            if self._thread is None and not threads.funneled():
                self._thread = threading.Thread(
                    target=self._look_after, name="mpiml neighbours", daemon=True
                )
                self._thread.start()
            self._wake.set()

    def _land(self) -> bool:
        """Take back the blocks that have been taken; return whether there are others."""
        with self._lock:
            still = []
            for snapshot in self._flying:
                if not snapshot.land():
                    still.append(snapshot)
                elif snapshot.memory is not None:
                    self._free.append(snapshot.memory)
            self._flying = still
            del self._free[:-_FREE]
            return bool(still)

    def _look_after(self) -> None:
        pause = _LOOK[0]
        while not self._closed and not OVER:
            if self._flying:  # the member itself may see to it while the thread sleeps
                time.sleep(pause)
                pause = min(1.1 * pause, _LOOK[1])
                try:
                    self._land()
                except Exception:  # of MPI: a peer has died, which the next call finds too
                    return
                continue
            pause = _LOOK[0]
            self._asleep = True
            if self._flying:  # since before it was
                continue
            self._wake.wait(1.0)
            self._wake.clear()

    def close(self) -> bool:
        """Let go of the blocks, those on their way apart; return whether there are none."""
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        try:
            flying = self._land()
        except Exception:  # of MPI
            flying = True
        with self._lock:
            self._free.clear()
            self._flying = []  # their messages arrive nevertheless
        with suppress(ValueError):
            self._office.guests.remove(self.close)
        return not flying
