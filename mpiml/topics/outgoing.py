"""What a node publishes on one topic: on which links a message goes, when, and by which way.

A message is packed once. A small one goes to each subscriber as a frame of its own. A large one
goes once to each rank and once to each other host, from where it is passed on; see
`mpiml.topics.tree`. A link on which both may happen has its messages counted, and the other end
puts them back in order.

Where the policy drops messages, subscribers that are served together may get room one after the
other. A large message then waits until it can be sent to all of them for which it is kept. The
acknowledgements of such policies tell of arrival, so nobody waits for what a node does.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpiml._native import join_plain
from mpiml.contents import own
from mpiml.engine import APART
from mpiml.payload import SNAPSHOT, Packed, pack
from mpiml.topics.queues import Outbox
from mpiml.topics.tree import Entry, joined, split
from mpiml.waits import Wait
from mpiml.wire import HEADER, TOPIC, TOPIC_END

__all__ = ["SHARED", "Link", "Outgoing", "connect", "packed"]

SHARED = 64 * 1024  # bytes from which a message is sent once for several subscribers

_NOTHING = Packed(0, b"", [])
_CUT = Packed(1, b"", [])  # of an end: the publisher was stopped, or has failed


class _Load(NamedTuple):
    """A message on its way."""

    serial: int
    packed: Packed
    size: int
    large: bool


class Link:
    """The way from a publisher of this rank to one subscriber.

    Attributes
    ----------
    vertex, rank : int
        Of the subscriber.
    sent, bytes : int
        How much was sent: messages, and what they held.
    mates : tuple of Link
        Those with which it gets large messages: of the same rank, or the same other host. Empty
        where it is alone.
    ordered : bool
        Whether its messages may come on several ways.
    """

    __slots__ = (
        "aux", "bytes", "ended", "gone", "mates", "ordered", "outbox", "rank", "sent", "vertex",
    )  # fmt: skip

    def __init__(self, vertex: int, rank: int, aux: int, outbox: Outbox) -> None:
        self.vertex = vertex
        self.rank = rank
        self.aux = aux
        self.outbox = outbox
        self.gone = False  # the subscriber has left
        self.ended = False  # it has been told that nothing more comes
        self.sent = self.bytes = 0
        self.mates: tuple[Link, ...] = ()
        self.ordered = False

    def held(self) -> bool:
        """Return whether the message that is next waits for those it goes together with."""
        load = self.outbox.head
        return load.large and any(mate.behind(load) for mate in self.mates)

    def behind(self, load: _Load) -> bool:
        """Return whether a message is still to be sent here, and cannot be now."""
        outbox = self.outbox
        return not outbox.ready if outbox.head is load else outbox.holds(load)

    def entry(self, number: int, turn: int) -> Entry:
        """Return how it stands in the list of a frame."""
        return Entry(self.rank, self.vertex, self.aux, number, turn if self.ordered else 0)


def connect(links: Sequence[Link], rank: int, host_of: Callable[[int], int]) -> None:
    """Find out which links of a publisher get large messages together. Local.

    Parameters
    ----------
    links : sequence of Link
        All of one publisher.
    rank : int
        Where it is.
    host_of : callable
        Returns the number of a rank's host.
    """
    home = host_of(rank)
    places: dict[tuple[bool, int], list[Link]] = {}
    for link in links:
        if link.rank != rank and host_of(link.rank) >= 0:  # else it takes nothing for others
            near = host_of(link.rank) == home
            place = link.rank if near else host_of(link.rank)
            places.setdefault((near, place), []).append(link)
    far = {link.rank for (near, _), there in places.items() if not near for link in there}
    for (near, _), there in places.items():
        for link in there:
            link.mates = tuple(there) if len(there) > 1 else ()
            link.ordered = not near and len(far) > 1


class Outgoing:
    """What a node of this rank publishes on one topic. Local; safe from any thread.

    Parameters
    ----------
    engine
        The rank's engine.
    vertex : int
        The node.
    links : sequence of Link
        To each subscriber that hears it, connected.
    host_of : callable
        Returns the number of a rank's host.

    Attributes
    ----------
    outside : bool
        Whether ranks of other programs are among them, who get arrays only.
    """

    def __init__(
        self, engine: Any, vertex: int, links: Sequence[Link], host_of: Callable[[int], int]
    ) -> None:
        self.engine = engine
        self.vertex = vertex
        self.links = links
        self.lock = threading.Lock()
        self.count = 0  # messages that were put
        self.undelivered = 0  # messages for subscribers that have left
        self.ended = False
        self.late = False  # what is put after the end is counted, and no error
        self._cut = False
        self._host_of = host_of
        self._grouped = any(link.mates for link in links)
        self.outside = any(host_of(link.rank) < 0 for link in links)
        self._simple = not self.outside and all(
            link.rank != engine.rank and not link.ordered for link in links
        )
        self._serials = itertools.count()
        self._by_aux = {(link.vertex, link.aux): link for link in links}
        self._waiting: list[Wait] = []
        self._ready: deque[Callable[[], None]] = deque()  # frames to be sent, in this order
        self._sending = threading.Lock()

    def put_plain(self, links: Sequence[Link], value: Any) -> bool:
        """Send a small plain value on some links, if it needs nothing else; False where it does.

        The most frequent case of `put`, which it leaves the rest to.
        """
        if not self._simple:
            return False
        engine = self.engine
        with self.lock:
            if self.ended or self._ready or self._sending.locked():
                return False
            messages = []
            for link in links:
                number = link.outbox.next_at_once
                if not number or link.gone:
                    return False
                message = join_plain(
                    TOPIC, 0, self.vertex, link.vertex, number, link.aux, b"", value
                )
                if message is None or len(message) >= APART:
                    return False
                messages.append((link, message))
            self.count += 1
            # under the lock, so that nothing overtakes it; no link to this rank is among them
            for link, message in messages:
                link.outbox.sent_at_once()
                link.sent += 1
                link.bytes += len(message) - HEADER.size
                engine.note_sent()
                engine.link.send(link.rank, message)
        return True

    def put_any(
        self, groups: Sequence[Sequence[Link]], packed: Packed, wait: Wait | None
    ) -> bool:
        """Send a message on the links of one group: the first where it can go at once, or may wait.

        Parameters
        ----------
        groups : sequence of sequence of Link
            At least one.
        packed : Packed
            The message.
        wait : Wait or None
            Is told of more room, where no group has any.

        Returns
        -------
        bool
            False where nothing was sent: no group has room, or `refuses` is true.
        """
        size = len(packed.body) + sum(map(len, packed.buffers))
        with self.lock:
            if self.refuses:
                return False
            links = groups[0] if self.ended else self._roomy(groups)
            if links is None:
                if wait is not None:
                    wait.ready = False
                    self._waiting.append(wait)
                return False
            there = [] if self.ended else [link for link in links if not link.gone]
            self.count += 1
            self.undelivered += len(links) - len(there)
            load = _Load(next(self._serials), packed, size, size >= SHARED)
            for link in there:
                link.outbox.add(load)
                link.outbox.trim()
            # to drop a message may let go of another that has waited for it
            self._release(self.links if self._grouped else there)
        self._flush()
        return True

    @property
    def refuses(self) -> bool:
        """Whether it has ended, and what is put is an error."""
        return self.ended and not self.late

    @staticmethod
    def _roomy(groups: Sequence[Sequence[Link]]) -> Sequence[Link] | None:
        """Return the group that a message goes to now; None if none has room. Under the lock."""
        if len(groups) > 1:  # not one whose subscribers have all left, if there is another
            groups = [g for g in groups if not all(link.gone for link in g)] or groups[:1]
            for group in groups:
                if all(link.gone or link.outbox.next_at_once for link in group):
                    return group
        for group in groups:
            if all(link.gone or link.outbox.room for link in group):
                return group
        return None

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
                # told of the end all the same: a method there may still wait
            else:
                outbox = link.outbox
                outbox.acknowledged(count)
                if outbox.idle and not (self._waiting or self._grouped or self.ended):
                    return
            self._release(link.mates or (link,))
            if self.ended:
                for each in link.mates or (link,):
                    self._end(each)
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
            self.late, self._cut = late, cut
            self.ended = True  # the last: it is read without the lock
            for link in self.links:
                self._end(link)
            waiting, self._waiting = self._waiting, []
        self._flush()
        for wait in waiting:  # they find that it has ended
            self.engine.fulfil(wait)

    def _end(self, link: Link) -> None:
        if link.outbox.idle and not link.ended:
            link.ended = True
            entry = link.entry(link.outbox.number, link.sent + 1)
            how = _CUT if self._cut else _NOTHING
            self._ready.append(partial(self._direct, TOPIC_END, entry, how))

    def _release(self, links: Iterable[Link]) -> None:
        """Send what may go. Under the lock."""
        batches: dict[int, tuple[_Load, list[Entry]]] = {}
        moved = True
        while moved:
            moved = False
            for link in links:
                outbox = link.outbox
                while outbox.ready and not link.held():
                    number, load = outbox.send()
                    link.sent += 1
                    link.bytes += load.size
                    batch = batches.setdefault(load.serial, (load, []))
                    batch[1].append(link.entry(number, link.sent))
                    moved = True
        for serial in sorted(batches):
            self._ready.append(partial(self._send, *batches[serial]))

    def _send(self, load: _Load, entries: list[Entry]) -> None:
        rank, host_of = self.engine.rank, self._host_of
        far = [each for each in entries if each.rank != rank and host_of(each.rank) >= 0]
        if not load.large or len(far) < 2:
            for entry in entries:
                self._direct(TOPIC, entry, load.packed)
            return
        for other, part in split(rank, far, host_of):
            self._transmit(other, TOPIC, part[0], joined(part), load.packed)
        for entry in entries:
            if entry.rank == rank or host_of(entry.rank) < 0:
                self._direct(TOPIC, entry, load.packed)

    def _direct(self, kind: int, entry: Entry, packed: Packed) -> None:
        if entry.rank == self.engine.rank:
            packed = own(packed)
        name = joined((entry,)) if entry.turn else b""
        self._transmit(entry.rank, kind, entry, name, packed)

    def _transmit(self, rank: int, kind: int, to: Entry, name: bytes, packed: Packed) -> None:
        self.engine.transmit(
            rank, kind, self.vertex, to.vertex, to.number, to.aux,
            encoding=packed.encoding, name=name, body=packed.body, buffers=packed.buffers,
        )  # fmt: skip

    def _flush(self) -> None:
        """Send what is ready. Under no lock of ours: a frame to this rank is taken in at once."""
        while self._ready and self._sending.acquire(False):
            try:
                while self._ready:
                    self._ready.popleft()()
            finally:
                self._sending.release()


def packed(value: Any) -> Packed:
    """Pack a message, once for all who get it."""
    return pack(value, SNAPSHOT, "the message")
