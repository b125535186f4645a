"""Generator methods, item by item: back-pressure, order, and leaving early.

The caller grants items (a window of `WINDOW`), the service runs ahead that far and then
stands at its ``yield``, where it holds neither a thread nor a turn. Closing the iterator
closes the generator, so its ``finally`` runs.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from mpiml.errors import DeadlineError, UsageError
from mpiml.futures import Wait
from mpiml.payload import BORROW, RESULT, pack, unpack
from mpiml.scope import Scope, current_scope
from mpiml.server import MethodScope, Request, Server, own
from mpiml.wire import (
    FLAG_BODY_APART,
    FLAG_STREAM,
    ITEM,
    MORE,
    QUIT_STREAM,
    STREAM_END,
    Frame,
)

__all__ = ["WINDOW", "Stream", "StreamRun", "start_stream"]

WINDOW = 16
_END = object()


class Stream(Iterator[Any]):
    """What ``client.stream.method(x)`` returns: the items, as they come.

    Local. Leaving early (``close()``, the end of a ``with`` block, or dropping the iterator)
    closes the generator on the other side. Works in ``for`` and ``async for``.
    """

    window = WINDOW

    def __init__(self, target: Any, method: str, scope: Scope | None) -> None:
        self.id = 0
        self.target_vertex: int = target.vertex
        self._target = target
        self._method = method
        self._scope = scope
        self._items: deque[Any] = deque()
        self._wait = Wait(f"{target.title}.{method}() stream")
        self._taken = 0
        self._done = False  # the last frame has come
        self._closed = False  # the caller has left
        self._callbacks: list[Any] = []

    # the engine's side: any thread, no user code

    def item(self, decode: Any) -> None:
        """Take one item in."""
        self._items.append(decode)
        self._signal()

    def complete(self, decode: Any, failed: bool = False) -> None:
        """Take the end in: an error, or nothing."""
        self._items.append(_END if decode is None else decode)
        self._done = True
        self._signal()

    def fail(self, error: BaseException) -> None:
        """End with `error`."""

        def decode() -> Any:
            raise error

        self.complete(decode)

    def _signal(self) -> None:
        self._target.engine.fulfil(self._wait)
        while self._callbacks:
            self._callbacks.pop()(None)

    # the caller's side

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        if not self._items and not self._closed:
            timeout = self._target.timeout
            deadline = None if timeout is None else time.monotonic() + timeout
            scope = current_scope(required=False) or self._scope
            while not self._items:
                self._wait.ready = False
                if self._items:
                    break
                if not self._target.engine.wait(self._wait, deadline, scope):
                    raise DeadlineError(
                        f"{self._wait.about}: expected an item within {timeout:g} s, got none"
                    )
        return self._take()

    def _take(self) -> Any:
        if self._closed:
            raise StopIteration
        decode = self._items.popleft()
        if decode is _END:
            self._closed = True
            raise StopIteration
        self._taken += 1
        if self._taken * 2 >= WINDOW and not self._done:
            self._send(MORE, self._taken)
            self._taken = 0
        try:
            return decode()
        except BaseException:
            self._closed = self._closed or self._done
            raise

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        import asyncio

        from mpiml.futures import Future

        while not self._items and not self._closed:
            gate = Future(self._target.engine, self._target.title, self._method)
            gate._seen = True
            self._callbacks.append(lambda _: gate.complete(lambda: None))
            if self._items:
                break
            await gate
        await asyncio.sleep(0)
        try:
            return self._take()
        except StopIteration:
            raise StopAsyncIteration from None

    def _send(self, kind: int, count: int = 0) -> None:
        target = self._target
        target.engine.transmit(target.rank, kind, target.source, target.vertex, self.id, count)

    def close(self) -> None:
        """Leave: the generator is closed, items under way are dropped. Idempotent."""
        if not self._closed:
            self._closed = True
            self._items.clear()
            if not self._done:
                self._send(QUIT_STREAM)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # a finaliser sends nothing itself: it may run inside MPI or at interpreter exit
        if not self._closed and not self._done and not self._target.engine.closed:
            self._closed = True
            target, id = self._target, self.id
            target.engine.later(
                lambda: target.engine.transmit(
                    target.rank, QUIT_STREAM, target.source, target.vertex, id
                )
            )


class StreamRun:
    """A generator on the service's side; takes a turn for each item."""

    def __init__(self, request: Request, generator: Any) -> None:
        self.request = request
        self.generator = generator
        self.credit = request.frame.aux
        self.closing = False
        self.queued = True

    def run(self, server: Server, scope: MethodScope) -> None:
        """Produce one item, send it, and queue up again while the caller grants more."""
        request = self.request
        if self.closing:
            self.finish(server)
            return
        self.credit -= 1
        try:
            item = next(self.generator)
        except StopIteration:
            server.streams.pop((request.rank, request.frame.id), None)
            server.send(request, STREAM_END, pack(None))
            return
        except Exception as error:
            server.streams.pop((request.rank, request.frame.id), None)
            server.answer_error(request, error)
            return
        local = request.rank == server.engine.rank
        # a generator keeps what it yields in its own frame, so an item is copied unless given
        server.send(request, ITEM, own(pack(item, BORROW)) if local else pack(item, RESULT))
        self.queued = False
        del item
        self.advance(server)

    def advance(self, server: Server) -> None:
        """Queue for a turn, if there is something to do and it is not queued already."""
        if not self.queued and (self.credit > 0 or self.closing):
            self.queued = True
            server.enqueue(self)

    def finish(self, server: Server) -> None:
        """Close the generator and send the end."""
        request = self.request
        server.streams.pop((request.rank, request.frame.id), None)
        try:
            self.generator.close()
        except Exception as error:
            server.answer_error(request, error)
            return
        server.send(request, STREAM_END, pack(None))


def start_stream(server: Server, request: Request, method: Any, scope: MethodScope) -> None:
    """Start a generator method, for a request that asked for a stream."""
    if not request.frame.flags & FLAG_STREAM:
        raise UsageError(
            f"{server.owner.title}.{request.frame.name.decode()}: a generator method is called "
            "as client.stream.method(...), got a plain call"
        )
    args, kwargs = request.arguments()
    generator = method(*args, **kwargs)
    if not hasattr(generator, "__next__"):
        generator = iter(generator)
    run = StreamRun(request, generator)
    server.streams[request.rank, request.frame.id] = run
    run.run(server, scope)


def on_stream_control(server: Server, rank: int, frame: Frame) -> None:
    """Take in more credit for a stream, or its end."""
    run = server.streams.get((rank, frame.id))
    if run is None:
        return  # it had ended
    if frame.kind == MORE:
        run.credit += frame.aux
    else:
        run.closing = True
    run.advance(server)


def decode_item(frame: Frame, buffers: Sequence[Any]) -> Any:
    """Return a function that unpacks an item when the caller takes it."""

    def decode() -> Any:
        body: Any = frame.body
        rest = buffers
        if frame.flags & FLAG_BODY_APART:
            body, rest = buffers[0], buffers[1:]
        return unpack(frame.encoding, body, rest)

    return decode
