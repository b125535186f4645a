"""Where the members of a process tell the other processes of their team in what they wait.

Nothing is sent, and nothing is made, before a wait has lasted or the process ends. What is told
goes by notes; `mpiml.collectives.ledger` and `mpiml.collectives.leavers` have what they say.
"""

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

from mpiml.collectives.labels import mismatch
from mpiml.collectives.leavers import PATIENCE, Leavers, is_farewell
from mpiml.collectives.ledger import Ledger, Post
from mpiml.collectives.messages import rest
from mpiml.collectives.notes import BROKEN, DESK, notes_of
from mpiml.config import Config
from mpiml.errors import RankFailedError, ServiceGoneError, UsageError

__all__ = ["Look", "leave"]

_TEXT: Final = 900  # bytes of a text: a message stays so small that sending it waits for nobody
_ERROR: Final = 3000  # and of the error
_HOW: Final = 300  # characters of how a program has ended
_SETTLED: Final = 2.0  # s, that the error is waited for
_STEP: Final = 0.005


class Look:
    """What one wait of a member looks at, once it has lasted.

    Local; called on the thread that waits.

    Parameters
    ----------
    team
        Whose member waits.
    label
        What it waits in.
    members : sequence of int, optional
        All for whom it waits, of this process; the team's by default.
    exchange : bool
        Whether it is one of the team's exchanges.
    """

    __slots__ = (
        "_begun",
        "_desk",
        "_exchange",
        "_label",
        "_members",
        "_post",
        "_since",
        "_team",
        "_text",
    )

    def __init__(
        self, team: Any, label: Any, members: Sequence[int] = (), exchange: bool = False
    ) -> None:
        self._team = team
        self._label = label
        self._members = members or (team.index,)
        self._exchange = exchange
        self._begun = False
        self._since = 0.0
        self._post: Post | None = None
        self._text = ""
        self._desk: _Desk | None = None

    def __call__(self) -> None:
        """Look at the others.

        Raises
        ------
        UsageError
            They wait in other operations, and will never come. On all members.
        ServiceGoneError
            It is an exchange, and a process of the team has ended.
        """
        if not self._begun:
            self._begun = True
            self._since = time.monotonic()
            self._begin()
        if self._post is None or self._desk is None:
            return
        self._desk.look(self._members, self._post, self._text)
        why = self._desk.gone(self._since) if self._exchange else ""
        if why:
            raise ServiceGoneError(
                f"{self._label}: {why}. Every member must make the same collective calls, as often."
            )

    def settle(self) -> None:
        """Wait for the error that may be on its way, where others have left already."""
        if self._post is not None and self._desk is not None:
            self._desk.settle(self._members, self._post, self._text)

    def _begin(self) -> None:
        team, label = self._team, self._label
        self._desk = _desk_of(team)
        if self._desk is None:
            return
        head = getattr(label, "head", None)
        if head is None:
            head = str(label)
            hash_ = int.from_bytes(blake2b(head.encode(), digest_size=8).digest(), "little")
            self._text = f"{head}\n\n"
        else:
            hash_ = label.hash
            self._text = label.text()
        self._text = self._text.encode("utf-8", "replace")[:_TEXT].decode("utf-8", "ignore")
        operation, number = team.place()
        wait = next(self._desk.numbers)
        self._post = Post(operation, number, hash_, wait, self._exchange)


class _Desk:
    """A process's `Ledger`, and its messages."""

    def __init__(self, team: Any) -> None:
        self._notes = notes_of(team)
        self._shared = team.room.shared
        self._lock = threading.Lock()
        self.numbers = itertools.count(1)
        processes = range(1 if self._notes is None else team.comm.size)
        members: list[list[int]] = [[] for _ in processes]
        for member, rank in enumerate(team.ranks):
            members[rank].append(member)
        title = team.title

        def say(texts: Sequence[str], number: int) -> str:
            text = str(mismatch(texts, title, number=number)).encode()
            return text[:_ERROR].decode("utf-8", "ignore")

        self._ledger = Ledger(members, team.rank, say)
        self._here = team.rank
        self._leavers = Leavers(len(processes), self._here)

    def look(self, members: Sequence[int], post: Post, text: str) -> None:
        """Note that members wait; raise the error that ends the wait."""
        with self._lock:
            self._receive()
            now = time.monotonic()
            for member in members:
                self._send(self._ledger.look(member, post, text, now))
            ended = self._ledger.ended(post)
            if ended is None:
                return
            if ended[1]:
                self._shared[BROKEN] = ended[0]
            # What others wait for: it is small, so this takes no time.
            limit = now + _SETTLED
            while self._notes is not None and self._notes.unsent() and time.monotonic() < limit:
                time.sleep(_STEP)
        raise UsageError(ended[0])

    def gone(self, since: float) -> str:
        """Tell who has ended, if that is why a wait for all members cannot end."""
        with self._lock:
            return self._leavers.end(since, time.monotonic())

    def leave(self, how: str, error: BaseException | None, until: float) -> None:
        """Tell the other processes that this one ends; the first waits for those in order."""
        consequence = isinstance(error, ServiceGoneError | RankFailedError)
        with self._lock:
            self._receive()
            self._send(self._leavers.leave(how, error is not None, consequence))
            if error is None and self._here == 0:
                begun = now = time.monotonic()
                while not self._leavers.alone and now < until:
                    rest(now - begun)
                    self._receive()
                    now = time.monotonic()
                self._send(self._leavers.give_up(how))

    def settle(self, members: Sequence[int], post: Post, text: str) -> None:
        """Look until the error has come, if one is to be expected."""
        limit = time.monotonic() + _SETTLED
        while self._suspects(post) and time.monotonic() < limit:
            self.look(members, post, text)
            time.sleep(_STEP)

    def _suspects(self, post: Post) -> bool:
        with self._lock:
            return self._ledger.suspects(post)

    def _send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        if self._notes is not None:
            for process, message in messages:
                self._notes.send(process, DESK, message)

    def _receive(self) -> None:
        if self._notes is None:
            return
        for source, message in self._notes.take(DESK):
            if is_farewell(message):
                self._send(self._leavers.receive(message))
            else:
                self._send(self._ledger.receive(source, message))


def _desk_of(team: Any) -> _Desk | None:
    """Return the desk of this process, made once; None where members compare nothing."""
    desk: _Desk | None = team.room.shared.get("desk")
    if desk is None and Config.read().check:
        desk = team.room.shared.setdefault("desk", _Desk(team))
    return desk


@functools.cache
def _patience() -> float:
    """Return until when this process waits at its end: once for all of its teams."""
    return time.monotonic() + PATIENCE


def leave(team: Any) -> None:
    """Tell the other processes of a team that this one ends, and how. Local."""
    desk = _desk_of(team) if team.comm is not None and team.comm.size > 1 else None
    if desk is None:
        return
    error = sys.exc_info()[1]
    if error is None and not (sys.flags.interactive or hasattr(sys, "ps1")):
        error = getattr(sys, "last_value", None)  # what the interpreter has printed
    how = f"{team.names[team.index]} has ended"
    if error is not None:
        text = f"{type(error).__name__}"
        with contextlib.suppress(Exception):  # of the user's __str__
            text = f"{text}: {error}"
        how = f"{how} with {text[:_HOW]}"
    above = "" if error is None else " (its own traceback is above)"
    desk.leave(f"{how}, and will never come{above}", error, _patience())
