"""The topics of one rank: what its nodes publish, and what comes for them.

Publishers and subscribers talk directly. A message is packed once, and goes as a frame of its own
kind, which whoever drives progress puts into the inbox of the subscriber: so it is taken in while
the node computes, and a publisher never waits for anything but room. A large message for several
ranks of another host comes to one of them, whose `Topics` passes it on.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mpiml.graph import Vertex
from mpiml.topics.graph import End, subscriptions
from mpiml.topics.incoming import Incoming, Shared
from mpiml.topics.outgoing import Link, Outgoing, connect
from mpiml.topics.queues import Outbox
from mpiml.topics.tree import joined, listed, split
from mpiml.wire import TOPIC, TOPIC_ACK, TOPIC_END, Frame

__all__ = ["Topics"]


class Topics:
    """The topics of a program, on one rank. Local: takes frames in, runs no user code.

    Parameters
    ----------
    engine
        The rank's engine, whose table of handlers is filled.
    vertices : sequence of Vertex
        All nodes.
    ranks : sequence of int
        Where each is.
    build : function
        Makes the user's object of an `Outgoing` or `Incoming`, and its `End`.
    host_of : callable
        Returns the number of a rank's host.
    """

    def __init__(
        self,
        engine: Any,
        vertices: Sequence[Vertex],
        ranks: Sequence[int],
        build: Callable[[Any, End], Any],
        host_of: Callable[[int], int],
    ) -> None:
        self._engine = engine
        self._build = build
        self._host_of = host_of
        self._outgoing: dict[tuple[int, int], Outgoing] = {}  # vertex, topic
        self._incoming: dict[int, Incoming] = {}  # by vertex and `aux` in one number
        self._held: dict[tuple[int, End], Incoming] = {}  # those, by vertex and end
        self.publishers: set[int] = set()  # on all ranks
        for number, (publishers, subscribers) in subscriptions(vertices).items():
            self.publishers.update(publishers)
            links: dict[int, list[Link]] = {
                p: [] for p in publishers if ranks[p] == engine.rank
            }
            for each in subscribers:
                aux = number << 16 | each.place
                for p in each.publishers:
                    if p in links:
                        outbox = Outbox(each.end.topic.policy)
                        links[p].append(Link(each.vertex, ranks[each.vertex], aux, outbox))
                if ranks[each.vertex] == engine.rank:
                    incoming = Incoming(engine, each, [ranks[p] for p in each.publishers], aux)
                    self._incoming[each.vertex << 32 | aux] = incoming
                    self._held[each.vertex, each.end] = incoming
            for p, own_links in links.items():
                connect(own_links, engine.rank, host_of)
                self._outgoing[p, number] = Outgoing(engine, p, own_links, host_of)
        engine.handlers[TOPIC] = self._on_message
        engine.handlers[TOPIC_ACK] = self._on_ack
        engine.handlers[TOPIC_END] = self._on_end

    def open(self, vertex: int, end: End) -> Any:
        """Return the user's object for an end that a node of this rank holds."""
        if end.publishes:
            return self._build(self._outgoing[vertex, end.topic.number], end)
        return self._build(self._held[vertex, end], end)

    def end(self, vertex: int, cut: bool = False, late: bool = False) -> None:
        """Note that a node publishes nothing more; see `Outgoing.end`."""
        for outgoing in self._outgoing.values():
            if outgoing.vertex == vertex:
                outgoing.end(cut, late)

    def leave(self, vertex: int, cut: bool = False, late: bool = False) -> None:
        """Note that a node is over: it publishes nothing more, and hears nothing more."""
        self.end(vertex, cut, late)
        for incoming in self._incoming.values():
            if incoming.subscription.vertex == vertex:
                incoming.leave(cut)

    def _on_message(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        if frame[7]:
            self._deal(frame, buffers)
        else:
            incoming = self._incoming[frame[4] << 32 | frame[6]]
            incoming.on_message(frame[3], frame[5], (frame, buffers))

    def _deal(self, frame: Frame, buffers: Sequence[Any]) -> None:
        """Take in a message that lists those it is for, and pass it on to the others."""
        engine = self._engine
        entries = listed(frame.name)
        others = [entry for entry in entries if entry.rank != engine.rank]
        for rank, part in split(engine.rank, others, self._host_of):
            to = part[0]
            engine.transmit(
                rank, TOPIC, frame.source, to.vertex, to.number, to.aux,
                encoding=frame.encoding, flags=frame.flags, name=joined(part), body=frame.body,
                buffers=buffers,
            )  # fmt: skip
        claims = len(entries) - len(others) + bool(others)
        shared = Shared(frame, buffers, claims)
        for entry in entries:
            if entry.rank == engine.rank:
                incoming = self._incoming[entry.vertex << 32 | entry.aux]
                incoming.on_message(frame.source, entry.number, shared, entry.turn)

    def _on_end(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        turn = listed(frame.name)[0].turn if frame.name else 0
        incoming = self._incoming[frame.target << 32 | frame.aux]
        incoming.on_end(frame.source, frame.id, bool(frame.encoding), turn)

    def _on_ack(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        settled = int(bytes(frame.body)) if frame.body else 0
        outgoing = self._outgoing[frame.target, frame.aux >> 16]
        outgoing.on_ack(frame.source, frame.aux, frame.id, settled)
