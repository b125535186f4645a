"""Batched methods: many callers, one call of the method with a leading batch axis.

Requests wait in a list, not in threads, so a batch of any size fills with any number of
turns. Callers whose arguments have another shape or dtype form a call of their own: a bad
shape fails only its caller.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from mpiml.alarms import Alarm
from mpiml.errors import UsageError
from mpiml.server import Request, Server, Task
from mpiml.turns import MethodScope
from mpiml.wire import FLAG_STREAM

__all__ = ["Batcher", "batched", "start_batched"]


def batched(
    max_batch_size: int, timeout: float, pad: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method of a service take many callers' arguments at once.

    Local: a decorator. The method is called with every argument stacked along a new first
    axis, shape (n, ...), and returns an array or list of length n, or a tuple or dict of such;
    caller i gets item i. n is at most `max_batch_size`.

    Parameters
    ----------
    max_batch_size
        The largest n.
    timeout
        Seconds a call may wait for others before an incomplete batch runs.
    pad
        Fill an incomplete batch up to `max_batch_size` by repeating its last row; the extra
        results are dropped. Useful where shapes are compiled.

    Raises
    ------
    UsageError
        If `max_batch_size` < 1 or `timeout` < 0.
    """
    if max_batch_size < 1 or timeout < 0:
        raise UsageError(
            "mpiml.batched: expected max_batch_size >= 1 and timeout >= 0, got "
            f"{max_batch_size} and {timeout}"
        )

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.__mpiml_batched__ = (max_batch_size, timeout, pad)  # type: ignore[attr-defined]
        return method

    return mark


class Batcher:
    """Collects the requests of one batched method of one service."""

    def __init__(
        self, method: Callable[..., Any], size: int, timeout: float, pad: bool
    ) -> None:
        self._method = method
        self._size = size
        self._timeout = timeout
        self._pad = pad
        self._lock = threading.Lock()
        self._waiting: list[Request] = []
        self._timer: Alarm | None = None

    def __call__(self, request: Request, server: Server, started: bool = False) -> Task | None:
        """Take a request in; return a task when a batch is full.

        `started` says that the request has had a turn already, and gave its credit back.
        """
        request.started = started
        server.detach(+1)  # the program does not end over it
        with self._lock:
            self._waiting.append(request)
            # Once the end has begun nobody joins: see `Server.wake`, which flushes what is here.
            if len(self._waiting) >= self._size or server.ending:
                return self._cut()
            if self._timer is None:
                self._timer = Alarm(self._timeout, partial(self._expire, server), "mpiml-batch")
        return None

    @property
    def waiting(self) -> int:
        """Requests that wait for company."""
        return len(self._waiting)

    def flush(self, server: Server) -> None:
        """Run what waits, company or not: nobody else will come."""
        self._expire(server)

    def _expire(self, server: Server) -> None:
        with self._lock:
            batch = self._cut() if self._waiting else None
        if batch is not None:
            server.enqueue(batch)

    def _cut(self) -> "_Batch":
        requests, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return _Batch(self._method, requests, self._size if self._pad else 0)


def start_batched(server: Server, request: Request, method: Any, scope: MethodScope) -> None:
    """Collect a request that came before the service was up, when it gets its turn."""
    name = request.frame.name
    if request.frame.flags & FLAG_STREAM:
        raise UsageError(
            f"{server.owner.title}.{name.decode()}: expected a plain call of a batched method, "
            "got client.stream"
        )
    batcher: Any = server.wrappers[name]
    batch = batcher(request, server, True)
    if batch is not None:
        batch.run(server, scope)


class _Batch:
    """One call of the method for several requests."""

    def __init__(self, method: Any, requests: list[Request], padded: int) -> None:
        self._method = method
        self._requests = requests
        self._padded = padded

    def run(self, server: Server, scope: MethodScope) -> None:
        """Stack what fits together, call the method, and answer everybody."""
        try:
            self._run(server, scope)
        finally:
            server.detach(-len(self._requests))

    def refuse(self, server: Server) -> None:
        """Answer everybody that the service is gone."""
        try:
            for request in self._requests:
                if not request.started:
                    server.engine.consumed(request.rank)
                server.refuse(request)
        finally:
            server.detach(-len(self._requests))

    def _run(self, server: Server, scope: MethodScope) -> None:
        import numpy as np

        groups: dict[Any, list[tuple[Request, list[Any], list[str]]]] = {}
        for request in self._requests:
            if not request.started:
                server.engine.consumed(request.rank)
            try:
                args, kwargs = request.arguments()
                names = sorted(kwargs)
                values = [np.asarray(a) for a in (*args, *(kwargs[n] for n in names))]
                key = (len(args), *names, *((v.shape, v.dtype.str) for v in values))
                groups.setdefault(key, []).append((request, values, names))
            except Exception as error:
                server.answer_error(request, error)
        for group in groups.values():
            self._run_group(server, scope, group)

    def _run_group(self, server: Server, scope: MethodScope, group: list[Any]) -> None:
        import numpy as np

        count = len(group)
        names = group[0][2]
        rows = [values for _, values, _ in group]
        rows += [rows[-1]] * max(0, self._padded - count)
        try:
            columns = [np.stack(column) for column in zip(*rows, strict=True)]
            split = len(columns) - len(names)
            keywords = dict(zip(names, columns[split:], strict=True))
            result = self._method(*columns[:split], **keywords)
            if hasattr(result, "__await__"):
                result = server.owner.loop.run(result, scope)
            items = [_item(result, i, len(rows)) for i in range(count)]
        except Exception as error:
            for request, _, _ in group:
                server.answer_error(request, error)
            return
        for (request, _, _), item in zip(group, items, strict=True):
            try:
                server.answer(request, item)
            except Exception as error:  # it cannot be pickled
                server.answer_error(request, error)


def _item(result: Any, index: int, rows: int) -> Any:
    if isinstance(result, dict):
        return {k: _item(v, index, rows) for k, v in result.items()}
    if isinstance(result, tuple):
        return tuple(_item(v, index, rows) for v in result)
    try:
        length = len(result)
    except TypeError:  # a scalar, a 0-d array
        length = None
    if length != rows:
        got = type(result).__qualname__ if length is None else f"length {length}"
        raise UsageError(
            f"mpiml.batched: expected a result with first axis {rows}, the number of callers, "
            f"got {got}"
        )
    return result[index]
