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
from typing import Any, Protocol

from mpiml._native import join_plain
from mpiml.contents import own, parts
from mpiml.engine import APART, Engine
from mpiml.errors import ServiceGoneError, UnknownMethodError
from mpiml.payload import BORROW, RESULT, Packed, pack, pack_error, unpack_call
from mpiml.scope import enter, leave
from mpiml.tracebacks import remote_text
from mpiml.turns import MethodScope, Turn
from mpiml.waits import Wait
from mpiml.wire import ERROR, FLAG_STREAM, REPLY, Frame

__all__ = ["MethodScope", "Request", "Server", "Task", "Wrapper", "remote_text"]


class Task(Protocol):
    """Something that takes a turn in a service."""

    def run(self, server: "Server", scope: "MethodScope") -> None:
        """Do it, answer, and never raise but to end the program."""


class Wrapper(Protocol):
    """What collects the requests of a method before they become a task."""

    def __call__(self, request: "Request", server: "Server") -> Task | None:
        """Take a request in; return a task when one is complete."""

    def flush(self, server: "Server") -> None:
        """Make a task of what has been collected, and enqueue it."""


class Request:
    """One call, as it came."""

    __slots__ = ("buffers", "frame", "rank", "started")
    started: bool  # of a batched call: whether it has given its credit back

    def __init__(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self.rank = rank
        self.frame = frame
        self.buffers = buffers

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode the arguments: they are the method's own."""
        frame = self.frame
        if not self.buffers:
            return unpack_call(frame[1], frame[8])
        return unpack_call(frame.encoding, *parts(frame, self.buffers))

    def run(self, server: "Server", scope: MethodScope) -> None:
        """Run the method and answer, or hand the request to the starter of its kind."""
        frame = self.frame
        name = frame[7]
        server.engine.consumed(self.rank)
        try:
            method = server.methods.get(name)
            if method is None:
                raise server.unknown(name)
            if name in server.starters or frame[2] & FLAG_STREAM:
                starter = server.starters.get(name) or server.starters[b""]
                starter(server, self, method, scope)
            else:
                server.answer(self, _call(method, self))
        except Exception as error:
            if frame[2] & FLAG_STREAM:
                server.streams.pop((self.rank, frame.id), None)
            server.answer_error(self, error)


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
        self.gone: BaseException | None = None
        self.open = False
        self.lock = threading.Lock()
        self._queue: deque[Task] = deque()
        self._idle: list[_Ticket] = []
        self.resuming: deque[Turn] = deque()
        self._running = 0
        self.detached = 0  # async methods under way
        self._stopping = False

    # -- turns -----------------------------------------------------------------------------

    def submit(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        """Take a request in; runs no user code."""
        request = Request(rank, frame, buffers)
        if self.gone is not None or self._stopping:
            self.engine.consumed(rank)
            self.refuse(request)
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
                ticket = self._wake_up()
                ticket.task = task
                self.engine.fulfil(ticket)
            else:
                self._queue.append(task)
                self._kick()

    def enqueue(self, task: Task) -> None:
        """Put a task at the end of the queue and give it a turn if there is one."""
        with self.lock:
            self._queue.append(task)
            self._kick()

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
        """Run calls on this thread, until the server stops or `until` is ready."""
        scope = MethodScope(self)
        token = enter(scope)
        ticket = _Ticket(self.owner.title)
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
                    if self._stopping or (until is not None and until.ready):
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
        for run in list(self.streams.values()):
            if hasattr(run, "abandon"):
                run.abandon(self)
        with self.lock:
            self._stopping = True
            idle, self._idle = self._idle, []
        for ticket in idle:
            self.engine.fulfil(ticket)

    def wake(self) -> None:
        """Make the thread that serves `until` look at it; incomplete batches run now."""
        for wrapper in self.wrappers.values():
            wrapper.flush(self)
        with self.lock:
            idle, self._idle = self._idle, []
        for ticket in idle:
            self.engine.fulfil(ticket)

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
        """Calls that are queued, running, waiting or under way as coroutines."""
        return self._running + len(self._queue) + len(self.resuming) + self.detached

    # -- answers ---------------------------------------------------------------------------

    def unknown(self, name: bytes) -> UnknownMethodError:
        """Build the error for a method that is not served."""
        served = ", ".join(sorted(n.decode() for n in self.methods)) or "none"
        return UnknownMethodError(
            f"{self.owner.title}: method {name.decode()!r} not found; served are: {served}"
        )

    def answer(self, request: Request, result: Any) -> None:
        """Send the result. It is a snapshot: what the service may still change is copied."""
        engine = self.engine
        rank = request.rank
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
        self.gone = error
        with self.lock:
            queue, self._queue = list(self._queue), deque()
        for task in queue:
            if isinstance(task, Request):
                self.engine.consumed(task.rank)
                self.refuse(task)


class _Ticket(Wait):
    """An idle thread of a server; `task` is what it was woken for."""

    __slots__ = ("task",)

    patient = True  # need not drive: see Driver

    def __init__(self, title: str) -> None:
        super().__init__(f"{title}: idle")
        self.task: Task | None = None


def _call(method: Callable[..., Any], request: Request) -> Any:
    # a frame of its own, so that nothing but the result is alive when it is packed: an array
    # that only the result refers to is sent without a copy
    frame = request.frame
    if request.buffers:
        args, kwargs = request.arguments()
    else:
        args, kwargs = unpack_call(frame[1], frame[8])
    return method(*args, **kwargs)
