"""The topics of one rank: what its nodes publish, and what comes for them.

Publishers and subscribers talk directly. A message is packed once, and goes to each subscriber
as a frame of its own kind, which whoever drives progress there puts into the inbox: so it is
taken in while the node computes, and a publisher never waits for anything but room.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpiml.contents import own
from mpiml.graph import Vertex
from mpiml.payload import SNAPSHOT, Packed, pack
from mpiml.topics.graph import End, Subscription, subscriptions
from mpiml.topics.queues import Inbox, Outbox, Sent, Taken
from mpiml.waits import Wait
from mpiml.wire import TOPIC, TOPIC_ACK, TOPIC_END, Frame

__all__ = ["Incoming", "Link", "Outgoing", "Topics", "packed"]

_NOTHING = Packed(0, b"", [])
_CUT = Packed(1, b"", [])  # of an end: the publisher was stopped, or has failed


class Link:
    """The way from a publisher of this rank to one subscriber.

    Attributes
    ----------
    vertex, rank : int
        Of the subscriber.
    sent, bytes : int
        How much was sent: messages, and what they held.
    """

    __slots__ = ("aux", "bytes", "ended", "gone", "outbox", "rank", "sent", "vertex")

    def __init__(self, vertex: int, rank: int, aux: int, outbox: Outbox) -> None:
        self.vertex = vertex
        self.rank = rank
        self.aux = aux
        self.outbox = outbox
        self.gone = False  # the subscriber has left
        self.ended = False  # it has been told that nothing more comes
        self.sent = self.bytes = 0


class Outgoing:
    """What a node of this rank publishes on one topic. Local; safe from any thread.

    Parameters
    ----------
    engine
        The rank's engine.
    vertex : int
        The node.
    links : sequence of Link
        To each subscriber that hears it.
    """

    def __init__(self, engine: Any, vertex: int, links: Sequence[Link]) -> None:
        self.engine = engine
        self.vertex = vertex
        self.links = links
        self.lock = threading.Lock()
        self.undelivered = 0  # messages for subscribers that have left
        self.ended = False
        self.late = False  # what is put after the end is counted, and no error
        self._cut = False
        self._by_aux = {(link.vertex, link.aux): link for link in links}
        self._waiting: list[Wait] = []
        self._ready: deque[Callable[[], None]] = deque()  # frames to be sent, in this order
        self._sending = threading.Lock()

    def put(self, links: Sequence[Link], packed: Packed, wait: Wait | None) -> bool:
        """Send a message on some links; False where one has no room, and `wait` is told of more."""
        with self.lock:
            there = [] if self.ended else [link for link in links if not link.gone]
            if not all(link.outbox.room for link in there):
                if wait is not None:
                    wait.ready = False
                    self._waiting.append(wait)
                return False
            self.undelivered += len(links) - len(there)
            for link in there:
                self._send(link, link.outbox.put(packed))
        self._flush()
        return True

    def on_ack(self, subscriber: int, aux: int, count: int, settled: int = 0) -> None:
        """Take in that messages need no room any more.

        A `count` of 0 says that the subscriber has left, and has taken or dropped `settled` of
        those that were sent.
        """
        link = self._by_aux[subscriber, aux]
        with self.lock:
            if not count:
                link.gone = True
                self.undelivered += link.outbox.close() + link.sent - settled
                self._end(link)  # a method there may still wait
            else:
                self._send(link, link.outbox.acknowledged(count))
                self._end(link)
            waiting, self._waiting = self._waiting, []
        self._flush()
        for wait in waiting:
            self.engine.fulfil(wait)

    def end(self, cut: bool = False, late: bool = False) -> None:
        """Say that nothing more comes, after what is there.

        Parameters
        ----------
        cut : bool
            The publisher was stopped, or has failed: its work is not done.
        late : bool
            What is put afterwards counts as undelivered; else it is an error.
        """
        with self.lock:
            if self.ended:
                return
            self.ended, self.late, self._cut = True, late, cut
            for link in self.links:
                self._end(link)
            waiting, self._waiting = self._waiting, []
        self._flush()
        for wait in waiting:  # they find that it has ended
            self.engine.fulfil(wait)

    def _end(self, link: Link) -> None:
        if self.ended and link.outbox.idle and not link.ended:
            link.ended = True
            number, how = link.outbox.number, _CUT if self._cut else _NOTHING
            self._ready.append(lambda: self._transmit(link, TOPIC_END, number, how))

    def _send(self, link: Link, messages: Sequence[Sent]) -> None:
        for number, packed in messages:
            link.sent += 1
            link.bytes += len(packed.body) + sum(map(len, packed.buffers))

            def send(number: int = number, packed: Packed = packed) -> None:
                self._transmit(link, TOPIC, number, packed)

            self._ready.append(send)

    def _transmit(self, link: Link, kind: int, number: int, packed: Packed = _NOTHING) -> None:
        if link.rank == self.engine.rank:
            packed = own(packed)
        self.engine.transmit(
            link.rank, kind, self.vertex, link.vertex, number, link.aux,
            encoding=packed.encoding, body=packed.body, buffers=packed.buffers,
        )  # fmt: skip

    def _flush(self) -> None:
        """Send what is ready. Under no lock of ours: a frame to this rank is taken in at once."""
        while self._ready and self._sending.acquire(False):
            try:
                while self._ready:
                    self._ready.popleft()()
            finally:
                self._sending.release()


class Incoming:
    """What comes for one subscriber of this rank. Local; safe from any thread.

    Parameters
    ----------
    engine
        The rank's engine.
    subscription : Subscription
    ranks : sequence of int
        Of each publisher.
    aux : int
        Names the subscription in frames.
    """

    def __init__(
        self, engine: Any, subscription: Subscription, ranks: Sequence[int], aux: int
    ) -> None:
        self.engine = engine
        self.subscription = subscription
        self.publishers = subscription.publishers
        self.inbox = Inbox(subscription.end.topic.policy, len(self.publishers))
        self.left = False
        self.cut = (
            False  # a publisher was stopped, or has failed: the end of its work is not one
        )
        self.received = self.bytes = 0  # of what was taken
        self._ranks = ranks
        self._aux = aux
        self._links = {vertex: i for i, vertex in enumerate(self.publishers)}
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    def on_message(self, publisher: int, frame: Frame, buffers: Sequence[Any]) -> None:
        """Take a message in."""
        link = self._links[publisher]
        with self._lock:
            if self.left:
                return
            acks = self.inbox.arrive(link, frame.id, (frame, buffers))
        self._tell(link, acks)
        self._signal()

    def on_end(self, publisher: int, number: int, cut: bool) -> None:
        """Take in that a publisher has put its last message, or was cut short."""
        with self._lock:
            self.cut = self.cut or cut
            self.inbox.end(self._links[publisher], number)
        self._signal()

    def take(self) -> Taken | None:
        """Return the next message, if there is one."""
        with self._lock:
            found = self.inbox.take()
            if found is None:
                return None
            taken, acks = found
            frame, buffers = taken.message
            self.received += 1
            self.bytes += len(frame.body) + sum(map(len, buffers))
        self._tell(taken.link, acks)
        return taken

    @property
    def over(self) -> bool:
        """Whether nothing is left, and nothing will come."""
        with self._lock:
            return self.inbox.over

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher`, which must not wait, once something has come; at once if it has."""
        with self._lock:
            if not len(self.inbox) and not self.inbox.over:
                self._watchers.append(watcher)
                return
        watcher()

    def leave(self) -> None:
        """Hear nothing more: publishers are told, so that none waits."""
        with self._lock:
            self.left = True
            settled = [self.inbox.settled(link) for link in range(len(self.publishers))]
        for link, number in enumerate(settled):
            self._transmit(link, 0, b"%d" % number)

    def _tell(self, link: int, acks: int) -> None:
        if acks:
            self._transmit(link, acks)

    def _transmit(self, link: int, count: int, settled: bytes = b"") -> None:
        self.engine.transmit(
            self._ranks[link], TOPIC_ACK, self.subscription.vertex, self.publishers[link], count,
            self._aux, body=settled,
        )  # fmt: skip

    def _signal(self) -> None:
        with self._lock:
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()


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
    """

    def __init__(
        self,
        engine: Any,
        vertices: Sequence[Vertex],
        ranks: Sequence[int],
        build: Callable[[Any, End], Any],
    ) -> None:
        self._build = build
        self._outgoing: dict[tuple[int, int], Outgoing] = {}  # vertex, topic
        self._incoming: dict[tuple[int, int, int], Incoming] = {}  # vertex, topic, place
        self._places: dict[tuple[int, int], int] = {}  # vertex, id of an end
        for number, (publishers, subscribers) in subscriptions(vertices).items():
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
                    self._places[each.vertex, id(each.end)] = each.place
                    self._incoming[each.vertex, number, each.place] = Incoming(
                        engine, each, [ranks[p] for p in each.publishers], aux
                    )
            for p, own_links in links.items():
                self._outgoing[p, number] = Outgoing(engine, p, own_links)
        engine.handlers[TOPIC] = self._on_message
        engine.handlers[TOPIC_ACK] = self._on_ack
        engine.handlers[TOPIC_END] = self._on_end

    def open(self, vertex: int, end: End) -> Any:
        """Return the user's object for an end that a node of this rank holds."""
        if end.publishes:
            return self._build(self._outgoing[vertex, end.topic.number], end)
        place = self._places[vertex, id(end)]
        return self._build(self._incoming[vertex, end.topic.number, place], end)

    def end(self, vertex: int, cut: bool = False, late: bool = False) -> None:
        """Note that a node publishes nothing more; see `Outgoing.end`."""
        for (node, _), outgoing in self._outgoing.items():
            if node == vertex:
                outgoing.end(cut, late)

    def leave(self, vertex: int, cut: bool = False, late: bool = False) -> None:
        """Note that a node is over: it publishes nothing more, and hears nothing more."""
        self.end(vertex, cut, late)
        for (node, _, _), incoming in self._incoming.items():
            if node == vertex:
                incoming.leave()

    def _on_message(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self._at(frame).on_message(frame.source, frame, buffers)

    def _on_end(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self._at(frame).on_end(frame.source, frame.id, bool(frame.encoding))

    def _at(self, frame: Frame) -> Incoming:
        return self._incoming[frame.target, frame.aux >> 16, frame.aux & 0xFFFF]

    def _on_ack(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        settled = int(bytes(frame.body) or b"0")
        outgoing = self._outgoing[frame.target, frame.aux >> 16]
        outgoing.on_ack(frame.source, frame.aux, frame.id, settled)


def packed(value: Any) -> Packed:
    """Pack a message, once for all who get it."""
    return pack(value, SNAPSHOT, "the message")
