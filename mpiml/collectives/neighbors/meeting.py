"""Meetings of two members at a time: one asks, the other answers, both take the mean.

The one that asks sends its x; the other computes the mean, under its lock, makes it its own x and
sends it back. Nothing else changes the x of who asks meanwhile, so the two steps are one.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np

from mpiml.collectives.labels import Label
from mpiml.collectives.mail import Receiving, mail_of
from mpiml.collectives.messages import Waiting
from mpiml.collectives.neighbors.combining import weighted_sum
from mpiml.collectives.neighbors.snapshots import Snapshots
from mpiml.collectives.onesided.agent import refuse_agents
from mpiml.collectives.over import OVER, THREADED
from mpiml.collectives.regions import Regions, specs_of
from mpiml.collectives.team import Team
from mpiml.collectives.trees import host_array
from mpiml.errors import ServiceGoneError
from mpiml.topology import ActivePassive

__all__ = ["Answering", "Asking", "Shared"]

_JOIN: Final = 5.0  # s that a thread has to end


class Shared:
    """A member's x, which two of its threads use.

    Attributes
    ----------
    memory : ndarray
        All of it. (n,) uint8.
    flat : list of ndarray
        The numbers, those of one dtype together. (n,) each.
    leaves : list of ndarray
        The same as arrays like the parameters.
    parts : function
        Returns what `flat` is, of another block of that layout.
    lock : threading.Lock
        Held while it is changed, never while somebody is waited for.
    meetings : int
        How many have been held.
    """

    def __init__(self, params: Sequence[Any], paths: Sequence[str]) -> None:
        regions = Regions(specs_of(params, paths))
        self.memory = np.zeros(regions.nbytes, np.uint8)
        self.leaves = regions.views(self.memory)
        self.parts = regions.flat
        self.flat = self.parts(self.memory)
        self.lock = threading.Lock()
        self.meetings = 0
        for x, leaf in zip(self.leaves, params, strict=True):
            x[...] = host_array(leaf)


class _Thread:
    """The thread of one member, which holds its meetings.

    Parameters
    ----------
    team : Team
        The members.
    shared : Shared
        This one's x.
    sides : ActivePassive
        Who asks whom.
    """

    def __init__(self, team: Team, shared: Shared, sides: ActivePassive) -> None:
        refuse_agents(team, "AD-PSGD", "Use SGP or PairGossip.")
        self._team = team
        self._shared = shared
        self._sides = sides
        mail = mail_of(team)
        self._office = mail.office
        self._asks = mail.open("asking for a mean")
        self._answers = mail.open("answering with a mean")
        self._closing = False
        self._go = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mpiml meetings", daemon=True)
        self._office.guests.append(self.close)
        THREADED.add(self)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the member's own thread raises it
            self._error = error
        self._office.tell()

    def _work(self) -> None:
        raise NotImplementedError

    def _look(self, _: Any = ()) -> None:
        """End a wait of the thread when all is over."""
        if OVER:
            raise OVER[0]

    def _next(self, receiving: Receiving) -> Any:
        """Return a message; or None: it is not there; or True: all is over."""
        return self._closing or receiving.test(look=False)

    def _check(self, label: Any) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise ServiceGoneError(f"{label}: the program has ended, and its meetings with it")

    def close(self) -> bool:
        """End the thread, and what it has kept; return whether nothing is on its way. Local."""
        self._closing = True
        self._go.set()
        self._office.tell()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN)
        if self._thread.is_alive():
            return False
        self._asks.close()
        self._answers.close()
        with suppress(ValueError):
            self._office.guests.remove(self.close)
        return self._settled()

    def _settled(self) -> bool:
        """Let go of what has been sent; return whether nothing is on its way."""
        return True


class Asking(_Thread):
    """That of an active member: holds one meeting after each `resume`."""

    def __init__(self, team: Team, shared: Shared, sides: ActivePassive) -> None:
        super().__init__(team, shared, sides)
        self._wanted = self._held = 0
        self._sent = np.empty_like(shared.memory)
        self._came = np.empty_like(shared.memory)
        self._thread.start()

    def resume(self) -> None:
        """Begin the next meeting."""
        self._wanted += 1
        self._go.set()

    def pause(self, label: Label) -> None:
        """Wait until the meeting under way is over: x is this thread's own until `resume`."""

        def over() -> bool:
            return self._error is not None or self._closing or self._held == self._wanted

        self._office.until(over, Waiting(self._team.hooks, label), self._peers())
        self._check(label)

    def _peers(self) -> tuple[int, ...]:
        peer = self._sides.peer(self._team.index, max(self._wanted - 1, 0))
        return () if peer is None else (peer,)

    def _work(self) -> None:
        label = Label("ADPSGD, asking a neighbour")
        while True:
            self._go.wait(1.0)
            self._look()
            if self._closing:
                return
            if self._held == self._wanted:
                self._go.clear()
                if self._held == self._wanted:
                    continue
            peer = self._sides.peer(self._team.index, self._held)
            if peer is not None:
                self._meet(peer, Waiting(self._team.hooks, label))
            self._held += 1
            self._office.tell()

    def _meet(self, peer: int, waiting: Waiting) -> None:
        shared = self._shared
        with shared.lock:
            self._sent[:] = shared.memory
        sending = self._asks.send(peer, b"", self._sent)
        receiving = self._answers.receive(peer, self._came)
        found = self._office.until(partial(self._next, receiving), waiting, (peer,), True)
        if found is True:
            receiving.leave()
            return
        sending.wait(waiting)
        with shared.lock:
            shared.memory[:] = self._came
            shared.meetings += 1


class Answering(_Thread):
    """That of a passive member: answers whoever asks, until it is closed."""

    def __init__(self, team: Team, shared: Shared, sides: ActivePassive) -> None:
        super().__init__(team, shared, sides)
        self._snapshots = Snapshots(self._office)
        self._thread.start()

    def resume(self) -> None:
        """Nothing: it answers all the time."""

    def pause(self, label: Label) -> None:
        """Look whether it still does. It waits for nobody."""
        self._check(label)

    def _settled(self) -> bool:
        return self._snapshots.close()

    def _work(self) -> None:
        shared = self._shared
        came = np.empty_like(shared.memory)
        while not self._closing:
            ask = self._asks.receive(None, came)
            parcel = self._office.until(partial(self._next, ask), self._look, (), True)
            if parcel is True:
                ask.leave()
                return
            answer = self._snapshots.take(shared.memory.nbytes)
            theirs, mean = shared.parts(came), shared.parts(answer.memory)
            with shared.lock:
                for own, other, out in zip(shared.flat, theirs, mean, strict=True):
                    weighted_sum([own, other], [0.5, 0.5], out)
                shared.memory[:] = answer.memory
                shared.meetings += 1
            answer.sendings.append(self._answers.send(parcel.source, b"", answer.memory))
            self._snapshots.let_fly(answer)
