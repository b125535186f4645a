"""Which hosts say nothing: a pure rule, with the clock and what is awaited passed in.

A link that drops packets is no error to TCP for many minutes, and none to MPI. So a rank that
waits for one on another host asks it whether it is there. A program that answers late is not
silent: the answer comes from the engine, which also answers while user code computes.

The time that counts is `Turns`: while this rank itself takes nothing in, an answer may lie there.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["Quiet", "Silence", "Turns"]

_MORE = (
    4  # ranks of a host that are asked besides, to tell a rank that is busy from a lost host
)


class Quiet(NamedTuple):
    """A host of which nothing comes.

    Attributes
    ----------
    host
        Its number.
    silent
        Ranks that have been asked and have not answered.
    answering
        Ranks of the same host that have, meanwhile: then it is not the link.
    seconds
        For how long the first of the silent ones has not answered.
    """

    host: int
    silent: tuple[int, ...]
    answering: tuple[int, ...]
    seconds: float


class Turns:
    """A clock that stands still while this rank takes nothing in, or sends nothing.

    Local: no MPI. With each look the rank sends a message to itself, the way that all messages
    go. The time until the next look counts if that message has come back by then.

    Parameters
    ----------
    longest
        Seconds that count for one look at most: the looks may be late as well.

    Attributes
    ----------
    time
        Seconds that have counted.
    """

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.time = 0.0
        self._sent: float | None = None
        self._back = self._late = False

    def look(self, now: float, needed: bool) -> bool:
        """Count the time since the last look; return whether to send the next message."""
        if self._sent is not None:
            if not self._back:
                self._late = True
                return False
            if not self._late:
                self.time += min(now - self._sent, self.longest)
        self._sent = now if needed else None
        self._back = self._late = False
        return needed

    def back(self) -> None:
        """Note that the message is there."""
        self._back = True


class Silence:
    """Whom one rank has asked whether it is there, and who has not answered.

    Local: no MPI, no clock.

    Parameters
    ----------
    hosts
        The ranks of each host.
    here
        The number of this rank's host, which is never asked.
    patience
        Seconds that an answer may take until a host counts as silent.

    Attributes
    ----------
    beside
        Seconds that an answer may take until others of the host are asked, too.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], here: int, patience: float) -> None:
        self._hosts = hosts
        self._here = here
        self._patience = patience
        self.beside = patience / 4
        self._host_of = {rank: i for i, ranks in enumerate(hosts) for rank in ranks}
        self._asked: dict[int, float] = {}  # rank -> since when its question is open
        self._orders = itertools.count(1)  # the clock may stand: this tells before from after
        self._order: dict[int, int] = {}  # rank -> order of its open question
        self._heard: dict[int, int] = {}  # rank -> order of its last answer
        self._told: dict[int, float] = {}  # host -> since when it is silent, once that was told

    def asks(self, awaited: Collection[int], now: float) -> list[int]:
        """Return the ranks to ask now: those awaited that have no question open.

        Where one is slow to answer, others of its host are asked as well. Nobody is asked twice:
        what is sent over a link arrives, if it comes back.
        """
        found = []
        for rank in sorted(awaited):
            host = self._host_of.get(rank, self._here)  # a guest's rank has none, and no engine
            if host == self._here:
                continue
            if rank not in self._asked:
                found.append(self._open(rank, now))
            elif now - self._asked[rank] >= self.beside:
                others = [r for r in self._hosts[host] if r not in self._asked][:_MORE]
                found += [self._open(other, now) for other in others]
        return found

    def _open(self, rank: int, now: float) -> int:
        self._asked[rank] = now
        self._order[rank] = next(self._orders)
        return rank

    @property
    def open(self) -> set[int]:
        """The ranks that have not answered yet."""
        return set(self._asked)

    def heard(self, rank: int, now: float) -> tuple[int, float] | None:
        """Take an answer in; return a host that was told to be silent, and for how long it was."""
        self._heard[rank] = next(self._orders)
        self._asked.pop(rank, None)
        host = self._host_of[rank]
        if any(r in self._asked for r in self._hosts[host]):
            return None
        since = self._told.pop(host, None)
        return None if since is None else (host, now - since)

    def news(self, awaited: Collection[int], now: float) -> list[Quiet]:
        """Return the hosts that have become silent, each once, while somebody waits for them."""
        found = []
        for quiet in self.silent(now):
            if quiet.host not in self._told and not set(quiet.silent).isdisjoint(awaited):
                self._told[quiet.host] = now - quiet.seconds
                found.append(quiet)
        return found

    def silent(self, now: float, patience: float | None = None) -> list[Quiet]:
        """Return all hosts with ranks that have not answered for `patience` seconds."""
        patience = self._patience if patience is None else patience
        found = []
        for host, ranks in enumerate(self._hosts):
            open_ = [r for r in ranks if r in self._asked]
            since = min((self._asked[r] for r in open_), default=now)
            if not open_ or now - since < patience:
                continue
            first = min(self._order[r] for r in open_)
            quiet = [r for r in open_ if now - self._asked[r] >= min(self.beside, patience)]
            answering = [r for r in ranks if self._heard.get(r, 0) > first and r not in quiet]
            found.append(Quiet(host, tuple(quiet), tuple(answering), now - since))
        return found
