"""What a node holds of a topic: `Publisher` and `Subscriber`."""

import itertools
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

from mpiml import threads
from mpiml.callbacks import await_in, wake
from mpiml.contents import value_in
from mpiml.errors import DeadlineError, ServiceGoneError, Stopped, UsageError
from mpiml.graph import Vertex
from mpiml.payload import Packed
from mpiml.scope import Scope, current_scope
from mpiml.seconds import timeout_seconds
from mpiml.topics.graph import ROUND_ROBIN, End, chosen
from mpiml.topics.incoming import Incoming
from mpiml.topics.outgoing import Link, Outgoing, packed
from mpiml.waits import Wait

__all__ = ["Publisher", "Subscriber", "ends_of"]


class Publisher:
    """Puts messages on a topic. Local; safe from any thread."""

    def __init__(self, outgoing: Outgoing, end: End, vertices: Sequence[Vertex]) -> None:
        self._outgoing = outgoing
        self._topic = end.topic
        self._vertices = vertices
        self._scope = current_scope(required=False)
        self._to_all = self._topic.deliver != ROUND_ROBIN
        self._turns = itertools.count()
        node = vertices[outgoing.vertex]
        self._about = f"{end.topic!r}: put() of {node.title}"

    @property
    def dropped(self) -> int:
        """How many messages were too many for slow subscribers, and were never sent."""
        return sum(link.outbox.dropped for link in self._outgoing.links)

    @property
    def undelivered(self) -> int:
        """How many messages were for subscribers that had left, or left before they took them."""
        return self._outgoing.undelivered

    def statistics(self) -> dict[str, int]:
        """Return what has become of the messages, summed over subscribers; see docs/topics.md.

        Returns
        -------
        dict of str to int
            ``"put"``: calls of `put`. ``"sent"`` and ``"bytes"``: messages that have left, and
            what they held; one for several subscribers counts for each. ``"waiting"``: messages
            for subscribers that are behind. ``"dropped"``, ``"undelivered"``: as the attributes.
        """
        links = self._outgoing.links
        return {
            "put": self._outgoing.count,
            "sent": sum(link.sent for link in links),
            "bytes": sum(link.bytes for link in links),
            "waiting": sum(link.outbox.waiting for link in links),
            "dropped": self.dropped,
            "undelivered": self.undelivered,
        }

    def put(self, x: Any, to: Any = None) -> None:
        """Send a message. It may be changed afterwards.

        Waits for room where the topic's policy is `Keep` with ``on_full="block"`` and a
        subscriber is n messages behind.

        Parameters
        ----------
        x : object
            Anything a call takes as an argument.
        to : str, int or several of these, optional
            Only these subscribers: those of a role, by label, or with this index in their role.

        Raises
        ------
        UsageError
            `to` means no subscriber that hears this publisher; or there is no room, and this
            is a coroutine, which must not wait here.
        ServiceGoneError
            The node's body has returned, or it has closed the publisher; while this waits for
            room too: then nothing was sent.
        Stopped
            The program stops.
        """
        links = self._outgoing.links if to is None else self._to(to)
        scope = current_scope(required=False) or self._scope
        if scope is not None and scope.halt:
            raise Stopped("the program is stopping: expected no new message in a body")
        self._check_open()
        encode = self._topic.encode
        if encode is not None:
            x = encode(x)
        if self._to_all and self._outgoing.put_plain(links, x):
            return
        message = self._packed(x)
        groups = self._groups(links)
        if self._outgoing.put_any(groups, message, None):
            return
        wait = Wait(f"{self._about}, for room")
        self._check_no_loop()
        while not self._outgoing.put_any(groups, message, wait):
            self._check_open()
            self._outgoing.engine.wait(wait, None, scope)

    def close(self) -> None:
        """Publish nothing more on this topic from this node, as if it had returned.

        What was put arrives; then iterations of subscribers end, once their other publishers
        have ended too. All publishers of the node on this topic are closed. The second time
        nothing.
        """
        self._outgoing.end()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:  # work that has failed must not end as if it were done
            self.close()

    def _packed(self, x: Any) -> Packed:
        if not self._outgoing.outside:
            return packed(x)
        from mpiml.external.topics import packed_array

        return packed_array(x, self._topic, self._about)

    def _check_open(self) -> None:
        if self._outgoing.refuses:
            raise ServiceGoneError(
                f"{self._about}: the node has returned, or has closed its publisher, and "
                "publishes no more"
            )

    def _check_no_loop(self) -> None:
        """Refuse to wait in a coroutine: nothing else would run there until there is room."""
        asyncio = sys.modules.get("asyncio")
        if asyncio is None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise UsageError(
            f"{self._about}: expected room, or a thread that may wait for it, got a coroutine. "
            "Its event loop would stand still. Write: await asyncio.to_thread(publisher.put, x)"
        )

    def _groups(self, links: Sequence[Link]) -> list[Sequence[Link]]:
        """Return what the message may go to: one of these groups."""
        if self._to_all:
            return [links]
        there = [link for link in links if not link.gone] or list(links)
        if not there:  # nobody hears it
            return [links]
        first = next(self._turns) % len(there)
        return [[link] for link in (*there[first:], *there[:first])]

    def _to(self, to: Any) -> list[Link]:
        links = self._outgoing.links
        where = f"{self._about}: to"
        found = {
            v.id for v in chosen(to, [self._vertices[link.vertex] for link in links], where)
        }
        if not found:
            there = sorted({v.title for v in map(self._node, links)})
            raise UsageError(
                f"{where}: expected one of {', '.join(there) or 'no subscribers'}, got {to!r}"
            )
        return [link for link in links if link.vertex in found]

    def _node(self, link: Link) -> Vertex:
        return self._vertices[link.vertex]

    def __repr__(self) -> str:
        return f"<publisher of {self._topic!r}>"


class Subscriber:
    """Gets the messages of a topic: by `get`, in ``for`` or ``async for``. Local.

    Iteration ends once all publishers it hears have returned and everything is taken. Safe from
    several threads, each of which gets other messages.
    """

    def __init__(self, incoming: Incoming, end: End, vertices: Sequence[Vertex]) -> None:
        self._incoming = incoming
        self._topic = end.topic
        self._names = [vertices[p].title for p in incoming.publishers]
        self._scope = current_scope(required=False)
        node = vertices[incoming.subscription.vertex]
        self._about = f"{end.topic!r}: a message for {node.title}"

    @property
    def dropped(self) -> dict[str, int]:
        """How many messages of each publisher were lost to this subscriber."""
        return dict(zip(self._names, self._incoming.inbox.dropped, strict=True))

    def statistics(self) -> dict[str, int]:
        """Return what has come, summed over publishers; see docs/topics.md.

        Returns
        -------
        dict of str to int
            ``"received"`` and ``"bytes"``: messages that the node has taken, and what they held.
            ``"waiting"``: those that it can take now. ``"dropped"``: those that were lost to it.
        """
        incoming = self._incoming
        return {
            "received": incoming.received,
            "bytes": incoming.bytes,
            "waiting": len(incoming.inbox),
            "dropped": sum(incoming.inbox.dropped),
        }

    def get(self, timeout: float | None = None) -> Any:
        """Return the next message, the receiver's own; wait for it.

        Parameters
        ----------
        timeout : float, optional
            Seconds; 0 does not wait.

        Raises
        ------
        DeadlineError
            None has come in time.
        ServiceGoneError
            All publishers have ended, and there is none left; or the subscriber is closed.
        UsageError
            The timeout is no number >= 0.
        Stopped
            The program stops.
        """
        seconds = timeout_seconds(self._about, timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        found, value = self._next(deadline, seconds)
        if not found:
            if self._incoming.left:
                raise ServiceGoneError(
                    f"{self._about}: the node has closed its subscriber, or has returned"
                )
            raise ServiceGoneError(
                f"{self._about}: its publishers have returned: {', '.join(self._names)}"
            )
        return value

    def close(self) -> None:
        """Hear nothing more: as if the node had returned, for this subscriber.

        What waits here, and what publishers put later, is undelivered, and holds nobody up.
        Iterations end, those of other threads too. The second time nothing.
        """
        self._incoming.leave()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _next(self, deadline: float | None, timeout: float | None) -> tuple[bool, Any]:
        incoming = self._incoming
        engine = incoming.engine
        while True:
            taken = incoming.take()
            if taken is not None:
                return True, self._value(taken)
            scope = current_scope(required=False) or self._scope
            wait = Wait(self._about)
            watcher = partial(engine.fulfil, wait)
            if not incoming.over:
                incoming.watch(watcher)
            elif not self._waits_for_stop(scope):
                return False, None
            try:
                if not engine.wait(wait, deadline, scope):
                    raise DeadlineError(
                        f"{self._about}: expected one within {timeout:g} s, got none"
                    )
            finally:
                incoming.unwatch(watcher)

    def _waits_for_stop(self, scope: Scope | None) -> bool:
        """Return whether to wait for the stop, since publishers have not finished their work.

        A body then gets `Stopped`, not the end of an iteration, which would look like all of it.

        Raises
        ------
        ServiceGoneError
            They have not, and this is a method: a stop does not interrupt it.
        """
        if self._incoming.cut and (scope is None or scope.nested):
            raise ServiceGoneError(
                f"{self._about}: the program stops, and its publishers have ended before they "
                f"were done: {', '.join(self._names)}"
            )
        return self._incoming.cut

    def _value(self, taken: Any) -> Any:
        frame, buffers = taken.message
        value = value_in(frame, buffers)
        decode = self._topic.decode
        return value if decode is None else decode(value)

    def __iter__(self) -> Iterator[Any]:
        while True:
            found, value = self._next(None, None)
            if not found:
                return
            yield value

    def __aiter__(self) -> "Subscriber":
        return self

    async def __anext__(self) -> Any:
        import asyncio

        incoming = self._incoming
        await asyncio.sleep(0)  # other tasks want a turn too
        while True:
            taken = incoming.take()
            if taken is not None:
                # nothing awaits here: a cancel would lose the message
                return self._value(taken)
            scope = current_scope(required=False) or self._scope
            if incoming.over and not self._waits_for_stop(scope):
                raise StopAsyncIteration
            await _Arrival(incoming, scope)

    def __repr__(self) -> str:
        return f"<subscriber of {self._topic!r} to {', '.join(self._names)}>"


class _Arrival:
    """Waits for the next message in a coroutine."""

    def __init__(self, incoming: Incoming, scope: Scope | None) -> None:
        self._incoming = incoming
        self._scope = scope

    def __await__(self) -> Generator[Any, None, None]:
        import asyncio

        threads.refuse_await(self._incoming.engine, "a topic")
        proxy = asyncio.get_running_loop().create_future()
        watcher = partial(wake, proxy)
        if not self._incoming.over:  # else it is the stop that ends this
            self._incoming.watch(watcher)
        try:
            yield from await_in(self._scope, proxy)
        finally:
            self._incoming.unwatch(watcher)


def ends_of(vertices: Sequence[Vertex]) -> Any:
    """Return what builds the objects of a program's nodes; see `Topics`."""

    def build(side: Any, end: End) -> Any:
        return (Publisher if end.publishes else Subscriber)(side, end, vertices)

    return build
