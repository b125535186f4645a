"""One member's part in steps that do not wait for all: what coded and backup gradients share."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Self

from mpiml.collectives.alike import agree_on
from mpiml.collectives.labels import Label
from mpiml.collectives.mail import mail_of
from mpiml.collectives.members import team_of
from mpiml.collectives.onesided.agent import agent_of, refuse_agents
from mpiml.collectives.stragglers.blocks import Blocks
from mpiml.collectives.stragglers.collector import Collector
from mpiml.collectives.stragglers.records import Kind, Record
from mpiml.collectives.stragglers.rules import Pace, Rule
from mpiml.collectives.stragglers.talk import Talk, Watch
from mpiml.errors import ServiceGoneError, UsageError
from mpiml.whole import whole_number

__all__ = ["Gathered"]

_SAME = (
    "arguments and arrays",
    "Build it the same way on every member, with a tree of the same shapes and dtypes.",
)


class Gathered(ABC):
    """Gradients of which not all are waited for.

    Collective over the members: construction.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        Whose ranks are the members; None: the replicas of the role of this node.
    like : tree of ndarrays
        Structure, shapes and dtypes.
    slack : int
        How many steps others may be ahead of a member.
    at : int
        The member that collects.
    step : int
        Number of the first step.
    name : str, optional
        What messages call it. Compared among the members.
    """

    where: ClassVar[str]  #: opens messages

    def __init__(
        self, comm: Any, like: Any, slack: int, at: int, step: int, name: str | None
    ) -> None:
        self._team = team = team_of(comm, self.where)
        self._name = name
        self._closed = False
        self._ended = False  # the mail has closed
        self._agent: Any = None
        label = Label(self.where, name=name)
        error: Exception | None = None
        said = text = ""
        try:
            said = self._check(like, slack, at, step)
            text = self._blocks.text
        except Exception as caught:  # the others must hear of it
            error = caught
        with team.round(label):
            agree_on(team, label.head, said, error, *_SAME, label, text)
            self._connect(label)
        self._step = self._first = self.step
        self._sent = self._step - 1  # the newest step that something was sent for
        self._used: tuple[int, ...] = ()
        self._unused = [0] * team.size
        self._counted = self._dropped = self._skipped = 0

    def _check(self, like: Any, slack: int, at: int, step: int) -> str:
        """Check what construction was given; return what members compare. Local."""
        where = self.where
        if like is None:
            raise UsageError(
                f"{where}: like: expected a tree of arrays like the gradients, got None"
            )
        self._blocks = Blocks(like, f"{where}: like")
        self._slack = whole_number(f"{where}: slack", slack, 1)
        self._at = whole_number(f"{where}: at", at, 0, self._team.size - 1)
        self.step = whole_number(f"{where}: step", step, 0)  #: the first
        more = "".join([f"\n{name}={value}" for name, value in self._compared().items()])
        return f"slack={self._slack}\nat={self._at}\nstep={self.step}{more}"

    def _connect(self, label: Label) -> None:
        """Open the channels, and make the collector. Collective over the members."""
        team = self._team
        refuse_agents(team, self.where, "Use allreduce.")
        self._key = key = (self.where, team.number())
        mail = mail_of(team)
        up = mail.open(f"{label.head}: gradients")
        down = mail.open(f"{label.head}: results")
        shared = team.room.shared
        if team.index == self._at:
            pace = Pace(team.size, self._slack, self.step)
            rule = self._rule(self.step)
            collector = Collector(rule, pace, self._blocks, up, down, label.head)
            shared[key] = collector
            if mail.office.outside:  # else whoever waits is here
                self._agent = agent_of(team)
                self._agent.add(collector.turn)
        team.exchange(b"", label)  # now it is there
        self._collector: Collector | None = shared.get(key)
        self._talk = Talk(up, down, self._at, self._blocks, self._collector)
        mail.office.guests.append(self._withdraw)

    # -- what a kind of them says of itself ----------------------------------------------------

    @abstractmethod
    def _compared(self) -> dict[str, Any]:
        """Return what else members compare; refuse what cannot be. Local."""

    @abstractmethod
    def _rule(self, step: int) -> Rule:
        """Return what the collector decides by. Local."""

    # -- a step --------------------------------------------------------------------------------

    @property
    def members(self) -> int:
        """How many members there are."""
        return self._team.size

    @property
    def steps(self) -> int:
        """Number of the next step: that of the first, and one more for each that is done."""
        return self._step

    @property
    def used(self) -> tuple[int, ...]:
        """Members whose gradients are in the last result, ascending; the same on all."""
        return self._used

    @property
    def late(self) -> bool:
        """Whether the next step is over: its result is here, and gradients would be dropped."""
        self._check_open("late")
        return self._talk.over()

    def _gather(self, call: str, make: Callable[[], Any], timeout: float | None) -> Any:
        """Bring the tree that `make` returns, unless it is too late; return the result."""
        self._check_open(call)
        limit = _limit(timeout, f"{self.where}.{call}")
        label = Label(f"{self.where}.{call}", name=self._name)
        talk, block = self._talk, None
        if self._sent < self._step and not talk.over():
            self._check_going()
            block = talk.spare(label, limit)
            self._blocks.fill(make(), block, f"{self.where}.{call}")
            if talk.over():  # it was computed in vain
                talk.give_back(block)
                block = None
        self._team.run(self._exchange, label, block, label, limit)
        assert talk.result is not None
        (step, used, memory), talk.result = talk.result, None
        self._count(step, used)
        talk.send(Record(Kind.TOOK, step))
        return self._blocks.tree(memory)

    def _exchange(self, block: Any, label: Label, limit: float | None) -> None:
        if block is not None:
            self._talk.send(Record(Kind.GRADIENT, self._step), block)
            self._sent = self._step
        if not self._there():
            watch = Watch(self._talk, label, limit, f"step {self._step}: ")
            self._talk.office.until(self._there, watch)

    def _there(self) -> bool:
        there = self._talk.over()
        if not there:
            self._check_going()
        return there

    def _check_going(self) -> None:
        if self._talk.failed:
            raise ServiceGoneError(self._talk.failed)

    def _count(self, step: int, used: tuple[int, ...]) -> None:
        self._step, self._used = step + 1, used
        mine = self._team.index in used
        self._counted += mine
        self._dropped += self._sent == step and not mine
        self._skipped += self._sent < step
        for member in range(self._team.size):
            self._unused[member] += member not in used

    # -- its end -------------------------------------------------------------------------------

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ServiceGoneError(
                f"{self.where}.{call}: it is closed; use it before close(), or make another on all "
                "members"
            )

    def close(self) -> None:
        """Take part no more.

        Call it on every member, or use ``with``. The others go on without this member as far
        as they can; on the member that collects this waits until all others have closed.
        """
        if self._closed:
            return
        self._closed = self._talk.leaving = True
        if self._ended:
            return
        if self._talk.failed:
            self._end()
            return
        label, why = Label(f"{self.where}.close", name=self._name), "it has closed"
        until, watch = self._talk.office.until, Watch(self._talk, label)
        if self._team.index == self._at:
            assert self._collector is not None
            self._collector.leave(self._at, why)
            until(self._alone, watch)
        else:
            text = f"{why} after step {self._step - 1}"
            self._talk.send(Record(Kind.GONE, more=text.encode()))
            until(self._talk.dismissed, watch)
        self._end()

    def _end(self) -> None:
        """Let go of everything: nobody waits for this member any more."""
        self._talk.clear()
        self._withdraw()
        self._talk.close()
        with suppress(ValueError):
            self._talk.office.guests.remove(self._withdraw)

    def _alone(self) -> bool:
        """Tell whether all have left."""
        assert self._collector is not None
        self._talk.dismissed()
        return self._collector.quiet() or bool(self._collector.failed)

    def _abandon(self, why: str) -> None:
        """Leave because of an error: tell the others, and wait for nobody."""
        if self._closed:
            return
        self._closed = self._talk.leaving = True
        if self._ended:
            return
        if self._team.index == self._at:
            assert self._collector is not None
            name = self._team.names[self._at]
            self._collector.fail(f"{self.where}: {name}, which collects, has left: {why}")
            self._collector.leave(self._at, why)
        elif not self._talk.failed:
            record = Record(Kind.LOST, member=self._team.index, more=why.encode())
            self._talk.send(record)
        self._end()

    def _withdraw(self) -> bool:
        """Have no part in the agent's work any more; tell whether nothing is on its way."""
        self._ended = True
        if self._collector is None or self._team.index != self._at:
            return True
        self._team.room.shared.pop(self._key, None)
        if self._agent is not None:
            self._agent.remove(self._collector.turn)
        return self._collector.settled()

    def statistics(self) -> dict[str, Any]:
        """Return what this member did since construction, for logs.

        Returns
        -------
        dict
            ``"steps"``; of these ``"used"``, in which its gradients are in the result,
            ``"dropped"``, for which they were sent in vain, and ``"skipped"``, whose result
            was there before; ``"unused"``, for each member the steps without its gradients;
            ``"messages"`` and ``"bytes"`` sent, the collector's too where it is here.
        """
        here = self._collector if self._team.index == self._at else None
        return {
            "members": self._team.size,
            "steps": self._step - self._first,
            "used": self._counted,
            "dropped": self._dropped,
            "skipped": self._skipped,
            "unused": tuple(self._unused),
            "messages": self._talk.messages + (here.messages if here is not None else 0),
            "bytes": self._talk.nbytes + (here.nbytes if here is not None else 0),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon(f"{kind.__name__}: {value}")

    def __repr__(self) -> str:
        return (
            f"<{self.where}, step {self._step}, member {self._team.index} of {self._team.size}>"
        )


def _limit(timeout: float | None, where: str) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise UsageError(f"{where}: timeout: expected seconds > 0, or None, got {timeout!r}")
    return time.monotonic() + timeout
