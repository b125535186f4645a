"""A question to all ranks and one answer, along a tree: each rank hears of at most nine others.

Whoever asks is the top. A rank looks at itself when the question reaches it, passes the question
on, joins the answers from below to its own, and tells the rank above. So every rank has looked
later than the question was asked, and before its answer is known.
"""

import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpiml.contents import parts
from mpiml.control import children, parent
from mpiml.wire import Frame

__all__ = ["Values", "Waves"]

Values = tuple[int, ...]
"""Whole numbers below 2**63 in size, as many in every answer."""


class _Wave:
    """One question on one rank: how many answers are missing, and those that have come joined."""

    __slots__ = ("missing", "then", "values")

    def __init__(self, missing: int, values: Values, then: Callable[[Values], None]) -> None:
        self.missing = missing
        self.values = values
        self.then = then


class Waves:
    """The questions of one kind. Local: never waits.

    Parameters
    ----------
    engine
        The rank's engine, whose table of handlers is filled.
    ask, told
        Kinds of frames: the question, and the answer.
    look
        Returns how this rank stands; runs no user code.
    join
        Makes one of two answers.

    Attributes
    ----------
    sent, received
        Frames of these questions and answers, this rank's share.
    """

    def __init__(
        self,
        engine: Any,
        ask: int,
        told: int,
        look: Callable[[], Values],
        join: Callable[[Values, Values], Values],
    ) -> None:
        self.sent = self.received = 0
        self._engine = engine
        self._kinds = ask, told
        self._look = look
        self._join = join
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[tuple[int, int], _Wave] = {}  # by who asks, and its number
        engine.handlers[ask] = self._on_ask
        engine.handlers[told] = self._on_told

    def ask(self, then: Callable[[Values], None]) -> None:
        """Ask all ranks; `then` is called with the answer, by whoever takes the last in."""
        self._begin(self._engine.rank, next(self._numbers), then)

    def _begin(self, top: int, number: int, then: Callable[[Values], None]) -> None:
        engine = self._engine
        size = engine.size
        below = [(r + top) % size for r in children((engine.rank - top) % size, size)]
        values = self._look()
        if not below:
            then(values)
            return
        self._open[top, number] = _Wave(len(below), values, then)
        for rank in below:
            self._transmit(rank, self._kinds[0], number, top)

    def _on_ask(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        engine = self._engine
        number, top, size = frame.id, frame.aux, engine.size
        above = (parent((engine.rank - top) % size) + top) % size

        def tell(values: Values) -> None:
            body = struct.pack(f"<{len(values)}q", *values)
            self._transmit(above, self._kinds[1], number, top, body)

        self._begin(top, number, tell)
        self.received += 1  # the engine counts it once this has returned

    def _on_told(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        body = parts(frame, buffers)[0]
        values = struct.unpack(f"<{len(body) // 8}q", body)
        key = frame.aux, frame.id
        with self._lock:
            wave = self._open[key]
            wave.values = self._join(wave.values, values)
            wave.missing -= 1
            done = not wave.missing
            if done:
                del self._open[key]
        if done:
            wave.then(wave.values)
        self.received += 1

    def _transmit(self, rank: int, kind: int, number: int, top: int, body: bytes = b"") -> None:
        self.sent += 1
        self._engine.transmit(
            rank, kind, self._engine.rank, rank, id=number, aux=top, body=body
        )
