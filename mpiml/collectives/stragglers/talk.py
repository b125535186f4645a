"""What one member says to the collector and hears of it, and the waits for that."""

import time
from typing import Any, Final, NamedTuple

from mpiml.collectives.labels import Label
from mpiml.collectives.mail import Channel, Parcel, Receiving, Sending
from mpiml.collectives.messages import Waiting
from mpiml.collectives.stragglers.blocks import Blocks
from mpiml.collectives.stragglers.collector import Collector
from mpiml.collectives.stragglers.records import Kind, Record, members_of
from mpiml.errors import DeadlineError, RankFailedError, UsageError

__all__ = ["Result", "Talk", "Watch"]

_ASK: Final = 0.5  # s between two questions about who is waited for
_BLOCKS: Final = 2  # gradients on their way, at most


class Result(NamedTuple):
    """What came of a step."""

    step: int
    used: tuple[int, ...]  #: members whose gradients are in it
    block: Any


class Talk:
    """One member's messages to the collector, and from it. Local.

    Parameters
    ----------
    up, down : Channel
        This member's, to the collector and from it.
    at : int
        The member that collects.
    blocks : Blocks
        Of the arrays.
    collector : Collector or None
        If it is in this process: then this member does its work, too, while it waits.

    Attributes
    ----------
    result : Result or None
        The next one, if it has come. No other is taken in before it is set to None.
    failed : str
        Why there will be no result any more; empty: there will.
    bye : bool
        Whether the collector has said its last word.
    messages, nbytes : int
        What was sent, and the bytes of the bodies.
    """

    def __init__(
        self, up: Channel, down: Channel, at: int, blocks: Blocks, collector: Collector | None
    ) -> None:
        self.collector = collector
        self.at = at
        self.team = up.mail.team
        self.office = up.mail.office
        self.result: Result | None = None
        self.failed = ""
        self.bye = self.leaving = False
        self.messages = self.nbytes = 0
        self._up, self._down, self._blocks = up, down, blocks
        self._receiving: Receiving | None = None
        self._missing: tuple[int, ...] = ()
        self._lost: set[int] = set()
        self._out: list[tuple[Sending, Any]] = []
        self._spares: list[Any] = []

    # -- saying --------------------------------------------------------------------------------

    def send(self, record: Record, block: Any = None) -> None:
        """Begin to send a message; the block is taken back when it is free."""
        self._prune()
        self._out.append((self._up.send(self.at, record.pack(), block), block))
        self.messages += 1
        self.nbytes += self._blocks.nbytes if block is not None else 0

    def spare(self, label: Label, limit: float | None) -> Any:
        """Return memory for a gradient; waits where all there is is on its way."""

        def found() -> bool:
            if self.collector is not None:
                self.collector.turn()
            self._prune()
            busy = sum(block is not None for _, block in self._out)
            return bool(self._spares) or busy < _BLOCKS

        if not found():
            self.office.until(found, Watch(self, label, limit))
        return self._spares.pop() if self._spares else self._blocks.empty()

    def give_back(self, block: Any) -> None:
        """Take memory that was not sent."""
        self._spares.append(block)

    def clear(self) -> None:
        """Let go of memory that is not needed any more."""
        self._prune()
        self._spares.clear()

    def _prune(self) -> None:
        busy = []
        for sending, block in self._out:
            if not sending.test():
                busy.append((sending, block))
            elif block is not None:
                self._spares.append(block)
        self._out = busy

    # -- hearing -------------------------------------------------------------------------------

    def over(self) -> bool:
        """Take in what has come, one result at most; tell whether there is one."""
        if self.collector is not None:
            self.collector.turn()
        while self.result is None and not self.bye:
            if self._receiving is None:
                self._receiving = self._down.receive(self.at, self._into)
            parcel = self._receiving.test()
            if parcel is None:
                break
            self._receiving = None
            self._hear(parcel)
        return self.result is not None

    def dismissed(self) -> bool:
        """Drop what comes; tell whether it was the last."""
        while self.over():
            self.result = None
        return self.bye or bool(self.failed)

    def close(self) -> None:
        """Take in nothing any more; where this member collects, from nobody."""
        if self._receiving is not None:
            self._receiving.leave()
            self._receiving = None
        self._up.close()
        self._down.close()

    def _into(self, source: int, head: bytes, nbytes: int) -> Any:
        return self._blocks.empty() if nbytes >= 0 else None

    def _hear(self, parcel: Parcel) -> None:
        record = Record.unpack(parcel.head)
        if record.kind == Kind.RESULT:
            self.result = Result(record.step, members_of(record.more), parcel.body)
        elif record.kind == Kind.STATE:
            self._missing = members_of(record.more)
        elif record.kind == Kind.FAILED:
            self.failed = record.text
        else:
            self.bye = True

    # -- waiting -------------------------------------------------------------------------------

    def begin_wait(self) -> None:
        """Forget for whom was waited before."""
        self._missing = ()

    @property
    def known(self) -> bool:
        """Whether the collector has said for whom this member waits."""
        return bool(self._missing)

    def waits_for(self, ask: bool) -> tuple[int, ...]:
        """Return for whom this member waits, as far as it knows."""
        me, collects = self.team.index, (self.at,)
        if self.leaving:
            return (
                self.collector.live
                if self.collector is not None and me == self.at
                else collects
            )
        if self.collector is not None:
            self._missing = self.collector.waits_for()
        elif ask:
            self.send(Record(Kind.ASK))
        others = tuple([m for m in self._missing if m != me and m not in self._lost])
        return others or collects

    def find_lost(
        self, missing: tuple[int, ...], seconds: float, label: Any, error: Exception
    ) -> None:
        """Tell the collector which members will not come; raise if it is the collector itself."""
        found = {}
        for member in missing:
            try:
                self.team.hooks.waiting(seconds, (member,), label)
            except (RankFailedError, UsageError) as caught:
                found[member] = caught
        if not found or self.at in found:
            raise error
        for member, why in found.items():
            self._lost.add(member)
            self.send(Record(Kind.LOST, member=member, more=str(why).encode()))


class Watch:
    """What a wait of a member calls from time to time: ends it, and finds out whom it is for.

    Parameters
    ----------
    talk : Talk
        The member's.
    label : Label
        What it waits in.
    limit : float, optional
        When the wait must be over, by `time.monotonic`.
    what : str
        What is waited for, in the message of the deadline.
    """

    def __init__(
        self, talk: Talk, label: Label, limit: float | None = None, what: str = ""
    ) -> None:
        self._talk = talk
        self._label = label
        self._limit = limit
        self._what = what
        self._waiting = Waiting(talk.team.hooks, label)
        self._since = time.monotonic()
        self._asked = 0.0
        talk.begin_wait()

    def __call__(self, _: Any = ()) -> None:
        """Look around.

        Raises
        ------
        DeadlineError
            It has lasted too long; says who is missing.
        RankFailedError, UsageError
            The member that collects will not come.
        """
        talk, now = self._talk, time.monotonic()
        ask = now - self._asked >= _ASK
        missing = talk.waits_for(ask)
        if ask:
            self._asked = now
        try:
            self._waiting(missing)
        except (RankFailedError, UsageError) as error:
            talk.find_lost(missing, now - self._since, self._label, error)
        if self._limit is None or now < self._limit:
            return
        if talk.known or now >= self._limit + _ASK:  # else the answer is on its way
            names, me = talk.team.names, talk.team.index
            who = ", ".join([names[m] for m in missing if m != me]) or "others"
            raise DeadlineError(
                f"{self._label}: {self._what}no result in time; waits for {who}. It goes on: call "
                "again, what was brought to this step counts."
            )
