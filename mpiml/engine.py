"""The engine of one rank: sends frames, hands out what arrives, and keeps credit.

How threads wait and who drives progress stands in `mpiml.driver`. In a process without MPI a
frame is handed over on the stack of its sender.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mpiml import wire
from mpiml.credit import Peer
from mpiml.driver import Driver
from mpiml.errors import ServiceGoneError
from mpiml.scope import Scope
from mpiml.tracebacks import error_text
from mpiml.waits import Wait
from mpiml.wire import CREDIT, FLAG_BODY_APART, Frame

__all__ = ["APART", "Engine", "Handler"]

Handler = Callable[[int, Frame, Sequence[Any]], None]
APART = 30_000  # bodies above this are sent as a buffer instead of being copied into a frame


class Engine(Driver):
    """Progress, waits, credits and routing of one rank in one program.

    Local: made by the launcher on every rank; `connect` gives it a link.

    Parameters
    ----------
    rank, size
        This rank and the number of ranks of the program's communicator.
    window
        Messages and bytes a peer may be ahead before a caller waits.
    log
        Called with a line of text and, where there is one, a traceback.
    spin_us
        How long a waiting thread spins before it sleeps; 0 where ranks outnumber cores.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        window: tuple[int, int],
        log: Callable[[str], None],
        spin_us: int = 0,
    ) -> None:
        super().__init__(rank, spin_us)
        self.size = size
        self.window = window
        self.log = log
        self.pause_us = 0  # extra rest between requests while a service computes beside
        self.pending: dict[int, Any] = {}
        self.new_id = itertools.count(1).__next__
        self.handlers: dict[int, Handler] = {CREDIT: self._on_credit}
        self._count_sent = itertools.count()
        self._count_received = itertools.count()
        self.note_sent = self._count_sent.__next__
        self.guests: Any = None  # answers calls of ranks of other programs
        self.note_received = self._count_received.__next__
        self._peers: dict[int, Peer] = {}
        self.failed = False  # the program ends by a failure, whose traceback is shown once
        self._unseen: dict[str, int] = {}

    # -- life ------------------------------------------------------------------------------

    def close(self, last: Callable[[], None] | None = None) -> None:
        """End the helper and every wait, and fail open calls. A second call does nothing.

        Parameters
        ----------
        last
            Called before the link is closed; see `shut`.
        """
        self.shut(last)
        gone = self.ended_by or ServiceGoneError(
            "mpiml: the program has ended; expected no call to be open"
        )
        for call in list(self.pending.values()):
            call.fail(gone)
        self.pending.clear()

    def counts(self) -> tuple[int, int]:
        """Return how many frames this rank has sent and taken in."""
        # count() has no other way to read it, and += is not atomic
        return int(repr(self._count_sent)[6:-1]), int(repr(self._count_received)[6:-1])

    def log_exception(self, text: str) -> None:
        """Log the exception being handled, with its traceback."""
        error = sys.exc_info()[1]
        assert error is not None
        self.log(f"{text}\n{error_text(error)}")

    # -- sending ---------------------------------------------------------------------------

    def peer(self, rank: int) -> Peer:
        """Return the credit account with `rank`."""
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers.setdefault(rank, Peer(*self.window))
        return peer

    def transmit(
        self,
        rank: int,
        kind: int,
        source: int,
        target: int,
        id: int = 0,
        aux: int = 0,
        *,
        encoding: int = 0,
        flags: int = 0,
        name: bytes = b"",
        body: Any = b"",
        buffers: Sequence[Any] = (),
    ) -> None:
        """Send one frame, to this rank too. Local: never waits, safe from any thread."""
        self.note_sent()
        if len(body) > APART:
            flags |= FLAG_BODY_APART
            buffers = [body, *buffers]
            body = b""
        lengths = tuple(map(len, buffers))
        if rank == self.rank:
            self.dispatch(
                rank,
                Frame(kind, encoding, flags, source, target, id, aux, name, body, lengths),
                buffers,
            )
            return
        message = wire.join(
            kind, source, target, id, aux,
            encoding=encoding, flags=flags, name=name, body=body, lengths=lengths,
        )  # fmt: skip
        self.link.send(rank, message, buffers)

    def acquire(
        self,
        peer: Peer,
        ticket: Wait | None,
        size: int,
        scope: Scope | None,
        deadline: float | None = None,
    ) -> bool:
        """Wait until a first-level message of `size` bytes may go; False after `deadline`."""
        while ticket is not None:
            if not self.wait(ticket, deadline, scope):
                return False
            ticket = peer.take(size)
        return True

    def consumed(self, rank: int) -> None:
        """Note that a request of `rank` has started, and hand credit back when it is time."""
        peer = self._peers.get(rank) or self.peer(rank)
        if rank == self.rank:
            for ticket in peer.restore(1):
                self.fulfil(ticket)
            return
        due = peer.owe()
        if due:
            self.transmit(rank, CREDIT, self.rank, 0, aux=due)

    def owed(self, rank: int) -> int:
        """Return the credit that a reply to `rank` carries back, and settle it."""
        peer = self._peers.get(rank)
        return peer.settle() if peer is not None else 0

    def _on_credit(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self.credit(rank, frame.aux)

    def credit(self, rank: int, messages: int) -> None:
        """Take credit back from `rank` and let waiting callers go on."""
        for ticket in self.peer(rank).restore(messages):
            self.fulfil(ticket)

    # -- receiving -------------------------------------------------------------------------

    def dispatch(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        """Hand a frame to whom it is for. Local: runs no user code."""
        handler = self.handlers.get(frame[0])
        if handler is None:
            self.log(f"a frame of unknown kind {frame[0]} from rank {rank} was dropped")
        else:
            handler(rank, frame, buffers)
        self.note_received()  # last: until it is counted, the program is not quiet

    def forget(self, future: Any) -> bool:
        """Drop a call; whether it was still open."""
        return self.pending.pop(future.id, None) is not None

    def unseen(self, future: Any) -> None:
        """Count an error that nobody looked at, and log the first of each method.

        Local: called by a finaliser, so it decodes and writes nothing itself.
        """
        about, decode = future.about, future._decode
        count = self._unseen[about] = self._unseen.get(about, 0) + 1
        if count == 1 and decode is not None and not self.closed:
            self.later(lambda: self._log_unseen(about, decode))

    def _log_unseen(self, about: str, decode: Callable[[], Any]) -> None:
        try:
            decode()
        except BaseException as error:
            if error.__cause__ is not None:  # it was raised elsewhere, and only decoded here
                error.__traceback__ = None
            self.log(f"{about} failed and nobody looked at it:\n{error_text(error)}")

    def unseen_errors(self) -> dict[str, int]:
        """Return how often each method failed without anybody looking."""
        return {k: v for k, v in self._unseen.items() if v}
