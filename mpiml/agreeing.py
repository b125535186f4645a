"""How members of a role tell each other where they stop: along a tree, with no more than nine.

What is agreed stands in `mpiml.agree`. A member tells the one above it, and hears of at most eight
below it, by their index in the role. Replicas next to each other mostly share a host.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpiml.agree import Branch, Message
from mpiml.wire import AGREE_COUNT, AGREE_REST, AGREE_TARGET, Frame

__all__ = ["Agreeing"]


class _Seat(NamedTuple):
    """A member here: its node, its place in the tree, and the vertices of its role."""

    node: Any
    branch: Branch
    ids: range


class Agreeing:
    """The agreed stops of the roles that have members on this rank. Local.

    Parameters
    ----------
    engine
        The rank's engine, whose table of handlers is filled.
    ranks
        Where each vertex is.
    """

    def __init__(self, engine: Any, ranks: Sequence[int]) -> None:
        self._engine = engine
        self._ranks = ranks
        self._seats: dict[int, _Seat] = {}
        self._lock = threading.Lock()
        self._queue: deque[tuple[_Seat, Message]] = deque()
        self._sending = False
        engine.handlers[AGREE_COUNT] = self._on_count
        engine.handlers[AGREE_TARGET] = self._on_target
        engine.handlers[AGREE_REST] = self._on_rest

    def add(self, node: Any, ids: range) -> None:
        """Note a node of this rank, and the vertices of its role, in index order."""
        branch = Branch(ids.index(node.vertex), len(ids))
        self._seats[node.vertex] = _Seat(node, branch, ids)

    def freeze(self, vertex: int, count: int) -> None:
        """Let the role know at which round a node stands."""
        seat = self._seats[vertex]
        with self._lock:
            self._note(seat, seat.branch.count(seat.branch.index, count))
        self._send()

    def idle(self, vertex: int, idle: bool) -> None:
        """Let the role know that a node is idle, or asks to go on; see `mpiml.idle`."""
        seat = self._seats[vertex]
        with self._lock:
            self._note(seat, seat.branch.rest(seat.branch.index, idle))
        self._send()

    def _on_count(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        seat = self._seats[frame.target]
        with self._lock:
            self._note(seat, seat.branch.count(seat.ids.index(frame.source), frame.id))
        self._send()

    def _on_rest(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        seat = self._seats[frame.target]
        with self._lock:
            self._note(seat, seat.branch.rest(seat.ids.index(frame.source), bool(frame.id)))
        self._send()

    def _on_target(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        seat = self._seats[frame.target]
        with self._lock:
            self._note(seat, seat.branch.decide(frame.id))
        self._send()

    def _note(self, seat: _Seat, messages: list[Message]) -> None:
        self._queue.extend((seat, message) for message in messages)

    def _send(self) -> None:
        """Send what is noted, in that order: one thread at a time, and none waits for it."""
        while self._queue:
            with self._lock:
                if self._sending or not self._queue:
                    return  # who sends looks again before it leaves
                self._sending = True
                seat, (kind, to, number) = self._queue.popleft()
            try:
                if to == seat.branch.index:
                    seat.node.on_target(number)
                else:
                    vertex = seat.ids[to]
                    rank = self._ranks[vertex]
                    self._engine.transmit(rank, kind, seat.node.vertex, vertex, id=number)
            finally:
                with self._lock:
                    self._sending = False
