"""What comes for the subscribers of one rank, in the order of each publisher.

It is taken in by whoever drives progress, so while the node computes too.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mpiml.payload_memory import copied
from mpiml.topics.graph import Subscription
from mpiml.topics.queues import Inbox, Order, Taken
from mpiml.wire import TOPIC_ACK, Frame, join

__all__ = ["Incoming", "Message", "Shared"]

Message = tuple[Frame, Sequence[Any]]


class Shared:
    """A message that came once for several: each gets memory of its own. Local.

    Parameters
    ----------
    frame, buffers
        The message.
    claims : int
        By how many it is used: subscribers, and the passing on, which reads the memory for as
        long as a transfer takes. Who uses it alone gets it without a copy.
    """

    __slots__ = ("_buffers", "_claims", "_frame", "_lock")

    def __init__(self, frame: Frame, buffers: Sequence[Any], claims: int) -> None:
        self._frame = frame
        self._buffers = buffers
        self._claims = claims
        self._lock = threading.Lock()

    @property
    def parts(self) -> Message:
        """The message, for one who only reads it."""
        return self._frame, self._buffers

    def take(self) -> Message:
        """Return the message, for one who may write to it."""
        with self._lock:
            if self._claims == 1:
                return self.parts
        copies = [copied(buffer) for buffer in self._buffers]
        with self._lock:
            self._claims -= 1  # only now: until then it is read here
        return self._frame, copies


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
        self.left = False  # nobody takes anything more
        # a publisher was stopped, or has failed: the end of its work is not one
        self.cut = False
        self.received = self.bytes = 0  # of what was taken
        self._ranks = ranks
        self._aux = aux
        self._links = {vertex: i for i, vertex in enumerate(self.publishers)}
        self._orders: dict[int, Order] = {}
        self._frames: dict[tuple[int, int], bytes] = {}  # acknowledgements
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    def on_message(
        self, publisher: int, number: int, message: Message | Shared, turn: int = 0
    ) -> None:
        """Take a message in: the `turn`-th that was sent, or 0 where none can be overtaken."""
        link = self._links[publisher]
        with self._lock:
            if self.left:
                return
            if turn:
                acks = self._in_turn(link, turn, number, message)
            else:
                acks = self.inbox.arrive(link, number, message)
            watchers = self._watchers
            if watchers:
                self._watchers = []
        for watcher in watchers:
            watcher()
        if acks:
            self._tell(link, acks)

    def on_end(self, publisher: int, number: int, cut: bool, turn: int = 0) -> None:
        """Take in that a publisher has put its last message, or was cut short."""
        link = self._links[publisher]
        with self._lock:
            if self.left:
                return
            self.cut = self.cut or cut
            acks = 0
            if turn:
                acks = self._in_turn(link, turn, number, None)
            else:
                self.inbox.end(link, number)
        self._tell(link, acks)
        self._signal()

    def _in_turn(self, link: int, turn: int, number: int, message: Any) -> int:
        """Take a message in, or an end, once all before it have come; return what to tell."""
        order = self._orders.get(link)
        if order is None:
            order = self._orders[link] = Order()
        acks = 0
        for count, one in order.arrive(turn, (number, message)):
            if one is None:
                self.inbox.end(link, count)
            else:
                acks += self.inbox.arrive(link, count, one)
        return acks

    def take(self) -> Taken | None:
        """Return the next message, if there is one: its frame and buffers, the node's own."""
        if not self.inbox.count:
            return None
        with self._lock:
            found = self.inbox.take()
            if found is None:
                return None
            taken, acks = found
            message = taken.message
            shared = type(message) is Shared
            frame, buffers = message.parts if shared else message
            self.received += 1
            self.bytes += len(frame[8]) + (sum(map(len, buffers)) if buffers else 0)
        if shared:
            taken = taken._replace(message=message.take())
        if acks:
            self._tell(taken[0], acks)
        return taken

    @property
    def over(self) -> bool:
        """Whether nothing is left, and nothing will come."""
        return self.left or self.inbox.over  # without the lock: once it is true, it stays

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher`, which must not wait, once something has come; at once if it has."""
        with self._lock:
            if not self.inbox.count and not self.over:
                self._watchers.append(watcher)
                return
        watcher()

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Do not call `watcher` any more: who waited has gone. Nothing if it was called."""
        with self._lock, suppress(ValueError):
            self._watchers.remove(watcher)

    def leave(self, cut: bool = False) -> None:
        """Hear nothing more: publishers are told, so that none waits. The second time nothing.

        What waits here is let go, and is undelivered; who waits for a message finds the end.

        Parameters
        ----------
        cut : bool
            The node was stopped, or has failed: the end is not that of what it wanted to hear.
        """
        with self._lock:
            if self.left:
                return
            self.left = True
            self.cut = self.cut or cut
            settled = [self.inbox.settled(link) for link in range(len(self.publishers))]
            self.inbox.clear()
            self._orders.clear()
        for link, number in enumerate(settled):
            self._transmit(link, 0, b"%d" % number)
        self._signal()

    def _tell(self, link: int, acks: int) -> None:
        if not acks:
            return
        rank = self._ranks[link]
        engine = self.engine
        if rank == engine.rank:
            self._transmit(link, acks)
            return
        frame = self._frames.get((link, acks))
        if frame is None:  # nearly always as many as the time before
            vertex, publisher = self.subscription.vertex, self.publishers[link]
            frame = join(TOPIC_ACK, vertex, publisher, acks, self._aux)
            self._frames[link, acks] = frame
        engine.note_sent()
        engine.link.send(rank, frame)

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
