"""The side of a caller: what a handle becomes inside the node that holds it.

``client.method(x)`` waits, ``client.futures.method(x)`` returns a `Future`,
``client.stream.method(x)`` iterates, ``client.with_options(timeout=1.0)`` is the same client
with a deadline. A group of replicas has the same spellings and fans out.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from mpiml._native import join_plain
from mpiml.contents import value_in
from mpiml.engine import Engine
from mpiml.errors import (
    DeadlineError,
    ServiceGoneError,
    Stopped,
    UnknownMethodError,
    UsageError,
)
from mpiml.futures import Future, gather
from mpiml.later import refuse
from mpiml.payload import BORROW, SNAPSHOT, Packed, pack_call
from mpiml.scope import Scope, current_scope
from mpiml.server import own
from mpiml.streams import WINDOW, Inbox, Stream
from mpiml.wire import FLAG_NESTED, FLAG_STREAM, REQUEST

__all__ = ["Client", "ClientGroup", "Target"]

_GROUP_VERBS = ("scatter", "least_loaded", "reduced")


class Target:
    """Where the calls of a client go, and on whose behalf.

    Parameters
    ----------
    engine
        The rank's engine.
    source, vertex
        Numbers of the calling and the called node in the graph.
    rank
        The rank of the called node.
    title
        ``role/index`` of the called node.
    methods
        Names of its public methods; None where the class does not tell.
    scope
        The body of the calling node, for threads that have no scope of their own.
    """

    __slots__ = (
        "engine", "methods", "peer", "rank", "scope", "source", "timeout", "title", "vertex",
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        source: int,
        vertex: int,
        rank: int,
        title: str,
        methods: Mapping[str, Any] | None,
        scope: Scope | None = None,
    ) -> None:
        self.engine = engine
        self.source = source
        self.vertex = vertex
        self.rank = rank
        self.peer = engine.peer(rank)
        self.title = title
        self.methods = methods
        self.scope = scope
        self.timeout: float | None = None

    def with_timeout(self, timeout: float | None) -> "Target":
        """Return the same target with a deadline on every call, in seconds."""
        other = Target(
            self.engine,
            self.source,
            self.vertex,
            self.rank,
            self.title,
            self.methods,
            self.scope,
        )
        other.timeout = timeout
        return other

    def check(self, name: str) -> None:
        """Refuse a method that the class does not have, before any message.

        Raises
        ------
        UnknownMethodError
            If it is private, missing, or not in the service's allow-list.
        """
        if name.startswith("_") or (self.methods is not None and name not in self.methods):
            served = ", ".join(sorted(self.methods or ())) or "none"
            raise UnknownMethodError(
                f"{self.title}: method {name!r} not found; served are: {served}"
            )

    def calling_scope(self) -> Scope | None:
        """Return the scope of this thread, or of the node that was given the client."""
        scope = current_scope(required=False) or self.scope
        if self.engine.closed:
            raise ServiceGoneError(f"{self.title} has stopped: the program has ended")
        if scope is not None and scope.halt:
            raise Stopped("the program is stopping: expected no new call in a body")
        return scope

    def send(
        self,
        name: bytes,
        packed: Packed,
        call: Any,
        scope: Scope | None,
        flags: int,
        aux: int = 0,
        deadline: float | None = None,
    ) -> None:
        """Send a request and register `call` for its replies."""
        engine = self.engine
        if self.rank == engine.rank:
            packed = own(packed)
        encoding, body, buffers = packed
        if scope is not None and scope.nested:
            flags |= FLAG_NESTED
        else:
            size = len(body) + sum(map(len, buffers)) if buffers else len(body)
            ticket = self.peer.take(size)
            if ticket is not None and not engine.acquire(
                self.peer, ticket, size, scope, deadline
            ):
                raise self.late(name.decode(), "room for another call")
        call.id = id = engine.new_id()
        engine.pending[id] = call
        try:
            engine.transmit(
                self.rank, REQUEST, self.source, self.vertex, id, aux,
                encoding=encoding, flags=flags, name=name, body=body, buffers=buffers,
            )  # fmt: skip
        except BaseException:
            engine.pending.pop(id, None)
            raise

    def late(self, name: str, wanted: str = "a reply") -> DeadlineError:
        """Build the error for a call whose deadline has passed."""
        return DeadlineError(
            f"{self.title}.{name}(): expected {wanted} within {self.timeout:g} s, got none. A "
            "call that was sent goes on; give it more time with with_options(timeout=)."
        )

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method on another rank and wait: the most frequent case, kept short."""
        scope = self.calling_scope()
        engine = self.engine
        reply = Reply(self, name)
        reply.id = id = engine.new_id()
        flags = FLAG_NESTED if scope is not None and scope.nested else 0
        message = None
        if args and not kwargs:
            key = name.encode()
            message = join_plain(REQUEST, flags, self.source, self.vertex, id, 0, key, args)
        if message is None:
            self.send(name.encode(), pack_call(args, kwargs, BORROW), reply, scope, 0)
        else:
            if not flags:
                ticket = self.peer.take(len(message))
                if ticket is not None:
                    engine.acquire(self.peer, ticket, len(message), scope)
            engine.pending[id] = reply
            engine.post(self.rank, message)
        if not reply.ready:
            engine.wait(reply, None, scope)
        return reply.value()

    def submit(
        self,
        name: str,
        mode: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: float | None = None,
    ) -> Any:
        """Make a call and return its future, with the scope that made it."""
        scope = self.calling_scope()
        if self.rank == self.engine.rank:
            mode = BORROW  # copied once, in send
        packed = pack_call(args, kwargs, mode)
        future = Future(self.engine, self.title, name, self.vertex)
        self.send(name.encode(), packed, future, scope, 0, 0, deadline)
        return future, scope


class Reply:
    """The reply to a blocking call: what only its own thread waits for."""

    __slots__ = ("_buffers", "_decode", "_frame", "_name", "_target", "id", "ready")

    def __init__(self, target: Target, name: str) -> None:
        self.ready = False
        self.id = 0
        self._target = target
        self._name = name
        self._decode: Any = None

    @property
    def about(self) -> str:
        """What is waited for."""
        return f"{self._target.title}.{self._name}()"

    @property
    def target_vertex(self) -> int:
        """The vertex that was called."""
        return self._target.vertex

    def arrive(self, frame: Any, buffers: Sequence[Any]) -> None:
        """Take the reply in."""
        self._frame = frame
        self._buffers = buffers
        self._target.engine.fulfil(self)

    def complete(self, decode: Any, failed: bool = False) -> None:
        """Take the end of the call in; `decode` returns its value or raises its error."""
        self._decode = decode
        self._target.engine.fulfil(self)

    def fail(self, error: BaseException) -> None:
        """End with `error`."""

        def decode() -> Any:
            raise error

        self.complete(decode, True)

    def value(self) -> Any:
        """Return the value, or raise the error."""
        if self._decode is not None:
            return self._decode()
        return value_in(self._frame, self._buffers)


class _Bound:
    """One method of one client, in one spelling."""

    __slots__ = ("_name", "_target")

    def __init__(self, target: Target, name: str) -> None:
        self._target = target
        self._name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._target.title}.{self._name}>"


class Blocking(_Bound):
    """Call and wait."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, wait, and return its result or raise its error."""
        target = self._target
        timeout = target.timeout
        if timeout is None and target.rank != target.engine.rank:
            return target.call(self._name, args, kwargs)
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

        Raises
        ------
        UsageError
            If `timeout` is negative.
        """
        number = isinstance(timeout, int | float)
        if timeout is not None and not (number and timeout >= 0):
            raise UsageError(f"with_options: expected timeout >= 0 or None, got {timeout!r}")
        return type(self)(self.__dict__["_target"].with_timeout(timeout or None))

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
        """
        target = self.__dict__["_target"].with_timeout(timeout)
        return Blocking(target, "result")()

    @property
    def done(self) -> bool:
        """Whether the node has returned."""
        return bool(Blocking(self.__dict__["_target"], "done")())


class _Each:
    """A method on every member of a group."""

    __slots__ = ("_bound", "_gather")

    def __init__(self, bound: list[Any], gather_results: bool) -> None:
        self._bound = bound
        self._gather = gather_results

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all replicas at once; a list in their order."""
        futures = [bound(*args, **kwargs) for bound in self._bound]
        return gather(futures) if self._gather else futures


class _GroupFutures:
    """``clients.futures.method(x)``: a list of futures, one for each replica."""

    def __init__(self, clients: list[Client]) -> None:
        self._clients = clients

    def __getattr__(self, name: str) -> _Each:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Each([getattr(c.futures, name) for c in self._clients], False)


class ClientGroup(Sequence[Client]):
    """The clients of a role's replicas: a sequence, whose methods call all of them.

    Local. ``clients.method(x)`` returns the list of results, ``clients.futures.method(x)`` a
    list of futures; slices are groups.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = list(clients)

    @property
    def futures(self) -> _GroupFutures:
        """The same calls, as futures."""
        return _GroupFutures(self._clients)

    def with_options(self, *, timeout: float | None = None) -> "ClientGroup":
        """Return a group whose blocking calls have a deadline, in seconds."""
        return ClientGroup([c.with_options(timeout=timeout) for c in self._clients])

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> "ClientGroup": ...
    def __getitem__(self, index: int | slice) -> "Client | ClientGroup":
        if isinstance(index, slice):
            return ClientGroup(self._clients[index])
        return self._clients[index]

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _GROUP_VERBS:
            refuse(name)
        return _GroupCall(self._clients, name)

    def __repr__(self) -> str:
        return f"<ClientGroup of {len(self._clients)}>"


class _GroupCall:
    """``clients.method``: fans out, then gathers within the deadline of each client."""

    __slots__ = ("_clients", "_name")

    def __init__(self, clients: list[Client], name: str) -> None:
        for client in clients:
            client.__dict__["_target"].check(name)
        self._clients = clients
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all replicas at once and return their results in order."""
        began = time.monotonic()
        futures = [getattr(c.futures, self._name)(*args, **kwargs) for c in self._clients]
        results = []
        for client, future in zip(self._clients, futures, strict=True):
            timeout = client.__dict__["_target"].timeout
            left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
            results.append(future.result(left))
        return results
