"""The side of a service: which call runs when, on which thread, and what it answers.

Calls are started in the order they came, at most ``concurrency`` at once. One that waits in
an mpiml call or stands at a ``yield`` gives its turn to the next, and takes it back, before
new calls, when its wait is over. Threads of the service follow each other: an idle one waits
in the engine and usually drives it, so a call is received, run and answered on one thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpiml._native import join_plain
from mpiml.contents import own
from mpiml.engine import APART, Engine
from mpiml.errors import ServiceGoneError, UnknownMethodError
from mpiml.payload import BORROW, RESULT, Packed, pack, pack_error
from mpiml.scope import enter, leave
from mpiml.tasks import Request, Task, Wrapper
from mpiml.tracebacks import remote_text
from mpiml.turns import MethodScope, Turn
from mpiml.waits import Wait
from mpiml.wire import ERROR, FLAG_STREAM, REPLY, Frame

__all__ = ["MethodScope", "Request", "Server", "Task", "Wrapper", "remote_text"]


class Server:
    """Serves the methods of one object.

    Local: made by the launcher for each service on this rank.

    Parameters
    ----------
    engine
        The rank's engine.
    owner
        The node: ``vertex``, ``title``, ``fail(error)``.
    concurrency
        How many methods may run at once.
    """

    def __init__(self, engine: Engine, owner: Any, concurrency: int) -> None:
        self.engine = engine
        self.owner = owner
        self.concurrency = concurrency
        self.methods: dict[bytes, Callable[..., Any]] = {}
        self.wrappers: dict[bytes, Wrapper] = {}
        self.starters: dict[bytes, Callable[[Server, Request, Any, MethodScope], None]] = {}
        self.streams: dict[tuple[int, int], Any] = {}
        self.refused: list[Any] = []  # streams refused in the middle; `stop` closes them
        self.gone: BaseException | None = None
        self.open = False
        self.lock = threading.Lock()
        self._queue: deque[Task] = deque()
        self._idle: list[_Ticket] = []
        self.resuming: deque[Turn] = deque()
        self._running = 0  # turns that are held
        self._busy = 0  # tasks on threads, those that wait without a turn too
        self.detached = 0  # async methods under way
        self._stopping = False
        self.ending = False  # the program's end has begun: see `wake`
        self._main: _Ticket | None = None  # of the thread that serves for a while only

    # -- turns -----------------------------------------------------------------------------

    def submit(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        """Take a request in; runs no user code."""
        request = Request(rank, frame, buffers)
        if self.gone is not None or self._stopping:
            request.refuse(self)
            return
        task: Task = request
        if frame[2] & FLAG_STREAM:
            self.streams[rank, frame.id] = None  # known before its first turn
        elif self.wrappers and frame.name in self.wrappers:
            batch = self.wrappers[frame.name](request, self)
            if batch is None:
                return
            task = batch
        with self.lock:
            if (
                self._idle
                and self._running < self.concurrency
                and not (self._queue or self.resuming)
            ):  # the most frequent case of _kick
                self._running += 1
                self._busy += 1
                ticket = self._wake_up()
                ticket.task = task
                self.engine.fulfil(ticket)
                return
            if self.gone is None:
                self._queue.append(task)
                self._kick()
                return
        # it has failed since the look above
        task.refuse(self)  # type: ignore[unreachable]

    def enqueue(self, task: Task) -> None:
        """Put a task at the end of the queue and give it a turn if there is one."""
        with self.lock:
            if self.gone is None:
                self._queue.append(task)
                self._kick()
                return
        task.refuse(self)  # nobody would look at the queue again

    def serve(self) -> None:
        """Let calls start: the object has been constructed."""
        with self.lock:
            self.open = True
            self._kick()

    def _kick(self) -> None:
        while self.open and self._running < self.concurrency:
            if self.resuming:
                self._running += 1
                turn = self.resuming.popleft()
                turn.scope.granted()
                self.engine.fulfil(turn)
                turn.call_back()
            elif self._queue:
                self._running += 1
                self._busy += 1
                task = self._queue.popleft()
                if self._idle:
                    ticket = self._wake_up()
                    ticket.task = task
                    self.engine.fulfil(ticket)
                else:
                    threading.Thread(
                        target=self.work, args=(task,), daemon=True,
                        name=f"mpiml {self.owner.title}",
                    ).start()  # fmt: skip
            else:
                return

    def _wake_up(self) -> "_Ticket":
        """Take an idle thread, the one that drives if it is one of them: it is here already."""
        driving = self.engine.driving
        if len(self._idle) > 1 and driving in self._idle:
            self._idle.remove(driving)
            return driving  # type: ignore[no-any-return]
        return self._idle.pop()

    def give_back(self) -> None:
        """Give a turn back; under `lock`."""
        self._running -= 1
        self._kick()

    def take_turn(self) -> bool:
        """Take a turn if one is free; under `lock`."""
        if self._running < self.concurrency:
            self._running += 1
            return True
        return False

    def work(self, task: Task | None = None, until: Wait | None = None) -> None:
        """Run calls on this thread, until the server stops, or `until` is ready or about to be."""
        scope = MethodScope(self)
        token = enter(scope)
        ticket = _Ticket(self.owner.title)
        if until is not None:
            self._main = ticket
        try:
            while True:
                if task is not None:
                    try:
                        task.run(self, scope)
                    except BaseException as error:  # sys.exit, or a fault of ours
                        self.owner.fail(error)
                ticket.ready = False
                with self.lock:
                    if scope.waits:  # a thread or task that the method has left behind
                        scope = self._renew(scope)
                    if task is not None:
                        self._running -= 1
                        self._busy -= 1
                    # not `until.ready` alone: `wake` comes first, and does not come again
                    if self._stopping or (until is not None and (until.ready or self.ending)):
                        self._kick()
                        return
                    ticket.task = task = None
                    if (
                        self.open
                        and self._queue
                        and not self.resuming
                        and (self._running < self.concurrency)
                    ):
                        self._running += 1
                        self._busy += 1
                        task = self._queue.popleft()
                    else:
                        self._idle.append(ticket)
                        if self._queue or self.resuming:
                            self._kick()
                if task is None:
                    task = self._rest(ticket)
                    if task is None:
                        return
        finally:
            if until is not None:
                self._main = None
            leave(token)

    def _renew(self, scope: MethodScope) -> MethodScope:
        scope.ended = True
        if not scope.holds:
            self._running += 1  # as if it held the turn that is given back next
        scope = MethodScope(self)
        enter(scope)
        return scope

    def _rest(self, ticket: "_Ticket") -> Task | None:
        """Wait for a task; None where this thread is to look at its end."""
        rest = self.engine.pause_us
        if rest and not ticket.ready:
            time.sleep(rest * 1e-6)
        try:
            self.engine.wait(ticket, None, None)
        except ServiceGoneError:
            return None  # the engine was closed
        return ticket.task

    def stop(self) -> None:
        """End the service's threads and answer what still comes with `ServiceGoneError`."""
        for run in [*self.streams.values(), *self.refused]:
            if hasattr(run, "abandon"):
                run.abandon(self)
        with self.lock:
            self._stopping = True
            idle, self._idle = self._idle, []
        for ticket in idle:
            self.engine.fulfil(ticket)

    def wake(self) -> bool:
        """Make the thread that serves `until` look at it; incomplete batches run from now on.

        Returns whether that thread is in a call, and will look when this is done only.
        """
        self.ending = True
        for wrapper in self.wrappers.values():
            wrapper.flush(self)
        with self.lock:
            idle, self._idle = self._idle, []
            busy = self._main is not None and self._main not in idle
        for ticket in idle:
            self.engine.fulfil(ticket)
        return busy

    def keep_turn(self) -> None:
        """Let a coroutine hold a turn beyond the thread that started it."""
        with self.lock:
            self._running += 1  # the thread gives back the one it came with

    def detach(self, count: int) -> None:
        """Count coroutines under way."""
        with self.lock:
            self.detached += count

    @property
    def running(self) -> int:
        """Methods that hold a turn now."""
        return self._running

    @property
    def active(self) -> int:
        """Calls that are queued, running, waiting or under way as coroutines.

        Not turns: a method that waits holds none, and its reply may have come already.
        """
        with self.lock:  # a task on its way from the queue to a thread counts
            return self._busy + len(self._queue) + self.detached

    # -- answers ---------------------------------------------------------------------------

    def unknown(self, name: bytes) -> UnknownMethodError:
        """Build the error for a method that is not served."""
        names = sorted(n.decode() for n in self.methods)
        served = ", ".join([n for n in names if n.isidentifier()]) or "none"  # not our own
        return UnknownMethodError(
            f"{self.owner.title}: method {name.decode()!r} not found; served are: {served}"
        )

    def answer(self, request: Request, result: Any) -> None:
        """Send the result. It is a snapshot: what the service may still change is copied."""
        engine = self.engine
        rank = request.rank
        if engine.guests is not None and rank >= engine.size:
            engine.guests.answer(request, result, self.owner.title)
            return
        if rank == engine.rank:
            self.send(request, REPLY, own(pack(result, BORROW, "the result")))
            return
        frame = request.frame
        owed = engine.owed(rank)
        message = join_plain(REPLY, 0, frame[4], frame[3], frame[5], owed, b"", result)
        if message is not None and len(message) < APART:
            engine.note_sent()
            engine.link.send(rank, message)
            return
        try:
            packed = pack(result, RESULT, "the result")
        except BaseException:
            engine.peer(rank).owe(owed)  # the error that is sent instead carries it
            raise
        engine.transmit(
            rank, REPLY, frame.target, frame.source, frame.id, owed,
            encoding=packed.encoding, body=packed.body, buffers=packed.buffers,
        )  # fmt: skip

    def answer_error(self, request: Request, error: BaseException) -> None:
        """Send an exception with its traceback as text."""
        guests = self.engine.guests
        if guests is not None and request.rank >= self.engine.size:
            guests.refuse(request, error, self.owner.title)
            return
        packed = pack_error(error)
        if request.rank == self.engine.rank:
            packed = own(packed)
        text = remote_text(error, self.owner.title, self.engine.rank)
        self.send(request, ERROR, packed, text.encode())

    def send(self, request: Request, kind: int, packed: Packed, name: bytes = b"") -> None:
        """Send a reply frame; it carries credit back."""
        frame = request.frame
        engine = self.engine
        engine.transmit(
            request.rank, kind, frame.target, frame.source, frame.id,
            engine.owed(request.rank) if request.rank != engine.rank else 0,
            encoding=packed.encoding, name=name, body=packed.body, buffers=packed.buffers,
        )  # fmt: skip

    def refuse(self, request: Request) -> None:
        """Answer that the service is gone, with the reason where it is known."""
        error = ServiceGoneError(f"{self.owner.title} has stopped; expected a running service")
        if self.gone is not None:
            error = ServiceGoneError(f"{self.owner.title} failed: {self.gone!r}")
            error.__cause__ = self.gone
        self.answer_error(request, error)

    def fail_all(self, error: BaseException) -> None:
        """Answer everything queued, and everything to come, that the service is gone."""
        with self.lock:
            self.gone = error  # from here on nothing is queued
            queue, self._queue = list(self._queue), deque()
        for wrapper in self.wrappers.values():
            wrapper.flush(self)
        for task in queue:
            task.refuse(self)


class _Ticket(Wait):
    """An idle thread of a server; `task` is what it was woken for."""

    __slots__ = ("task",)

    patient = True  # need not drive: see Driver

    def __init__(self, title: str) -> None:
        super().__init__(f"{title}: idle")
        self.task: Task | None = None
