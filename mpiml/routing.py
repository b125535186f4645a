"""Hands the frames of calls to whom they are for: services, futures, streams, results."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpiml.contents import parts, value_in
from mpiml.engine import Engine
from mpiml.errors import RemoteError
from mpiml.payload import SNAPSHOT, pack, unpack_error
from mpiml.server import Server
from mpiml.streams import on_stream_control
from mpiml.wire import (
    ERROR,
    ITEM,
    MORE,
    QUIT_STREAM,
    REPLY,
    REQUEST,
    RETURN,
    STREAM_END,
    Frame,
)

__all__ = ["Router", "close_streams"]


class Router:
    """The handlers of call frames on one rank. Local: they run no user code.

    Parameters
    ----------
    engine
        The rank's engine, whose table of handlers is filled.

    Attributes
    ----------
    servers
        By vertex; filled in before the first frame can come.
    results
        On rank 0: by vertex, what decodes the value that a node has returned.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.servers: dict[int, Server] = {}
        self.results: dict[int, Callable[[], Any]] = {}
        engine.handlers.update(
            {
                REQUEST: self._on_request,
                REPLY: self._on_reply,
                ERROR: self._on_error,
                ITEM: self._on_item,
                STREAM_END: self._on_stream_end,
                MORE: self._on_stream_control,
                QUIT_STREAM: self._on_stream_control,
                RETURN: self._on_return,
            }
        )

    def _on_request(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self.servers[frame.target].submit(rank, frame, buffers)

    def _on_reply(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        engine = self.engine
        call = engine.pending.pop(frame[5], None)
        if frame[6]:
            for ticket in engine.peer(rank).restore(frame[6]):
                engine.fulfil(ticket)
        if call is not None:
            call.arrive(frame, buffers)

    def _on_error(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        call = self.engine.pending.pop(frame.id, None)
        if frame.aux:
            self.engine.credit(rank, frame.aux)
        if call is None:
            return

        def decode() -> Any:
            body, rest = parts(frame, buffers)
            error = unpack_error(frame.encoding, body, rest)
            error.__cause__ = RemoteError(bytes(frame.name).decode(errors="replace"))
            raise error

        call.complete(decode, True)

    def _on_item(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        call = self.engine.pending.get(frame.id)
        if frame.aux:
            self.engine.credit(rank, frame.aux)
        if call is not None:
            call.item(partial(value_in, frame, buffers))

    def _on_stream_end(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        call = self.engine.pending.pop(frame.id, None)
        if frame.aux:
            self.engine.credit(rank, frame.aux)
        if call is not None:
            call.complete(None)

    def _on_stream_control(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        on_stream_control(self.servers[frame.target], rank, frame)

    # -- what bodies return --------------------------------------------------------------------

    def send_result(self, vertex: int, title: str, value: Any) -> None:
        """Let rank 0 have what a body returned; where it cannot be sent, why not."""
        if self.engine.rank == 0:
            self.results[vertex] = lambda: value
            return
        lost = 0
        try:
            packed = pack(value, SNAPSHOT, f"the return value of {title}")
        except Exception as error:
            packed = pack(str(error))
            lost = 1
            self.engine.log(str(error))  # who reads the result is told again
        self.engine.transmit(
            0, RETURN, vertex, vertex, aux=lost,
            encoding=packed.encoding, body=packed.body, buffers=packed.buffers,
        )  # fmt: skip

    def _on_return(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        decode = partial(value_in, frame, buffers)

        def refuse() -> Any:
            raise RemoteError(decode())

        self.results[frame.source] = refuse if frame.aux else decode


def close_streams(server: Server) -> None:
    """Close the generators of streams whose callers have not left them. Local."""
    for run in list(server.streams.values()):
        run.grant(server, 0)
