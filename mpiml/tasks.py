"""What takes a turn in a service: a call as it came, a batch of calls, an item of a stream."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpiml.contents import parts
from mpiml.payload import unpack_call
from mpiml.turns import MethodScope
from mpiml.wire import FLAG_STREAM, Frame

__all__ = ["Request", "Task", "Wrapper"]


class Task(Protocol):
    """Something that takes a turn in a service."""

    def run(self, server: Any, scope: MethodScope) -> None:
        """Do it, answer, and never raise but to end the program."""

    def refuse(self, server: Any) -> None:
        """Answer that the service is gone, instead; runs no user code."""


class Wrapper(Protocol):
    """What collects the requests of a method before they become a task."""

    def __call__(self, request: "Request", server: Any) -> Task | None:
        """Take a request in; return a task when one is complete."""

    def flush(self, server: Any) -> None:
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

    def run(self, server: Any, scope: MethodScope) -> None:
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
        except SystemExit as error:
            if error.code:
                raise
            server.answer(self, None)  # a return, as in a body
        except Exception as error:
            if frame[2] & FLAG_STREAM:
                server.streams.pop((self.rank, frame.id), None)
            server.answer_error(self, error)

    def refuse(self, server: Any) -> None:
        """Give the credit back and answer that the service is gone."""
        server.engine.consumed(self.rank)
        if self.frame[2] & FLAG_STREAM:
            server.streams.pop((self.rank, self.frame.id), None)
        server.refuse(self)


def _call(method: Callable[..., Any], request: Request) -> Any:
    # a frame of its own, so that nothing but the result is alive when it is packed: an array
    # that only the result refers to is sent without a copy
    frame = request.frame
    if request.buffers:
        args, kwargs = request.arguments()
    else:
        args, kwargs = unpack_call(frame[1], frame[8])
    return method(*args, **kwargs)
