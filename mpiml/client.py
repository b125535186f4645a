"""The side of a caller: what a handle becomes inside the node that holds it.

``client.method(x)`` waits, ``client.futures.method(x)`` returns a `Future`,
``client.stream.method(x)`` iterates, ``client.with_options(timeout=1.0)`` is the same client
with a deadline. A group of replicas has the same spellings and fans out.
"""

import time
from typing import Any

from mpiml.errors import UsageError
from mpiml.payload import BORROW, SNAPSHOT, pack_call
from mpiml.seconds import timeout_seconds
from mpiml.streams import WINDOW, Inbox, Stream
from mpiml.target import Reply, Target, future_class
from mpiml.wire import FLAG_STREAM

__all__ = ["Blocking", "Client", "NodeClient", "Streaming", "Submitting"]


class _Bound:
    """One method of one client, in one spelling."""

    __slots__ = ("_key", "_name", "_target")

    def __init__(self, target: Target, name: str) -> None:
        self._target = target
        self._name = name
        self._key = name.encode()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._target.title}.{self._name}>"


class Blocking(_Bound):
    """Call and wait."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, wait, and return its result or raise its error."""
        target = self._target
        timeout = target.timeout
        if timeout is None and target.far:  # most calls, so it is kept short
            scope = target.calling_scope()
            reply = Reply(target, self._name)
            if kwargs or not target.post(self._key, args, reply, scope):
                target.send(self._key, pack_call(args, kwargs, BORROW), reply, scope, 0)
            if not reply.ready:
                target.engine.wait(reply, None, scope)
            return reply.value()
        # with a deadline the caller may go on, and change x, before x has been sent
        mode = BORROW if timeout is None else SNAPSHOT
        deadline = None if timeout is None else time.monotonic() + timeout
        future, scope = target.submit(self._name, mode, args, kwargs, deadline)
        if not future.ready and not target.engine.wait(future, deadline, scope):
            raise target.late(self._name)
        return future._value()


class Submitting(_Bound):
    """Call and return a future."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call and return its `Future`; arguments may be changed at once."""
        target = self._target
        if target.timeout is None and target.far and not kwargs:
            scope = target.calling_scope()
            future = future_class()(target.engine, target.title, self._name, target.vertex)
            if target.post(self._key, args, future, scope):
                return future
        if target.timeout is None:
            return target.submit(self._name, SNAPSHOT, args, kwargs)[0]
        deadline = time.monotonic() + target.timeout
        future = target.submit(self._name, SNAPSHOT, args, kwargs, deadline)[0]
        future.deadline = deadline
        return future


class Streaming(_Bound):
    """Call a generator method, item by item."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Stream:
        """Start the method and return an iterator over what it yields."""
        target = self._target
        scope = target.calling_scope()
        mode = BORROW if target.rank == target.engine.rank else SNAPSHOT
        packed = pack_call(args, kwargs, mode)
        about = f"{target.title}.{self._name}() stream"
        inbox = Inbox(target.engine, about, target.vertex)
        deadline = None if target.timeout is None else time.monotonic() + target.timeout
        target.send(self._name.encode(), packed, inbox, scope, FLAG_STREAM, WINDOW, deadline)
        return Stream(target, inbox, scope)


class _Methods:
    """Attribute access makes bound methods of one spelling, and keeps them."""

    _spelling: type[_Bound] = Blocking

    def __init__(self, target: Target) -> None:
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        target: Target = self.__dict__["_target"]
        if name.startswith("__"):
            raise AttributeError(name)
        target.check(name)
        bound = self.__dict__[name] = self._spelling(target, name)
        return bound

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["_target"].methods or ())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.__dict__['_target'].title}>"

    def __reduce__(self) -> Any:
        raise UsageError(
            f"{self!r}: a client works in the node it was given to and cannot be sent. Pass the "
            "handle to the other node while the graph is built."
        )


class _Futures(_Methods):
    _spelling = Submitting


class _Streams(_Methods):
    _spelling = Streaming


class Client(_Methods):
    """What a handle becomes inside a node: its attributes are the methods of the service.

    Local. `futures`, `stream` and `with_options` are reserved; everything else is a method of
    the service. Safe to use from many threads.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.__dict__["futures"] = _Futures(target)
        self.__dict__["stream"] = _Streams(target)

    def with_options(self, *, timeout: float | None = None) -> "Client":
        """Return a client with a deadline, in seconds, on every call, future and stream item.

        0 does not wait: what is not there at once is a `DeadlineError`. None, and infinity: no
        deadline.

        Raises
        ------
        UsageError
            If `timeout` is no number >= 0.
        """
        seconds = timeout_seconds("with_options", timeout)
        return type(self)(self.__dict__["_target"].with_timeout(seconds))

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), "futures", "stream", "with_options"])


class NodeClient(Client):
    """The client of a node that runs by itself: what it returns, and whether it has."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the node's return value, at most `timeout` seconds.

        Raises
        ------
        DeadlineError
            If it has not returned by then.
        UsageError
            If `timeout` is no number >= 0.
        """
        target = self.__dict__["_target"]
        if timeout is not None:  # else that of with_options
            target = target.with_timeout(timeout_seconds("result", timeout))
        return Blocking(target, "result")()

    @property
    def done(self) -> bool:
        """Whether the node has returned."""
        return bool(Blocking(self.__dict__["_target"], "done")())
