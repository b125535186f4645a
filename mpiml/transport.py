"""Messages between ranks: tagged nonblocking sends, matched probes, exact-size receives.

A `Link` moves whole frames; what they mean is the engine's business. Two tags are used on a
communicator of our own: one for frames, one for the out-of-band buffers, which are received
straight into their final memory. Only the thread that drives progress calls `poll`; any
thread may call `send`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from mpiml import _native, wire
from mpiml.payload import take
from mpiml.wire import CREDIT, Frame

__all__ = ["Bell", "Deliver", "MpiLink", "SharedBell", "SleepBell"]

TAG_FRAME, TAG_DATA = 1, 2
Deliver = Callable[[int, Frame, Sequence[Any]], None]


class Bell(Protocol):
    """How a rank that waits learns that a message may have come."""

    def ring(self, rank: int) -> None:
        """Wake `rank`, if it can be reached this way."""

    def value(self) -> int:
        """Return a number that changes with every ring of this rank."""

    def wait(self, seen: int, spin_us: int, timeout_us: int) -> bool:
        """Spin, then sleep, until `value` differs from `seen` or the time is over."""


class SharedBell:
    """A word per rank in memory of the host: a ring is one atomic add, a sleeper one futex.

    It lets an idle rank sleep in the kernel and answer within microseconds, and ranks that
    outnumber the cores hand the core over instead of spinning on it.
    """

    def __init__(self, memory: Any, lines: dict[int, int], me: int) -> None:
        self._native = _native.Doorbell(memory, lines[me])
        self._lines = lines
        self.value = self._native.value
        self.wait = self._native.wait

    def ring(self, rank: int) -> None:
        """Wake `rank`; does nothing for a rank of another host."""
        line = self._lines.get(rank)
        if line is not None:
            self._native.ring(line)


class SleepBell:
    """The way without shared memory: look again after a short sleep."""

    def __init__(self) -> None:
        self._value = 0

    def ring(self, rank: int) -> None:
        """Count; a sleeper notices at its next look."""
        self._value += 1

    def value(self) -> int:
        """Return the count of rings from this process."""
        return self._value

    def wait(self, seen: int, spin_us: int, timeout_us: int) -> bool:
        """Yield while spinning, then sleep at most a millisecond at a time."""
        if self._value != seen:
            return True
        time.sleep(0 if timeout_us <= 0 else min(timeout_us, 1000) * 1e-6)
        return self._value != seen


class _Arrival:
    """A frame whose buffers are still coming in."""

    __slots__ = ("buffers", "frame", "requests", "source")

    def __init__(self, source: int, frame: Frame) -> None:
        self.source = source
        self.frame = frame
        self.buffers: list[Any] = []
        self.requests: list[MPI.Request] = []


class MpiLink:
    """Frames over one communicator, which it owns from now on.

    Local: construction takes part in nothing; `comm` was duplicated by `mpiml.world`.
    """

    def __init__(
        self, comm: MPI.Intracomm, bell: Bell, deliver: Deliver, matched: bool
    ) -> None:
        self.comm = comm
        self.bell = bell
        self._deliver = deliver
        self._matched = matched
        self._status = MPI.Status()
        self._order: dict[int, threading.Lock] = {}
        self._sending: deque[tuple[MPI.Request, Any]] = deque()
        self._receiving: list[_Arrival] = []
        self._held: dict[int, deque[_Arrival]] = {}

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way, which needs this rank to look often."""
        return bool(self._receiving or self._sending)

    def send(self, rank: int, message: bytes, buffers: Sequence[Any] = ()) -> None:
        """Start sending a frame and its buffers; returns at once.

        Local: the memory of `buffers` must stay unchanged until it has been sent; a reference
        is kept until then.
        """
        if buffers:
            lock = self._order.setdefault(rank, threading.Lock())
            with lock:  # buffers are matched to frames by their order
                self._post(message, rank, TAG_FRAME)
                for buffer in buffers:
                    view = memoryview(buffer)
                    for start, stop in wire.chunks(len(view)):
                        self._post(view[start:stop], rank, TAG_DATA)
        else:
            request = self.comm.Isend(message, rank, TAG_FRAME)
            if not request.Test():
                self._sending.append((request, message))
        self.bell.ring(rank)

    def _post(self, data: Any, rank: int, tag: int) -> None:
        request = self.comm.Isend((data, len(data), MPI.BYTE), rank, tag)
        if not request.Test():
            self._sending.append((request, data))

    def poll(self) -> bool:
        """Take one message if there is one, and move transfers on; whether anything moved."""
        status = self._status
        if self._matched:
            message = self.comm.Improbe(MPI.ANY_SOURCE, TAG_FRAME, status)
            if message is None:
                return self.busy and self._progress()
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            source = status.Get_source()
        else:  # some fabrics lack matched probes; one thread probes at a time, so this is safe
            if not self.comm.Iprobe(MPI.ANY_SOURCE, TAG_FRAME, status):
                return self.busy and self._progress()
            data = bytearray(status.Get_count(MPI.BYTE))
            source = status.Get_source()
            self.comm.Recv(data, source, TAG_FRAME)
        frame = wire.split(data)
        if frame.lengths or self._held:
            self._admit(source, frame)
        else:
            self._deliver(source, frame, ())
        if self.busy:
            self._progress()
        return True

    def _admit(self, source: int, frame: Frame) -> None:
        """Order frames of one source behind one whose buffers are still on their way."""
        held = self._held.get(source)
        apart = frame.kind >= CREDIT or (held is None and not frame.lengths)
        if apart and not frame.lengths:
            self._deliver(source, frame, ())
            return
        arrival = _Arrival(source, frame)
        for length in frame.lengths:
            memory = take(length)
            arrival.buffers.append(memory)
            view = memoryview(memory)
            for start, stop in wire.chunks(length):
                arrival.requests.append(
                    self.comm.Irecv(
                        (view[start:stop], stop - start, MPI.BYTE), source, TAG_DATA
                    )
                )
        self._held.setdefault(source, deque()).append(arrival)
        if arrival.requests:
            self._receiving.append(arrival)

    def _progress(self) -> bool:
        moved = False
        sending = self._sending
        for _ in range(len(sending)):
            try:
                request, data = sending.popleft()
            except IndexError:
                break
            if request.Test():
                moved = True
            else:
                sending.append((request, data))
        for arrival in list(self._receiving):
            arrival.requests = [r for r in arrival.requests if not r.Test()]
            if not arrival.requests:
                self._receiving.remove(arrival)
                self._release(arrival.source)
                moved = True
        return moved

    def _release(self, source: int) -> None:
        held = self._held[source]
        while held and not held[0].requests:
            arrival = held.popleft()
            if not held:
                del self._held[source]
            self._deliver(source, arrival.frame, arrival.buffers)

    def drain(self, seconds: float) -> bool:
        """Finish what is being sent; whether all of it left within `seconds`."""
        end = time.monotonic() + seconds
        while self._sending and time.monotonic() < end:
            self._progress()
        return not self._sending
