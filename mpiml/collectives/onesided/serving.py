"""The memory of a host, served to members of other hosts.

One member of each host does so, on the agent's thread of its process: it applies what comes
with the same atomic additions that the members of the host use. MPI's own accumulate would not
do, since MPI does not promise that it is atomic to additions by the processor.
"""

from typing import Any, Final

import numpy as np

from mpiml._native import hogwild_add, hogwild_add_rows
from mpiml.collectives.mail import Channel, Parcel, Sending
from mpiml.collectives.messages import Waiting
from mpiml.collectives.onesided.agent import Agent
from mpiml.collectives.onesided.memory import Block, HostMemory
from mpiml.collectives.onesided.records import (
    ADD,
    ASSIGN,
    FAILED,
    LOOK,
    LOOKS,
    READ,
    ROWS,
    SNAPSHOT,
    Ask,
    Said,
    unpack_rows,
)

__all__ = ["Serving"]

_TURN: Final = 64  # requests in a row before acknowledgements go out
_GATE_US: Final = 10_000_000  # how long a gate may stay closed: whoever holds it is dead
_SOON: Final = 1e-3  # s, in which what is under way should get on
_SLICE_US: Final = 10_000  # how long a snapshot waits at a go
_CHANGES: Final = (ADD, ROWS, ASSIGN)


class Serving:
    """Does what members of other hosts ask of this host's blocks.

    Local: `turn`, by one thread.

    Parameters
    ----------
    memory : HostMemory
        Of this host.
    asks, answers : Channel
        From the others and back.
    blocks : dict
        By the number of the member whose block it is.
    agent : Agent
        Calls `turn`.
    """

    def __init__(
        self,
        memory: HostMemory,
        asks: Channel,
        answers: Channel,
        blocks: dict[int, Block],
        agent: Agent,
    ) -> None:
        self._memory = memory
        self._agent = agent
        self._asks, self._answers = asks, answers
        self._blocks = blocks
        self._done: dict[int, int] = {}  # by member: requests done, to be acknowledged
        self._own: dict[tuple[int, int], int] = {}  # by member and block: its updates
        self._marks: dict[int, Said] = {}
        self._errors: dict[int, str] = {}
        self._sendings: list[Sending] = []
        # snapshots that wait for a writer: who asks, and the wait
        self._held: list[tuple[Ask, int, Waiting]] = []

    def turn(self) -> bool:
        """Do what has come; return whether there was anything."""
        self._sendings = [sending for sending in self._sendings if not sending.test()]
        held, self._held = self._held, []
        for ask, member, waiting in held:
            self._snapshot(ask, member, waiting)
        news: set[int] = set()
        for _ in range(_TURN):
            parcel = self._asks.poll()
            if parcel is None:
                break
            ask = Ask.unpack(parcel.head)
            if ask.kind in _CHANGES:
                news.add(parcel.source)
                self._change(ask, parcel)
            elif ask.kind == LOOK:
                self._agent.stay(LOOKS)
            elif ask.kind == SNAPSHOT:
                waiting = self._memory.team.waiting(f"{self._asks.title}: a snapshot")
                self._snapshot(ask, parcel.source, waiting)
            else:
                self._answer(ask, parcel.source)
        for member in news:
            self._acknowledge(member)
        if self._sendings or self._held:
            self._agent.stay(_SOON)
        return bool(news)

    # -- changes -------------------------------------------------------------------------------

    def _change(self, ask: Ask, parcel: Parcel) -> None:
        source = parcel.source
        block = self._blocks[ask.block]
        key = source, ask.block
        if ask.marked:
            version, own = block.gate.version(), self._own.get(key, 0)
            self._marks[source] = Said(ask.kind, 1, 0, 0, 0, version, own)
        try:
            updates = self._apply(ask, block, parcel.body)
            self._own[key] = self._own.get(key, 0) + updates
        except TimeoutError as error:
            self._errors[source] = str(block.stuck(error, self._asks.title))
        except Exception as error:  # the member hears of it, whatever it is
            self._errors[source] = f"{type(error).__name__}: {error}"
        self._done[source] = self._done.get(source, 0) + 1

    def _apply(self, ask: Ask, block: Block, body: Any) -> int:
        if ask.kind == ROWS:
            own = block.leaves[ask.leaf]
            rows = unpack_rows(body, ask.count, bool(ask.wide), own.dtype)
            hogwild_add_rows(own, *rows, "atomic", None, block.gate, _GATE_US)
            return ask.count
        if not block.gate.enter(_GATE_US):
            raise TimeoutError("the gate of a block stays closed")
        try:
            for own, values in self._parts(ask, block.leaves, body):
                if ask.kind == ADD:
                    hogwild_add(own, values, ask.scale)
                else:
                    own[...] = values
            if ask.kind == ASSIGN and block.twins:
                for own, values in self._parts(ask, block.twins, body):
                    own[...] = values
        finally:
            block.gate.leave(1)
        return 1

    def _parts(
        self, ask: Ask, leaves: "list[np.ndarray[Any, Any]]", body: Any
    ) -> "list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]":
        """Return the parts of these that a request changes, with what it brings for each."""
        if ask.leaf >= 0:
            own = leaves[ask.leaf]
            return [(own, _values(body, own.dtype))]
        views = self._memory.regions.views(body)
        return [
            (own, view.reshape(-1)) for own, view in zip(leaves, views, strict=True) if own.size
        ]

    # -- answers -------------------------------------------------------------------------------

    def _acknowledge(self, member: int) -> None:
        mark = self._marks.pop(member, Said(ROWS, 0, 0, 0, 0, 0, 0))
        error = self._errors.pop(member, "")
        said = mark._replace(done=self._done[member], kind=FAILED if error else mark.kind)
        self._send(member, said, error.encode() if error else None)

    def _answer(self, ask: Ask, member: int) -> None:
        said = Said(ask.kind, 0, 0, ask.number, 0, 0, 0)
        body: Any = None
        if ask.kind == READ:
            body = memoryview(self._memory.memory)[ask.first : ask.first + ask.count]
        else:
            version = self._blocks[ask.block].gate.version()
            said = said._replace(version=version, own=self._own.get((member, ask.block), 0))
        self._send(member, said, body)

    def _snapshot(self, ask: Ask, member: int, waiting: Waiting) -> None:
        """Take a snapshot and send it; or, while somebody is within an update, note to do so.

        The gate is closed for a short time at a go, so that others can add in between.
        """
        block = self._blocks[ask.block]
        said = Said(ask.kind, 0, 0, ask.number, 0, 0, 0)
        body: Any = np.empty(self._memory.regions.nbytes, np.uint8)
        try:
            version = block.gate.snapshot(block.data, body, _SLICE_US, bool(ask.first))
            if version is None:
                waiting(block.holders())
                self._held.append((ask, member, waiting))
                return
        except BaseException as error:  # that a writer has died, or that the program stops
            text = f"{type(error).__name__}: {error}".encode()
            self._send(member, said._replace(kind=FAILED), text)
            return
        own = self._own.get((member, ask.block), 0)
        self._send(member, said._replace(version=version, own=own), body)

    def _send(self, member: int, said: Said, body: Any) -> None:
        self._sendings.append(self._answers.send(member, said.pack(), body))


def _values(body: Any, dtype: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
    """Return bytes as numbers, which may lie behind those of a smaller dtype."""
    found = np.frombuffer(body, dtype)
    return found if found.flags.aligned else found.copy()
