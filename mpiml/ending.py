"""How a program ends: who decides, how all hear of it, and when nothing is under way.

Each rank tells the rank above it whether bodies are open, here or below; at the top, none means
that every body has returned or waits for the stop. Requests to stop go to the top as well, so there
is one decision and one reason, which comes down the same tree. Then bodies end, calls already
made are run until two rounds of counts agree, and the ranks leave together.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpiml import control
from mpiml.contents import parts
from mpiml.control import FINISHED, STUCK, Note
from mpiml.engine import Engine
from mpiml.waits import Wait
from mpiml.waves import Values, Waves
from mpiml.wire import STATUS, STOP, STOP_ASK, STOP_REQUEST, STOP_TOLD, Frame

__all__ = ["Ending"]


# Buffers of sums that are not done, or that a program has given up: MPI may still write there.
_lent: dict[int, Any] = {}


class Ending:
    """One rank's part in the end of a program.

    Local, except `settle`, which all ranks enter once.

    Parameters
    ----------
    engine
        The rank's engine.
    bodies
        Number of bodies, in the whole program, that the end waits for.
    on_stop
        Called with each note that counts, on whatever thread learns of it; runs no user code.
        The first begins the stop, and a failure may follow a wish.
    """

    def __init__(self, engine: Engine, bodies: int, on_stop: Callable[[Note], None]) -> None:
        self.engine = engine
        self.note: Note | None = None
        self.stopped = Wait("the end of the program")
        self.abandoned = False
        self._on_stop = on_stop
        self.bodies = bodies
        self._lock = threading.Lock()
        self._open = 0
        self._children = dict.fromkeys(control.children(engine.rank, engine.size), -1)
        self._sent = -1
        self._ready = False
        self._asked = False  # for the end, on this rank; the decision may be under way still
        self._passed = 0  # how much weight what has been asked for above has
        self._asks = Waves(engine, STOP_ASK, STOP_TOLD, self._look, _either)
        engine.handlers.update(
            {
                STATUS: self._on_status,
                STOP_REQUEST: self._on_request,
                STOP: self._on_order,
            }
        )

    # -- bodies that are open ----------------------------------------------------------------

    def start(self, open_bodies: int) -> None:
        """Begin counting: this rank has `open_bodies` that the end waits for."""
        with self._lock:
            self._open += open_bodies  # a rank of another program may have left already
            self._ready = True
        self._report()

    def body(self, change: int) -> None:
        """Note that a body was left or entered again: -1 or +1."""
        with self._lock:
            self._open += change
        self._report()

    def _on_status(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        with self._lock:
            self._children[rank] = frame.aux
        self._report()

    def _report(self) -> None:
        above = control.parent(self.engine.rank)
        with self._lock:
            below = list(self._children.values())
            if not self._ready or -1 in below:
                return
            # Whether any is open, not how many: else the top would hear of each body.
            any_open = int(self._open + sum(below) > 0)
            if any_open == self._sent:
                return
            self._sent = any_open
            if above >= 0:  # under the lock: an older answer must not overtake a newer one
                self.engine.transmit(above, STATUS, self.engine.rank, above, aux=any_open)
        if above < 0 and not any_open and self.bodies:
            self.accept(Note(FINISHED, 0, 0, 0, "finished"))

    # -- the decision ------------------------------------------------------------------------

    def request(self, note: Note) -> None:
        """Ask for the end of the program; the first reason wins, a failure over a wish."""
        self._asked = True  # before anybody can hear of it
        self._pass_on(note)

    def _on_request(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self._pass_on(_note(frame, buffers))

    def _pass_on(self, note: Note) -> None:
        """Let the top hear of it, unless what has been passed on counts as much.

        So where all ranks fail at once, no rank hears more than its share.
        """
        above = control.parent(self.engine.rank)
        if above < 0:
            self.accept(note)
            return
        weight = 1 if note.benign else 3 if note.reason == STUCK else 2
        with self._lock:
            if weight <= self._passed:
                return
            self._passed = weight
        self.engine.transmit(above, STOP_REQUEST, self.engine.rank, above, body=note.pack())

    def _on_order(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self.accept(_note(frame, buffers))

    def accept(self, note: Note) -> None:
        """Take a decision in and send it down, unless one that counts as much came before."""
        with self._lock:
            old = self.note
            news = old is None or (old.benign and not note.benign)
            if note.reason == STUCK:
                if self.abandoned:
                    return
                self.abandoned = True
            elif not news:
                return
            if news:
                self.note = note
        engine = self.engine
        for rank in control.children(engine.rank, engine.size):
            engine.transmit(rank, STOP, engine.rank, rank, body=note.pack())
        self._on_stop(note)
        engine.fulfil(self.stopped)
        engine.interrupt()

    # -- whether a decision is under way ------------------------------------------------------

    def ask(self, then: Callable[[bool], None]) -> None:
        """Learn whether the end has been asked for on any rank; asks all, and does not wait.

        True also where that was before anything the caller has heard of, however slowly the stop
        itself spreads: every rank answers later than that. `then` is called on the thread that
        takes the last answer in.
        """
        self._asks.ask(lambda values: then(bool(values[0])))

    def _look(self) -> Values:
        return (int(self._asked or self.note is not None),)

    # -- quiet ---------------------------------------------------------------------------------

    def settle(
        self, comm: Any, active: Callable[[], tuple[int, int]], until: Callable[[], bool]
    ) -> int | None:
        """Serve until no call is under way anywhere, and no frame.

        Collective over the program, on the main thread of each rank.

        Parameters
        ----------
        comm
            The engine's communicator; None in a single process.
        active
            Number of calls queued or running here, and of streams that stand open.
        until
            Whether to give up (stragglers are dealt with).

        Returns
        -------
        int or None
            How many streams stand open in the whole program; None if it gave up.
        """
        last: list[int] | None = None
        while True:
            self.engine.turn()
            sent, received = self.engine.counts()
            totals = self._sum(comm, [sent, received, *active()], until)
            if totals is None:
                return None
            if totals[0] == totals[1] and not totals[2] and totals == last:
                return totals[3]
            if totals == last or comm is None:
                self.rest(0.0005)
            last = totals

    def _sum(self, comm: Any, values: list[int], until: Callable[[], bool]) -> list[int] | None:
        if until():
            return None
        if comm is None:
            return values
        from array import array

        out, given = array("q", bytes(8 * len(values))), array("q", values)
        _lent[id(out)] = (out, given)  # the request itself does not keep them
        if not self.finish(comm.Iallreduce(given, out), until):
            return None
        del _lent[id(out)]
        return out.tolist()

    def finish(self, request: Any, until: Callable[[], bool]) -> bool:
        """Drive progress until a nonblocking collective is done; False if given up."""
        pause = 0.00002
        while not request.Test():
            if until():
                return False
            self.rest(pause)
            pause = min(pause * 1.5, 0.002)
        return True

    def rest(self, seconds: float) -> None:
        """Drive progress for a while."""
        never = Wait("the other ranks, to end the program together")
        self.engine.wait(never, time.monotonic() + seconds, None)

    @property
    def failed(self) -> bool:
        """Whether the program ends because of a failure, not a wish or because it is done."""
        return self.note is not None and not self.note.benign


def _note(frame: Frame, buffers: Sequence[Any]) -> Note:
    return Note.unpack(bytes(parts(frame, buffers)[0]))


def _either(one: Values, other: Values) -> Values:
    return (one[0] | other[0],)
