"""Messages between ranks: tagged nonblocking sends and exact-size receives.

A `Link` moves whole frames; what they mean is the engine's business. Two tags are used on a
communicator of our own: one for frames, one for the out-of-band buffers, which are received
straight into their final memory. Only the thread that drives progress calls `poll`; any
thread may call `send`.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from mpiml import _native, wire
from mpiml.payload import take
from mpiml.wire import ANNOUNCE, CREDIT, Frame, FrameError, split

__all__ = ["Bell", "Deliver", "FunneledLink", "MpiLink", "SharedBell", "SleepBell"]

TAG_FRAME, TAG_DATA = 1, 2
SLOT = 1 << 15  # the largest frame that comes without being announced
_BYTE = MPI.BYTE
_SWEEP = 100
_graveyard: list[Any] = []  # memory that must outlive its program
Deliver = Callable[[int, Frame, Sequence[Any]], None]


class Bell(Protocol):
    """How a rank that waits learns that a message may have come."""

    def ring(self, rank: int) -> None:
        """Wake `rank`, if it can be reached this way."""

    def value(self) -> int:
        """Return a number that changes with every ring of this rank."""

    def wait(self, seen: int, spin_us: int, timeout_us: int) -> bool:
        """Spin, then sleep, until `value` differs from `seen` or the time is over."""

    def rings(self) -> dict[int, Callable[[], None]]:
        """Return, for each rank that can be reached this way, what rings it."""

    def misses(self, size: int) -> bool:
        """Return whether some of `size` ranks cannot ring this bell."""


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

    def rings(self) -> dict[int, Callable[[], None]]:
        """Those of this host."""
        ring = self._native.ring
        return {rank: functools.partial(ring, line) for rank, line in self._lines.items()}

    def misses(self, size: int) -> bool:
        """Those of other hosts."""
        return len(self._lines) < size


class SleepBell:
    """The way without shared memory: look again after a short sleep."""

    def __init__(self) -> None:
        self._value = 0

    def rings(self) -> dict[int, Callable[[], None]]:
        """None."""
        return {}

    def misses(self, size: int) -> bool:
        """All ranks: nobody rings."""
        return True

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
    """A frame whose buffers are still coming in, or that is itself still coming in."""

    __slots__ = ("buffers", "frame", "posted", "requests")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.buffers: list[Any] = []
        self.requests: list[MPI.Request] = []
        self.posted = False


class MpiLink:
    """Frames over one communicator, which it owns from now on.

    Local: construction takes part in nothing; `comm` was duplicated by `mpiml.world`.

    One receive of `SLOT` bytes is always posted, so a small frame is matched as it comes in:
    a probe would need a turn of the library's progress to see it and another to match it.
    A larger frame is announced by a small one and then received like a buffer. No receive is
    ever shorter than its message, and none depends on probes, which some fabrics get wrong.

    Attributes
    ----------
    errors
        What `poll` raises where the link itself is broken.
    """

    errors = (MPI.Exception, FrameError)

    def __init__(self, comm: MPI.Intracomm, bell: Bell, deliver: Deliver) -> None:
        self.comm = comm
        self.bell = bell
        self.far = bell.misses(comm.size)
        self._deliver = deliver
        self._status = MPI.Status()
        self._isend = comm.Isend
        self._rings = bell.rings()
        self._order: dict[int, threading.Lock] = {}
        self._sending: deque[tuple[MPI.Request, Any]] = deque()
        self._small: deque[tuple[MPI.Request, bytes]] = deque()
        self._receiving: list[tuple[int, _Arrival]] = []
        self._held: dict[int, deque[_Arrival]] = {}
        self._memory = memoryview(bytearray(SLOT))
        self._slot = comm.Recv_init([self._memory, SLOT, _BYTE], MPI.ANY_SOURCE, TAG_FRAME)
        self._slot.Start()
        self._armed = True
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way, which needs this rank to look often."""
        return bool(self._receiving or self._sending)

    def send(self, rank: int, message: bytes, buffers: Sequence[Any] = ()) -> None:
        """Start sending a frame and its buffers; returns at once.

        Local: the memory of `buffers` must stay unchanged until it has been sent; a reference
        is kept until then.
        """
        if self._closed:
            return  # from a thread that the program has left behind: nobody receives any more
        if len(message) > SLOT:
            buffers = [message, *buffers]
            message = wire.join(ANNOUNCE, 0, 0, lengths=(len(message),))
        if buffers:
            with self._order.setdefault(rank, threading.Lock()):
                self._post(message, rank, TAG_FRAME)
                for buffer in buffers:  # matched to their frames by their order
                    view = memoryview(buffer)
                    for start, stop in wire.chunks(len(view)):
                        self._post(view[start:stop], rank, TAG_DATA)
        else:
            # Such a send is done almost always when it returns. To ask each one would cost as
            # much as half of it, so they are asked by the hundred.
            small = self._small
            small.append((self._isend(message, rank, TAG_FRAME), message))
            if len(small) > _SWEEP:
                self._sweep()
        ring = self._rings.get(rank)
        if ring is not None:
            ring()

    def _sweep(self) -> None:
        """Let go of small messages that have been sent; watch the others like transfers."""
        small = self._small
        for _ in range(len(small)):
            try:
                request, message = small.popleft()
            except IndexError:  # another thread was first
                return
            if not request.Test():
                self._sending.append((request, message))

    def _post(self, data: Any, rank: int, tag: int) -> None:
        request = self._isend((data, len(data), _BYTE), rank, tag)
        if not request.Test():
            self._sending.append((request, data))

    def poll(self) -> bool:
        """Take one frame if there is one, and move transfers on; whether anything moved."""
        status = self._status
        if not self._armed:
            self._armed = True
            self._slot.Start()
        if not self._slot.Test(status):
            if self._receiving or self._sending:
                return self._progress()
            return False
        self._armed = False  # started by the next poll, so that this frame is not kept waiting
        frame = split(self._memory, status.Get_count(_BYTE))
        source = status.Get_source()
        if frame.lengths or self._held:
            self._admit(source, frame)
        else:
            self._deliver(source, frame, ())
        if self._receiving or self._sending:
            self._progress()
        return True

    def _admit(self, source: int, frame: Frame) -> None:
        """Order frames of one source behind one that is not complete yet."""
        held = self._held.get(source)
        if not frame.lengths and (held is None or frame.kind >= CREDIT):
            self._deliver(source, frame, ())  # control may pass
            return
        self._held.setdefault(source, deque()).append(_Arrival(frame))
        self._receive(source)

    def _receive(self, source: int) -> None:
        """Post receives for what `source` sends, as far as it is known, and hand out frames."""
        held = self._held[source]
        for arrival in held:
            if not arrival.posted:
                self._fill(source, arrival)
            if arrival.frame.kind == ANNOUNCE:
                break  # how many buffers come next stands in the frame that is announced
        while held and held[0].posted and not held[0].requests:
            arrival = held.popleft()
            if not held:
                del self._held[source]
            self._deliver(source, arrival.frame, arrival.buffers)

    def _fill(self, source: int, arrival: _Arrival) -> None:
        arrival.posted = True
        for length in arrival.frame.lengths:
            memory = take(length)
            arrival.buffers.append(memory)
            view = memoryview(memory)
            arrival.requests += [
                self.comm.Irecv((view[start:stop], stop - start, _BYTE), source, TAG_DATA)
                for start, stop in wire.chunks(length)
            ]
        if arrival.requests:
            self._receiving.append((source, arrival))

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
        for entry in list(self._receiving):
            source, arrival = entry
            arrival.requests = [r for r in arrival.requests if not r.Test()]
            if not arrival.requests:
                self._receiving.remove(entry)
                self._arrived(source, arrival)
                moved = True
        return moved

    def _arrived(self, source: int, arrival: _Arrival) -> None:
        if arrival.frame.kind == ANNOUNCE:
            arrival.frame = split(arrival.buffers[0])
            arrival.buffers = []
            arrival.posted = False
        self._receive(source)

    def drain(self, seconds: float) -> bool:
        """Finish what is being sent; whether all of it left within `seconds`."""
        if self._closed:
            return True
        end = time.monotonic() + seconds
        self._sweep()
        while self._sending and time.monotonic() < end:
            self._progress()
        return not self._sending

    def close(self) -> None:
        """Take the posted receive back. Local; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        # Given up with transfers under way, the library may still read and write their memory.
        self._sweep()
        _graveyard.extend(self._sending)
        _graveyard.extend(self._receiving)
        if self._armed:
            self._slot.Cancel()
            self._slot.Wait()
        self._slot.Free()


class FunneledLink(MpiLink):
    """A link of which one thread, which makes it, calls MPI.

    Attributes
    ----------
    home
        Identity of that thread.
    """

    def __init__(self, comm: Any, bell: Bell, deliver: Deliver) -> None:
        super().__init__(comm, bell, deliver)
        self.home = threading.get_ident()
        self._rank = comm.rank
        self._queue: deque[tuple[int, bytes, Sequence[Any]]] = deque()
        self._look = super().poll
        self._at_it = False  # home is inside of a send, which a signal handler may interrupt

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way, or waits to be begun."""
        return bool(self._queue) or super().busy

    def send(self, rank: int, message: bytes, buffers: Sequence[Any] = ()) -> None:
        """Start sending, or let home start it; returns at once. As `MpiLink.send`."""
        if self._at_it or threading.get_ident() != self.home:
            self._queue.append((rank, message, buffers))
            self.bell.ring(self._rank)
            return
        if self._queue:
            self._begin()  # what was sent before goes before
        self._at_it = True
        try:
            super().send(rank, message, buffers)
        finally:
            self._at_it = False

    def poll(self) -> bool:
        """Begin what others have sent, then do what a link does; whether anything moved."""
        begun = bool(self._queue) and self._begin()
        return self._look() or begun

    def drain(self, seconds: float) -> bool:
        """Finish what is being sent; whether all of it left within `seconds`."""
        self._begin()
        return super().drain(seconds)

    def _begin(self) -> bool:
        if self._at_it:
            return False
        queue, send = self._queue, super().send
        self._at_it = True  # nobody else takes from the queue
        try:
            for _ in range(len(queue)):  # not what comes meanwhile: it might never end
                send(*queue.popleft())
        finally:
            self._at_it = False
        return True
