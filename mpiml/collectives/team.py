"""The members of a collective: who they are, where they live, how they agree.

Members are the replicas of a role or the ranks of a communicator. Several may be threads of
one process, several processes share a host. What is agreed goes through the process's `Room`
first and then, by one thread of each process, through MPI.
"""

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from mpiml import threads
from mpiml.collectives.desk import Look
from mpiml.collectives.funneled import FunneledWorker
from mpiml.collectives.labels import kind_of, mismatch
from mpiml.collectives.messages import Waiting, exchange_bytes
from mpiml.collectives.notes import BROKEN
from mpiml.collectives.requests import Request, Worker
from mpiml.collectives.room import Room
from mpiml.errors import MpimlError, RankFailedError, ServiceGoneError, UsageError

__all__ = ["Hooks", "PlainHooks", "Team"]


_DIFFER: Final = object()  # made of an exchange in which members are not in the same call


class Hooks(Protocol):
    """What the program around a team has a say in."""

    def begin(self, label: Any) -> None:
        """Enter a collective on the calling thread; may raise what ends the body."""

    def end(self) -> None:
        """Leave it, done."""

    def waiting(self, seconds: float, missing: Sequence[int], label: Any) -> None:
        """Look around while members are missing; ends the wait by raising."""


class PlainHooks:
    """Of MPI code that is no program of mpiml: warns once about who is missing.

    Parameters
    ----------
    names : sequence of str
        How a message calls each member.
    pids : sequence of int
        Process of each member of this host, 0 for the others.
    stall : float
        Seconds after which it warns.
    """

    def __init__(self, names: Sequence[str], pids: Sequence[int], stall: float) -> None:
        self._names = names
        self._pids = pids
        self._stall = stall
        self._wait = threading.local()  # a wait is a thread's: its age, whether it has warned

    def begin(self, label: Any) -> None:
        """Nothing is asked of plain MPI code."""

    def end(self) -> None:
        """Nothing."""

    def waiting(self, seconds: float, missing: Sequence[int], label: Any) -> None:
        """Warn after `stall` seconds, once for each operation; raise when one has died."""
        wait = self._wait
        if seconds < getattr(wait, "seen", 0.0):
            wait.warned = False  # another wait than the one before
        wait.seen = seconds
        if seconds < 0.5:
            return
        for member in missing:
            pid = self._pids[member]
            if pid and not _alive(pid):
                raise RankFailedError(
                    f"{label}: {self._names[member]} (process {pid}) has ended and will never "
                    "come. Look for its own error above.",
                    (member,),
                )
        if seconds >= self._stall and not getattr(wait, "warned", False):
            wait.warned = True
            who = ", ".join(self._names[m] for m in missing) or "other members"
            sys.stderr.write(
                f"mpiml: {label}: waiting for {who} since {seconds:.0f} s "
                "(MPIML_STALL_WARNING sets when this is said)\n"
            )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as file:  # a zombie has ended too
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except ProcessLookupError:
        return False
    except OSError:
        return True


class Team:
    """The members of a collective, as one of them sees them.

    Collective over the members: `exchange`, `share`.

    Parameters
    ----------
    index : int
        This member.
    ranks : sequence of int
        For each member the rank, in `comm`, of the process it lives in.
    hosts : sequence of int
        For each member the number of its host.
    comm : mpi4py.MPI.Intracomm or None
        One rank for each process that holds members, for this team alone; None: one process.
    room : Room
        Where the members of this process meet; shared by them.
    names : sequence of str
        How messages call each member: ``"rank 3"``, ``"learner/3"``.
    title : str
        How they call the team.
    hooks : Hooks, optional
        What the program around it has a say in.
    spin_us, yield_us : int
        How long a member spins, and then yields its core, before it sleeps.
    worker : Worker, optional
        What does the operations, if that of another team.

    Attributes
    ----------
    local : tuple of int
        The members on this member's host, ascending.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        hosts: Sequence[int],
        comm: Any,
        room: Room,
        names: Sequence[str],
        title: str = "the communicator",
        hooks: Hooks | None = None,
        spin_us: int = 20,
        yield_us: int = 500,
        worker: Worker | None = None,
    ) -> None:
        self.index = index
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.comm = comm
        self.room = room
        self.names = tuple(names)
        self.title = title
        self.hooks: Hooks = PlainHooks(names, [0] * self.size, 60.0) if hooks is None else hooks
        self.spin_us = spin_us
        self.yield_us = yield_us
        self.rank = ranks[index]
        self.local = tuple(i for i in range(self.size) if hosts[i] == hosts[index])
        self.housemates = tuple(i for i in range(self.size) if ranks[i] == self.rank)
        self.worker = worker or (
            FunneledWorker(title) if comm is not None and threads.funneled() else Worker()
        )
        if type(self.hooks) is PlainHooks:  # which begin and end nothing: one call less
            self.run = self.worker.run  # type: ignore[method-assign]
        self.making = threading.RLock()  # held while `loose` is made
        self.loose: Any = None  # what reduces arrays outside of buckets
        self.kept: dict[Any, Any] = {}  # what else was made for the team, for as long as it is
        self.calls: dict[Any, Any] = {}  # what has been prepared for calls that come again
        self.closed = False  # its communicator has been freed, or MPI has ended
        self._round = False  # between begin_round and end_round
        self._numbers = itertools.count(1)
        self._closing: list[Callable[[], None]] = []
        # Set where messages may be left that nobody will receive: communicators stay, since an
        # MPI gives the next one the same number, and with it these messages.
        self.spoiled = False

    @property
    def in_one_process(self) -> bool:
        """Whether several members of this host are threads of this process."""
        return len(self.housemates) > 1

    @property
    def several_hosts(self) -> bool:
        """Whether members live on different hosts."""
        return len(self.local) < self.size

    def number(self) -> int:
        """Return the number of what this member makes now, from 1: the same on all of them."""
        return next(self._numbers)

    def place(self) -> tuple[int, int]:
        """Return where the calling thread is in the calls of this member: `Worker.place`."""
        return self.worker.place(self._round)

    def waiting(self, label: Any) -> Waiting:
        """Return what a wait of this team calls from time to time."""
        return Waiting(self.hooks, label, Look(self, label))

    def exchange(self, record: bytes, label: Any, alike: bool = True) -> list[bytes]:
        """Give every member the bytes of each.

        Collective over the members.

        Parameters
        ----------
        record : bytes
            Of any length, which may differ.
        label
            What this is for.
        alike : bool
            Whether all must be in the same call, by `mpiml.collectives.labels.kind_of`.

        Raises
        ------
        UsageError
            They are not. On all members.
        ServiceGoneError
            An exchange was left halfway before.
        """
        result: list[bytes] = self.share(record, lambda everyone: everyone, label, alike)
        return result

    def share(
        self,
        record: bytes,
        make: Callable[[list[bytes]], Any],
        label: Any,
        alike: bool = True,
    ) -> Any:
        """Give ``make`` the bytes of each member; return what it made, one for the process.

        Collective over the members. `make` is called by one thread of each process. The rest
        is as for `exchange`.
        """
        self.worker.settle()  # requests under way meet here too
        if self.closed:  # by MPICH too, for what stands on COMM_WORLD, at its end
            raise ServiceGoneError(
                f"{label}: {self.title} is over in this process: it has been freed, MPI "
                "finalised, or the program has ended. Close what was made for it before."
            )
        broken = self.room.shared.get(BROKEN)
        if broken:
            raise ServiceGoneError(f"{label}: members were out of step before: {broken}")
        kind = kind_of(label) if alike else bytes(8)
        waiting = Waiting(self.hooks, label, Look(self, label, exchange=True))
        # who waits for other processes does so for all that are here
        speaks = Waiting(self.hooks, label, Look(self, label, self.housemates, exchange=True))

        def outside(values: Sequence[bytes]) -> Any:
            everyone = self._outside(values, speaks)
            if len({said[:8] for said in everyone}) > 1:
                return _DIFFER
            return make([said[8:] for said in everyone])

        slot = self.housemates.index(self.index)
        try:
            made = self.room.meet(
                slot,
                kind + record,
                outside,
                lambda empty: waiting([self.housemates[i] for i in empty]),
            )
        except UsageError:  # agreed
            raise
        except BaseException as error:  # messages may be under way that nobody will take
            self.room.shared.setdefault(BROKEN, f"{label} ended early: {error!r}")
            raise
        if made is _DIFFER:
            raise self.differ(label)
        return made

    def differ(self, label: Any) -> UsageError:
        """Return the error for members that are in different calls, and meet here.

        Collective over the members.
        """
        text = label.text() if hasattr(label, "text") else f"{label}\n\n"
        said = self.exchange(text.encode("utf-8", "replace"), label, alike=False)
        return mismatch([t.decode("utf-8", "replace") for t in said], self.title, self.index)

    def _outside(self, values: Sequence[bytes], waiting: Waiting) -> list[bytes]:
        """Return the bytes of all members, given those of this process."""
        if self.comm is None or self.comm.size == 1:
            return list(values)
        by_rank = exchange_bytes(self.comm, values, waiting)
        taken = [0] * self.comm.size
        everyone = []
        for rank in self.ranks:
            everyone.append(by_rank[rank][taken[rank]])
            taken[rank] += 1
        return everyone

    def run(self, work: Callable[..., None], label: Any, *arguments: Any) -> None:
        """Do one operation of this member, after those begun before."""
        if self._round:
            self.worker.run(work, label, *arguments)
            return
        self.hooks.begin(label)
        try:
            self.worker.run(work, label, *arguments)
        finally:
            self.hooks.end()

    def submit(self, work: Callable[[], None], label: Any) -> Request:
        """Begin one operation of this member; those of a team are done one after another."""
        if self._round:
            return self.worker.submit(work, label)
        self.hooks.begin(label)
        request = self.worker.submit(work, label)
        self.hooks.end()
        return request

    def begin_round(self, label: Any) -> None:
        """Enter a collective that is made of several operations: no stop comes between them.

        Collective over the members. `end_round` ends it, from whatever thread.
        """
        self.hooks.begin(label)
        self.worker.made += 1
        self._round = True

    def end_round(self) -> None:
        """Leave what `begin_round` has entered."""
        if self._round:
            self._round = False
            self.hooks.end()

    @contextmanager
    def round(self, label: Any) -> Iterator[None]:
        """Let what the block does be one collective, unless it is part of one already."""
        if self._round:
            yield
            return
        self.begin_round(label)
        try:
            yield
        finally:
            self.end_round()

    def closes(self, function: Callable[[], None], early: bool = False) -> None:
        """Call `function` when the team is closed: after those before it, or before them."""
        self._closing.insert(0 if early else len(self._closing), function)

    def close(self) -> None:
        """Let go of what belongs to the team. Local; its communicator is its maker's."""
        self.closed = True
        for function in self._closing:
            function()
        self._closing.clear()
        self.kept.clear()
        self.loose = None
        self.worker.close()

    def agree(self, error: MpimlError | None, label: Any) -> None:
        """Raise on every member if any has an error: the first one's text, with its name.

        Collective over the members.
        """
        said = self.exchange(b"" if error is None else str(error).encode(), label)
        for name, text in zip(self.names, said, strict=True):
            if text:
                if error is not None:
                    raise error
                raise UsageError(f"{text.decode(errors='replace')} (on {name})")

    def __repr__(self) -> str:
        return f"<team of {self.title}: member {self.index} of {self.size}>"
