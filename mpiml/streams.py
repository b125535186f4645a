"""Generator methods, item by item: back-pressure, order, and leaving early.

The caller grants items (a window of `WINDOW`), the service runs ahead that far and then
stands at its ``yield``, where it holds neither a thread nor a turn. Closing the iterator
closes the generator, so its ``finally`` runs.
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

from mpiml import threads
from mpiml.callbacks import await_in, wake
from mpiml.contents import own
from mpiml.errors import DeadlineError, UsageError
from mpiml.payload import BORROW, RESULT, pack
from mpiml.scope import Scope, current_scope
from mpiml.server import Request, Server
from mpiml.turns import MethodScope
from mpiml.waits import Wait
from mpiml.wire import (
    FLAG_STREAM,
    ITEM,
    MORE,
    QUIT_STREAM,
    STREAM_END,
    Frame,
)

__all__ = [
    "WINDOW",
    "Inbox",
    "Stream",
    "StreamRun",
    "on_stream_control",
    "start_stream",
]

WINDOW = 16
_END = object()
_LEFT = object()  # in the place of a stream that the caller left before its first turn


class Inbox:
    """What has come of a stream.

    The engine holds this and not the iterator, so that dropping the iterator is noticed.
    """

    __slots__ = ("callbacks", "done", "engine", "id", "items", "left", "target_vertex", "wait")

    def __init__(self, engine: Any, about: str, vertex: int) -> None:
        self.id = 0
        self.engine = engine
        self.target_vertex = vertex
        self.items: deque[Any] = deque()
        self.wait = Wait(about)
        self.done = False  # the last frame has come
        self.left = False  # the caller has left
        self.callbacks: deque[Any] = deque()

    @property
    def about(self) -> str:
        """What is waited for."""
        return self.wait.about

    def item(self, decode: Any) -> None:
        """Take one item in. Local: called by the engine, on any thread."""
        if not self.left:
            self.items.append(decode)
            self._signal()

    def complete(self, decode: Any, failed: bool = False) -> None:
        """Take the end in: an error or a last value, or nothing."""
        self.done = True
        if not self.left:
            if decode is not None:
                self.items.append(decode)
            self.items.append(_END)
            self._signal()

    def fail(self, error: BaseException) -> None:
        """End with `error`."""

        def decode() -> Any:
            raise error

        self.complete(decode)

    def _signal(self) -> None:
        self.engine.fulfil(self.wait)
        while self.callbacks:
            try:
                callback = self.callbacks.popleft()
            except IndexError:
                return
            callback()


class Stream(Iterator[Any]):
    """What ``client.stream.method(x)`` returns: the items, as they come.

    Local. Leaving early (``close()``, the end of a ``with`` block, or dropping the iterator)
    closes the generator on the other side. Works in ``for`` and ``async for``.
    """

    def __init__(self, target: Any, inbox: Inbox, scope: Scope | None) -> None:
        self._target = target
        self._inbox = inbox
        self._scope = scope
        self._taken = 0
        self._over = False  # nothing more is to be had: the end has been seen, or we have left

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        inbox = self._inbox
        if not inbox.items and not self._over:
            timeout = self._target.timeout
            deadline = None if timeout is None else time.monotonic() + timeout
            scope = current_scope(required=False) or self._scope
            while not inbox.items:
                inbox.wait.ready = False
                if inbox.items:
                    break
                if not inbox.engine.wait(inbox.wait, deadline, scope):
                    raise self._late()
        return self._take()

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"{self._inbox.about}: expected an item within {self._target.timeout:g} s, got none"
        )

    def _take(self) -> Any:
        if self._over:
            raise StopIteration
        inbox = self._inbox
        decode = inbox.items.popleft()
        if decode is _END:
            self._over = True
            raise StopIteration
        self._taken += 1
        if self._taken * 2 >= WINDOW and not inbox.done:
            self._send(MORE, self._taken)
            self._taken = 0
        return decode()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        if self._inbox.items or self._over:
            import asyncio

            await asyncio.sleep(0)  # other tasks want a turn too
        else:
            await _Arrival(self)
        try:
            return self._take()
        except StopIteration:
            raise StopAsyncIteration from None

    def _send(self, kind: int, count: int = 0) -> None:
        target = self._target
        target.engine.transmit(
            target.rank, kind, target.source, target.vertex, self._inbox.id, count
        )

    def close(self) -> None:
        """Leave: the generator is closed, items under way are dropped. Idempotent."""
        if not self._over:
            self._over = True
            inbox = self._inbox
            inbox.left = True
            inbox.items.clear()
            if not inbox.done and not inbox.engine.closed:
                self._send(QUIT_STREAM)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # a finaliser sends nothing itself: it may run inside MPI or at interpreter exit
        if not self._over:
            self._over = True
            inbox = self._inbox
            inbox.left = True
            if not inbox.done and not inbox.engine.closed:
                target, id = self._target, inbox.id
                inbox.engine.later(
                    lambda: target.engine.transmit(
                        target.rank, QUIT_STREAM, target.source, target.vertex, id
                    )
                )


class _Arrival:
    """Waits for the next item in a coroutine."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __await__(self) -> Generator[Any, None, None]:
        import asyncio

        stream = self._stream
        inbox = stream._inbox
        timeout = stream._target.timeout
        threads.refuse_await(inbox.engine, "a stream")
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        scope = current_scope(required=False) or stream._scope
        while not inbox.items:
            proxy = loop.create_future()
            inbox.callbacks.append(partial(wake, proxy))
            if inbox.items:
                return
            timer = None if end is None else loop.call_at(end, wake, proxy)
            yield from await_in(scope, proxy)
            if timer is not None:
                timer.cancel()
            if not inbox.items and end is not None and loop.time() >= end:
                raise stream._late()


class StreamRun:
    """A generator on the service's side; takes a turn for each item."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.generator: Any = None
        self.credit = request.frame.aux
        self.closing = False
        self._lock = threading.Lock()
        self._busy = True  # queued for a turn, or in one

    def run(self, server: Server, scope: MethodScope) -> None:
        """Produce one item, send it, and queue up again while the caller grants more."""
        if self.closing:
            self._finish(server)
            return
        request = self.request
        with self._lock:
            self.credit -= 1
        try:
            item = next(self.generator)
        except (StopIteration, SystemExit) as end:
            if getattr(end, "code", None):
                raise
            self._forget(server)
            server.send(request, STREAM_END, pack(None))
            return
        except Exception as error:
            self._forget(server)
            server.answer_error(request, error)
            return
        local = request.rank == server.engine.rank
        try:
            # what the generator keeps in a variable is copied, unless it is given
            packed = (
                own(pack(item, BORROW, "an item")) if local else pack(item, RESULT, "an item")
            )
        except Exception as error:  # it cannot be pickled
            self._finish(server, error)
            return
        del item
        server.send(request, ITEM, packed)
        self._advance(server, True)

    def refuse(self, server: Server) -> None:
        """Answer that the service is gone; its end closes the generator, which is user code."""
        self._forget(server)
        server.refused.append(self)
        server.refuse(self.request)

    def grant(self, server: Server, items: int) -> None:
        """Take more credit in; 0: the caller has left."""
        with self._lock:
            self.credit += items
            self.closing = self.closing or not items
        self._advance(server, False)

    def _advance(self, server: Server, had_turn: bool) -> None:
        """Queue for a turn, if there is something to do and it is not queued already."""
        with self._lock:
            if self._busy and not had_turn:
                return
            self._busy = self.credit > 0 or self.closing
            if not self._busy:
                return
        server.enqueue(self)

    def _forget(self, server: Server) -> None:
        server.streams.pop((self.request.rank, self.request.frame.id), None)

    def _finish(self, server: Server, error: Exception | None = None) -> None:
        """Close the generator and send the end, or `error`."""
        self._forget(server)
        try:
            self._close()
        except Exception as late:
            error = error or late
        if error is not None:
            server.answer_error(self.request, error)
        else:
            server.send(self.request, STREAM_END, pack(None))

    def _close(self) -> None:
        close = getattr(self.generator, "close", None)  # other iterators have none
        if close is not None:
            close()

    def abandon(self, server: Server) -> None:
        """Close the generator of a stream that nobody has ended: the service stops."""
        self._forget(server)
        try:
            self._close()
        except Exception:
            server.engine.log_exception(f"{server.owner.title}: closing a generator raised")


class _AsyncItems:
    """An asynchronous generator, driven item by item on the node's event loop."""

    def __init__(self, generator: Any, loop: Any, scope: Scope) -> None:
        self._generator = generator
        self._loop = loop
        self._scope = scope

    def __iter__(self) -> "_AsyncItems":
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run(anext(self._generator), current_scope() or self._scope)
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Run its ``finally``."""
        self._loop.run(self._generator.aclose(), self._scope)


def start_stream(server: Server, request: Request, method: Any, scope: MethodScope) -> None:
    """Start a generator method, for a request that asked for a stream."""
    if not request.frame.flags & FLAG_STREAM:
        raise UsageError(
            f"{server.owner.title}.{request.frame.name.decode()}: a generator method is called "
            "as client.stream.method(...), got a plain call"
        )
    run = StreamRun(request)
    key = (request.rank, request.frame.id)
    with server.lock:
        run.closing = server.streams.get(key) is _LEFT
        server.streams[key] = run
    if not run.closing:
        args, kwargs = request.arguments()
        generator = method(*args, **kwargs)
        if hasattr(generator, "__anext__"):
            generator = _AsyncItems(generator, server.owner.loop, scope)
        elif not hasattr(generator, "__next__"):
            generator = iter(generator)
        run.generator = generator
    run.run(server, scope)


def on_stream_control(server: Server, rank: int, frame: Frame) -> None:
    """Take in more credit for a stream, or its end."""
    key = (rank, frame.id)
    with server.lock:
        run = server.streams.get(key)
        if run is None and key in server.streams:  # it has not had its first turn
            server.streams[key] = _LEFT
            return
    if isinstance(run, StreamRun):  # else it has ended
        run.grant(server, frame.aux if frame.kind == MORE else 0)
