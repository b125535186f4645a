"""Who waits in what: finds members that wait for each other in different operations.

Members that do different things on one object meet there and compare hashes. Those that use
different objects never meet: each waits for the others, who will not come. Once a wait has
lasted, the first process of the team asks the others in what their members wait. It is
answered only when all members of a process wait, and each has found twice since the question
that it still does; a member that computes answers nothing, so it is never taken for one that
waits elsewhere. If all wait, at the same number of their operations, in different ones, it asks
again; the same waits then were under way at once, and nobody can come any more. It makes the
error and tells it to all.

Pure: messages are returned and taken as bytes, time is passed in.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Ledger", "Post", "out_of_step"]

_ACTIVE = 1.0  # s since the last look, until a wait counts as over
_TWICE = 2  # looks after a question: the first one's finding may be older than the question
_PAUSE = 256  # looks, at most, between two questions that find nothing

_Outgoing = list[tuple[int, bytes]]  # (process, message)


class Post(NamedTuple):
    """What a member says of one wait.

    Attributes
    ----------
    operation : int
        Which operation of the member it belongs to, from 1; 0: it makes something.
    number : int
        The same, counting what was made too.
    hash : int
        `mpiml.collectives.labels.Label.hash` of the operation.
    wait : int
        Tells this wait from the member's others.
    exchange : bool
        Whether it is one of the team's own, after which it can make nothing any more.
    """

    operation: int
    number: int
    hash: int
    wait: int
    exchange: bool = False


class _Wait:
    """One wait of a member, and its looks."""

    __slots__ = ("at", "looks", "post", "text")

    def __init__(self, post: Post, text: str) -> None:
        self.post = post
        self.text = text
        self.looks = 0
        self.at = 0.0


def out_of_step(posts: Sequence[Post]) -> int:
    """Return the number of the operation in which members wait that differ; 0: of none.

    Local: a pure function. Members that make the same calls in the same order are in the same
    operation at the same number, so those that are at different ones are only late.
    """
    running = all(post.operation for post in posts)
    numbers = {post.operation if running else post.number for post in posts}
    if len(numbers) > 1 or len({post.hash for post in posts}) == 1:
        return 0
    return numbers.pop()


class Ledger:
    """The side of one process.

    Local: `look` and `receive` return the messages to be sent.

    Parameters
    ----------
    members : sequence of sequence of int
        The members of each process, all of them once.
    here : int
        This process. The first one leads.
    say : function
        Makes the error's text of the members' texts and the number of the operation.
    """

    def __init__(
        self,
        members: Sequence[Sequence[int]],
        here: int,
        say: Callable[[Sequence[str], int], str],
    ) -> None:
        self._members = members
        self._here = here
        self._say = say
        self._waits: dict[int, dict[int, _Wait]] = {member: {} for member in members[here]}
        self._asked = 0  # the question that is to be answered, if any
        self._wants_text = False
        self._since: dict[int, int] = {}  # wait -> looks when it was asked
        self._answered: tuple[int, frozenset[int]] = 0, frozenset()
        self._sure = False
        self._verdict: tuple[str, bool, frozenset[int]] = "", False, frozenset()
        self._lead = _Lead(members, say) if here == 0 else None

    def look(self, member: int, post: Post, text: str, now: float) -> _Outgoing:
        """Note that a member waits, as it has just found.

        Parameters
        ----------
        member : int
            One of this process.
        post : Post
            Its wait.
        text : str
            `mpiml.collectives.labels.Label.text`.
        now : float
            The time in seconds.
        """
        waits = self._waits[member]
        wait = waits.get(post.wait)
        if wait is None:
            wait = waits[post.wait] = _Wait(post, text)
        wait.looks += 1
        wait.at = now
        for number in [n for n, w in waits.items() if now - w.at > _ACTIVE]:
            del waits[number]
        out: _Outgoing = []
        if self._lead is not None:
            self._post(self._lead.begin(), out)
        self._answer(out)
        return out

    def receive(self, process: int, message: bytes) -> _Outgoing:
        """Take in what another process has said."""
        out: _Outgoing = []
        self._take(process, json.loads(message), out)
        return out

    def ended(self, post: Post) -> tuple[str, bool] | None:
        """Return the error that ends a wait, and whether the team can make nothing after it."""
        text, exchange, waits = self._verdict
        return (text, exchange) if post.wait in waits else None

    def suspects(self, post: Post) -> bool:
        """Tell whether the error that ends a wait may be on its way."""
        return self._sure and post.wait in self._answered[1]

    def _post(self, messages: list[tuple[int, list[Any]]], out: _Outgoing) -> None:
        for process, message in messages:
            if process == self._here:
                self._take(process, message, out)
            else:
                out.append((process, json.dumps(message).encode()))

    def _take(self, process: int, message: list[Any], out: _Outgoing) -> None:
        kind, round_, *more = message
        if kind == "ask":
            self._asked = round_
            (self._wants_text,) = more
            self._since = {n: w.looks for ws in self._waits.values() for n, w in ws.items()}
        elif kind == "state" and self._lead is not None:
            posts = {member: (Post(*post), text) for member, post, text in more[0]}
            self._post(self._lead.take(process, round_, posts), out)
        elif kind == "verdict" and round_ == self._answered[0]:
            self._verdict = more[0], more[1], self._answered[1]

    def _answer(self, out: _Outgoing) -> None:
        """Answer the question, if all members have been found waiting since."""
        if not self._asked:
            return
        found = []
        for member, waits in self._waits.items():
            if not waits:
                return
            # Two threads may wait; what was begun first is what all others wait for.
            wait = min(waits.values(), key=lambda w: w.post.number)
            if wait.looks < self._since.get(wait.post.wait, 0) + _TWICE:
                return
            found.append((member, wait.post, wait.text if self._wants_text else ""))
        round_, self._asked = self._asked, 0
        self._answered = round_, frozenset(post.wait for _, post, _ in found)
        self._sure = self._wants_text
        self._post([(0, ["state", round_, found])], out)


class _Lead:
    """What the first process does besides: asks, compares, tells."""

    def __init__(
        self, members: Sequence[Sequence[int]], say: Callable[[Sequence[str], int], str]
    ) -> None:
        self._members = members
        self._say = say
        self._round = 0
        self._running = False
        self._owes: set[int] = set()  # processes that have not answered: one question each
        self._states: dict[int, Mapping[int, tuple[Post, str]]] = {}
        self._last: list[Post] | None = None  # found out of step, to be found so again
        self._pause = 0
        self._rest = 0

    def begin(self) -> list[tuple[int, list[Any]]]:
        """Begin to ask, unless that goes on, or has been found useless just now."""
        if self._running:
            return []
        if self._rest:
            self._rest -= 1
            return []
        self._round += 1
        self._running = True
        self._states = {}
        return self._ask([p for p in range(len(self._members)) if p not in self._owes])

    def _ask(self, processes: Sequence[int]) -> list[tuple[int, list[Any]]]:
        self._owes.update(processes)
        message = ["ask", self._round, self._last is not None]
        return [(process, message) for process in processes]

    def take(
        self, process: int, round_: int, posts: Mapping[int, tuple[Post, str]]
    ) -> list[tuple[int, list[Any]]]:
        """Take an answer in; return what there is to say."""
        self._owes.discard(process)
        if not self._running:
            return []
        if round_ != self._round:
            return self._ask([process])
        self._states[process] = posts
        if len(self._states) < len(self._members):
            return []
        return self._judge()

    def _judge(self) -> list[tuple[int, list[Any]]]:
        self._running = False
        said = {
            member: each for state in self._states.values() for member, each in state.items()
        }
        posts, texts = zip(*[said[member] for member in sorted(said)], strict=True)
        number = out_of_step(posts)
        if not number:
            self._last = None
            self._pause = self._rest = min(2 * self._pause + 2, _PAUSE)
            return []
        self._pause = 0
        if list(posts) != self._last:
            self._last = list(posts)
            return self.begin()
        self._last = None
        exchange = any(post.exchange for post in posts)
        message = ["verdict", self._round, self._say(texts, number), exchange]
        return [(process, message) for process in range(len(self._members))]
