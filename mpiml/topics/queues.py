"""What is on its way from one publisher to one subscriber: how much may be, and what is dropped.

An `Outbox` is the publisher's side of one such link, an `Inbox` the subscriber's of all its
links. Messages of a link are numbered from 1, those that are dropped too. What is under way or
waits is bounded on both sides, whatever the other does: the publisher sends until `window`
messages have not been acknowledged.

Pure: messages are opaque.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from mpiml.topics.policy import BLOCK, Keep, Policy

__all__ = ["Inbox", "Order", "Outbox", "Sent", "Taken"]


class Sent(NamedTuple):
    """A message that is to be sent now, with its number on the link."""

    number: int
    message: Any


class Taken(NamedTuple):
    """A message that a subscriber gets."""

    link: int
    number: int
    message: Any


# Taken(...) takes twice the time
_new: Callable[[type[Taken], tuple[int, int, Any]], Taken] = tuple.__new__


def _rule(policy: Policy) -> tuple[int, bool]:
    """Return how many messages of a link either side keeps, and whether a publisher waits."""
    if isinstance(policy, Keep):
        return policy.n, policy.on_full == BLOCK
    return 1, False  # only the newest


class Outbox:
    """The publisher's side of one link.

    Local. After each `add` and `acknowledged`, what is `ready` is to be sent: by `send`, in
    order; what is too much then is dropped by `trim`.

    Parameters
    ----------
    policy : Policy
        Of the topic.
    """

    __slots__ = ("_open", "_waiting", "blocks", "dropped", "number", "window")

    def __init__(self, policy: Policy) -> None:
        self.window, self.blocks = _rule(policy)
        self.dropped = 0  #: messages that were never sent
        self.number = 0  #: messages that have been added
        self._open = 0  # sent, and not acknowledged
        self._waiting: deque[Sent] = deque()

    @property
    def room(self) -> bool:
        """Whether a message may be added now: always, unless the policy is to block."""
        return not self.blocks or self._open < self.window

    @property
    def waiting(self) -> int:
        """How many messages have not been sent."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether everything that was added has been sent or dropped."""
        return not self._waiting

    @property
    def ready(self) -> bool:
        """Whether a message waits that may be sent now."""
        return self._open < self.window and bool(self._waiting)

    @property
    def head(self) -> Any:
        """The message that is sent next; None if none waits."""
        return self._waiting[0].message if self._waiting else None

    def holds(self, message: Any) -> bool:
        """Return whether a message waits."""
        return any(sent.message is message for sent in self._waiting)

    def add(self, message: Any) -> None:
        """Take a message; `room` is asked before."""
        self.number += 1
        self._waiting.append(Sent(self.number, message))

    @property
    def next_at_once(self) -> int:
        """The number of a message that would be sent at once; 0 where it would have to wait."""
        return 0 if self._waiting or self._open >= self.window else self.number + 1

    def sent_at_once(self) -> None:
        """Note that a message was added and sent, as `next_at_once` allowed."""
        self._open += 1
        self.number += 1

    def send(self) -> Sent:
        """Return the next message, which is sent now."""
        self._open += 1
        return self._waiting.popleft()

    def trim(self) -> None:
        """Drop the oldest of what waits, where it is too much."""
        while len(self._waiting) > self.window:
            self._waiting.popleft()
            self.dropped += 1

    def acknowledged(self, count: int) -> None:
        """Note that so many more messages need no room any more."""
        self._open -= count

    def close(self) -> int:
        """Drop what has not been sent: nobody is there any more; return how many it was."""
        count = len(self._waiting)
        self._waiting.clear()
        return count


class Order:
    """Puts what is sent on one link, and comes on several ways, back in its order.

    Local. What comes early is held: no more of it than may be under way.
    """

    __slots__ = ("_early", "_turn")

    def __init__(self) -> None:
        self._turn = 1
        self._early: dict[int, Any] = {}

    def arrive(self, turn: int, item: Any) -> list[Any]:
        """Take an item in; return what is due now."""
        self._early[turn] = item
        due = []
        while self._turn in self._early:
            due.append(self._early.pop(self._turn))
            self._turn += 1
        return due


class Inbox:
    """The subscriber's side of all its links.

    Local. `arrive` and `take` return what is to be acknowledged too.

    Parameters
    ----------
    policy : Policy
        Of the topic.
    links : int
        From how many publishers, numbered from 0.
    """

    def __init__(self, policy: Policy, links: int) -> None:
        self._n, self._blocks = _rule(policy)
        self._batch = max(1, self._n // 4)
        self._queues: list[deque[tuple[int, int, Any]]] = [deque() for _ in range(links)]
        self._numbers = [0] * links  # of the last message that has come
        self._arrived = [0] * links  # how many messages have come
        self._owed = [0] * links  # acknowledgements
        self._open = [0] * links  # messages that have come, and were not acknowledged
        self._order: deque[tuple[int, int]] = deque()  # (arrival, link), of those dropped too
        self._arrivals = 0
        self.count = 0  #: messages that wait here
        self._ended: set[int] = set()
        self.dropped = [0] * links  #: for each link, how many messages were lost

    def __len__(self) -> int:
        return self.count

    @property
    def over(self) -> bool:
        """Whether nothing is left, and nothing will come."""
        return len(self._ended) == len(self._queues) and not self.count

    def clear(self) -> None:
        """Let go of what waits: nobody takes it any more."""
        for queue in self._queues:
            queue.clear()
        self._order.clear()
        self.count = 0

    def arrive(self, link: int, number: int, message: Any) -> int:
        """Take a message in; return how many of the link to acknowledge now."""
        self.dropped[link] += number - self._numbers[link] - 1
        self._numbers[link] = number
        self._arrived[link] += 1
        arrival, queue = self._arrivals, self._queues[link]
        self._arrivals += 1
        queue.append((arrival, number, message))
        self._order.append((arrival, link))
        if len(queue) > self._n:
            queue.popleft()
            self.dropped[link] += 1
            if len(self._order) > 2 * self.count + 8:
                self._forget()
        else:
            self.count += 1
        self._open[link] += 1
        return self._owe(link, 0 if self._blocks else 1)

    def end(self, link: int, number: int) -> None:
        """Note that nothing more comes from a publisher, who has put so many messages."""
        self.dropped[link] += number - self._numbers[link]
        self._numbers[link] = number
        self._ended.add(link)

    def settled(self, link: int) -> int:
        """Return how many messages of a link have come and do not wait here any more."""
        return self._arrived[link] - len(self._queues[link])

    def take(self) -> tuple[Taken, int] | None:
        """Return the oldest message, and how many of its link to acknowledge; None if none is."""
        while self._order:
            arrival, link = self._order.popleft()
            queue = self._queues[link]
            if queue and queue[0][0] == arrival:
                _, number, message = queue.popleft()
                self.count -= 1
                taken = _new(Taken, (link, number, message))
                return taken, self._owe(link, 1) if self._blocks else 0
        return None

    def _forget(self) -> None:
        """Let go of the places of messages that were dropped."""
        queues = self._queues
        self._order = deque(
            (arrival, link)
            for arrival, link in self._order
            if queues[link] and arrival >= queues[link][0][0]
        )

    def _owe(self, link: int, more: int) -> int:
        """Owe so many more acknowledgements; return how many to send now."""
        count = self._owed[link] + more
        # in batches, but at once to a publisher who has no room left: it waits for them
        if count < self._batch and self._open[link] < self._n:
            self._owed[link] = count
            return 0
        self._owed[link] = 0
        self._open[link] -= count
        return count
