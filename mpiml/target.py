"""Where the calls of a client go: how a request is sent, and what waits for its reply."""

from collections.abc import Mapping, Sequence
from functools import cache
from pickle import loads
from typing import TYPE_CHECKING, Any

from mpiml._native import join_plain
from mpiml.contents import own, value_in
from mpiml.engine import Engine
from mpiml.errors import DeadlineError, ServiceGoneError, Stopped, UnknownMethodError
from mpiml.payload import BORROW, ENC_PICKLE, Packed, pack_call
from mpiml.scope import Scope, current_scope, scope_here
from mpiml.wire import FLAG_NESTED, REQUEST

if TYPE_CHECKING:
    from mpiml.futures import Future

__all__ = ["Reply", "Target", "future_class"]


@cache
def future_class() -> "type[Future]":
    """Return `Future`, loaded by the first call that makes one: blocking calls can do without."""
    from mpiml.futures import Future

    return Future


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
        "engine", "far", "methods", "peer", "rank", "scope", "source", "timeout", "title", "vertex",
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
        self.far = rank != engine.rank
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
        scope = scope_here() or self.scope or current_scope(required=False)
        if self.engine.closed:
            raise self._gone()
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
        if engine.closed:
            self._missed(id)

    def late(self, name: str, wanted: str = "a reply") -> DeadlineError:
        """Build the error for a call whose deadline has passed."""
        within = "in time" if self.timeout is None else f"within {self.timeout:g} s"
        return DeadlineError(
            f"{self.title}.{name}(): expected {wanted} {within}, got none. A "
            "call that was sent goes on; give it more time with with_options(timeout=)."
        )

    def post(self, name: bytes, args: tuple[Any, ...], call: Any, scope: Scope | None) -> bool:
        """Send a request with plain arguments to another rank; False where they are not plain.

        The most frequent case of `send`, which it leaves the rest to.
        """
        engine = self.engine
        call.id = id = engine.new_id()
        flags = FLAG_NESTED if scope is not None and scope.nested else 0
        message = join_plain(REQUEST, flags, self.source, self.vertex, id, 0, name, args)
        if message is None:
            return False
        if not flags:
            ticket = self.peer.take(len(message))
            if ticket is not None:
                engine.acquire(self.peer, ticket, len(message), scope)
        engine.pending[id] = call
        engine.note_sent()
        engine.link.send(self.rank, message)
        if engine.closed:
            self._missed(id)
        return True

    def _gone(self) -> Exception:
        """Build the error for a call after the end."""
        return self.engine.ended_by or ServiceGoneError(
            f"{self.title} has stopped: the program has ended"
        )

    def _missed(self, id: int) -> None:
        """Refuse a call that was registered after the engine had failed those that were open."""
        if self.engine.pending.pop(id, None) is not None:
            raise self._gone()

    def submit(
        self,
        name: str,
        mode: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: float | None = None,
        shown: str | None = None,
    ) -> Any:
        """Make a call and return its future, with the scope that made it.

        `shown` is what errors and reports call the method, where it has another name for users.
        """
        scope = self.calling_scope()
        if self.rank == self.engine.rank:
            mode = BORROW  # copied once, in send
        packed = pack_call(args, kwargs, mode)
        future = future_class()(self.engine, self.title, shown or name, self.vertex)
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
        engine = self._target.engine
        if engine.driving is self:
            self.ready = True  # its thread is the one that drives, and so the one that is here
        else:
            engine.fulfil(self)

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
        frame = self._frame
        if frame[1] == ENC_PICKLE and not self._buffers:
            return loads(frame[8])
        return value_in(frame, self._buffers)
