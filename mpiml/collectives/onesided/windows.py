"""Reading the memory of another host: by an MPI window, or by asking the member that serves it.

A window is tried before it is used. MPI libraries have returned wrong data for some sizes, or
refused windows in some set-ups (BlueFog #42, Open MPI #2614), so the self-test reads 1, 10³, 10⁴
and 10⁶ numbers from another process and compares them; should a process see anything but these,
all read by messages. ``MPIML_ONESIDED`` decides instead.

Only reads go through the window, with passive target synchronisation: `MPI_Rget` within
`MPI_Win_lock_all`, so that a wait can be ended, in pieces of at most 1 MiB.
"""

import contextlib
import functools
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from mpiml.collectives.messages import Waiting, complete, keep, rest
from mpiml.collectives.onesided.links import Link
from mpiml.collectives.onesided.memory import HostMemory
from mpiml.collectives.onesided.records import LOOKS
from mpiml.collectives.over import LAST
from mpiml.collectives.team import Team
from mpiml.config import Config

__all__ = ["SIZES", "ByMessages", "ByWindow", "Opened", "Reads", "open_windows"]

SIZES: Final = (1, 1_000, 10_000, 1_000_000)  #: elements of the self-test
_PIECE: Final = 1 << 20  # bytes of a transfer
_QUICK: Final = 100  # tests of a request before the core is given away between two
_LATE: Final = 1.5e-4  # s, after which a read seems to need the help of the other process
_LAST: Final = 5.0  # s, that others have to come to freeing a window where the process ends
_SLOW: Final = 20.0  # s, after which a read of the self-test has failed
_KEY: Final = "windows work"
_ENDS: Final = "where processes with windows meet at their end"


class Reads(Protocol):
    """Reads bytes of another host's memory."""

    def read(self, parts: Sequence[tuple[int, Any]], label: Any) -> None:
        """Copy parts of the memory: from a byte on, into a buffer. Local."""


class ByMessages:
    """Asks the member that serves the memory. Local: no window."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def read(self, parts: Sequence[tuple[int, Any]], label: Any) -> None:
        """Copy parts of the memory."""
        self._link.read(parts)


class ByWindow:
    """Reads by MPI's one-sided communication.

    Parameters
    ----------
    window : mpi4py.MPI.Win
        Over the memory of each host, in the process that serves it; within `Lock_all`.
    team : Team
        The members.
    rank : int
        The process that serves the memory which is read.
    link : Link
        Tells that process to look more often, where reads need its help: many MPI libraries
        answer a read only within a call of MPI of the process whose memory it is.
    """

    def __init__(self, window: Any, team: Team, rank: int, link: Link) -> None:
        from mpi4py import MPI

        self._window = window
        self._team = team
        self._rank = rank
        self._link = link
        self._byte = MPI.BYTE
        self._helped = 0.0  # when the process was last told to look

    def read(self, parts: Sequence[tuple[int, Any]], label: Any) -> None:
        """Copy parts of the memory; raises what ends waits of the team."""
        window, rank, byte = self._window, self._rank, self._byte
        if len(parts) == 1 and len(parts[0][1]) <= _PIECE:  # the usual case, and in a hurry
            ((first, out),) = parts
            count = len(out)
            request = window.Rget((out, count, byte), rank, (first, count, byte))
            for _ in range(_QUICK):
                if request.Test():
                    return
            self._finish([request], parts, label)
            return
        requests = []
        for first, out in parts:
            for at in range(0, len(out), _PIECE):
                piece = out[at : at + _PIECE]
                count = len(piece)
                requests.append(
                    window.Rget((piece, count, byte), rank, (first + at, count, byte))
                )
        if requests:
            self._finish(requests, parts, label)

    def _finish(self, requests: list[Any], parts: Any, label: Any) -> None:
        begun = time.monotonic()
        try:
            while not requests[-1].Test():
                rest(0.0)
                if time.monotonic() - begun > _LATE:
                    self._tell()
                    break
            waiting: Any = None
            for request in requests:
                if not request.Test():
                    waiting = waiting or self._team.waiting(label)
                    complete(request, waiting)
        except BaseException:
            keep((requests, parts))
            raise

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._helped > LOOKS / 2:
            self._helped = now
            self._link.look()


class Opened:
    """The way to the memory of other hosts, once all have agreed on one.

    Attributes
    ----------
    way : str
        How memory is read, and why so.
    """

    def __init__(self, team: Team, window: Any, free: Callable[[], None], why: str) -> None:
        self._team = team
        self._window = window
        self.close = free  #: collective over the processes
        self.way = f"messages: {why}" if window is None else "MPI windows"

    def reads(self, leader: int, link: Link) -> Reads:
        """Return what reads the memory that a member serves, to whom a link leads. Local."""
        if self._window is None:
            return ByMessages(link)
        return ByWindow(self._window, self._team, self._team.ranks[leader], link)


def open_windows(memory: HostMemory, label: Any) -> Opened:
    """Open the memory of each host to the others. Collective over the members."""
    team = memory.team
    why = _why_not(team, label)
    if why:
        return Opened(team, None, lambda: None, why)
    said = team.exchange(b"1" if team.index == memory.leader else b"", label)
    served = any(said[member] for member in team.housemates)

    def make(_: list[bytes]) -> tuple[Any, str]:
        return _made(team, memory.memory if served else None, team.waiting(label))

    window, wrong = team.share(b"", make, label)
    if wrong:
        return Opened(team, None, lambda: None, f"a window was refused: {wrong}")
    return Opened(team, window, lambda: _windows().free(window), "")


def _made(team: Team, memory: Any, waiting: Waiting) -> tuple[Any, str]:
    """Return a window over memory of this process, locked; or what is wrong on some process.

    Collective over the processes: all have one, or none.
    """
    from mpi4py import MPI

    window, wrong = None, ""
    try:
        window = _create(memory, team.comm)
        window.Lock_all(MPI.MODE_NOCHECK)
    except MPI.Exception as error:
        wrong = str(error)
    if _anyone(team, bool(wrong), waiting):
        if window is not None:
            keep((window, memory))  # freeing is collective, and not all have one
        return None, wrong or "on another process"
    _windows().add(window, team)
    return window, ""


def _create(memory: Any, comm: Any) -> Any:
    from mpi4py import MPI

    return MPI.Win.Create(memory, 1, comm=comm)


def _anyone(team: Team, here: bool, waiting: Waiting) -> bool:
    """Tell whether something holds on any process. Collective over the processes."""
    from mpi4py import MPI

    found = bytearray(1)
    own = [bytes([here]), MPI.UINT8_T]
    complete(team.comm.Iallreduce(own, [found, MPI.UINT8_T], MPI.MAX), waiting)
    return bool(found[0])


class _Windows:
    """The windows of this process that are open, to be freed at its end if nobody does before.

    Freeing is collective, so it is done only where all processes come to it in time.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[Any, Team]] = {}
        LAST.append(self.free_all)

    def add(self, window: Any, team: Team) -> None:
        """Note an open window; it is freed with its team, if it is not before.

        Collective over the processes, the first time: they get a communicator to meet on at
        their end, since some may be in an operation on the team's. Which member of a process
        notes a window is chance, so what counts is in the room that they share.
        """
        self._open[id(window)] = window, team
        if _ENDS not in team.room.shared:
            from mpiml.world import own_duplicate

            team.room.shared[_ENDS] = own_duplicate(team.comm, f"mpiml windows of {team.title}")
            team.closes(lambda: self.free_of(team), early=True)

    def free(self, window: Any) -> None:
        """Free it, once. Collective over its processes."""
        from mpi4py import MPI

        _, team = self._open.pop(id(window), (None, None))
        if team is not None and not team.spoiled and not MPI.Is_finalized():
            window.Unlock_all()
            window.Free()

    def forget(self, window: Any) -> None:
        """Never free it: somebody waits in it."""
        self._open.pop(id(window), None)
        keep(window)

    def free_of(self, team: Team) -> None:
        """Free those of a team, in the order in which they were made. Collective."""
        from mpi4py import MPI

        for window, its in list(self._open.values()):
            if its.room is team.room:
                self.free(window)
        ends = team.room.shared.pop(_ENDS, None)
        if ends is not None and not team.spoiled and not MPI.Is_finalized():
            ends.Free()

    def free_all(self) -> None:
        """Free what is left; give up where others do not come.

        They meet twice: whoever has given up the first time does not come to the second, so
        that nobody frees a window alone.
        """
        from mpi4py import MPI

        for window, team in list(self._open.values()):
            ends = team.room.shared.get(_ENDS)
            if MPI.Is_finalized() or ends is None or not (_met(ends) and _met(ends)):
                return
            self.free(window)


def _met(comm: Any) -> bool:
    """Wait for all processes of a communicator, not for long; tell whether they have come."""
    request = comm.Ibarrier()
    begun = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - begun
        if waited > _LAST:
            keep(request)
            return False
        rest(waited)
    return True


@functools.cache  # made once MPI is there
def _windows() -> _Windows:
    return _Windows()


# -- the self-test -----------------------------------------------------------------------------


def _why_not(team: Team, label: Any) -> str:
    """Return why no window is used, or nothing; the same on all members. Collective."""
    known: str | None = team.room.shared.get(_KEY)
    if known is not None:
        return known
    asked = team.exchange(Config.read().onesided.encode(), label)
    if b"messages" in asked:
        why = "as MPIML_ONESIDED=messages says"
    elif b"windows" in asked:
        why = ""
    else:
        own = team.share(b"", lambda _: _try(team, team.waiting(label)), label)
        said = team.exchange(own.encode(), label)
        wrong = next((i for i, text in enumerate(said) if text), None)
        why = ""
        if wrong is not None:
            text = said[wrong].decode(errors="replace")
            why = f"windows failed their self-test on {team.names[wrong]}: {text}"
    team.room.shared[_KEY] = why
    return why


def _try(team: Team, waiting: Waiting) -> str:
    """Return what is wrong with windows of this library, here. Collective over the processes."""
    comm = team.comm
    memory = mmap.mmap(-1, 8 * SIZES[-1])
    np.frombuffer(memory, np.float64)[:] = np.arange(SIZES[-1]) + comm.rank
    window, found = _made(team, memory, waiting)
    if found:
        return found
    target = (comm.rank + 1) % comm.size
    stuck = False
    for size in SIZES:
        found, stuck = _right(window, size, target)
        if found:
            break
    # Freeing is collective: nobody frees where one waits in vain.
    if _anyone(team, stuck, waiting):
        _windows().forget(window)
    else:
        _windows().free(window)
        with contextlib.suppress(BufferError):
            memory.close()
    return found


def _right(window: Any, size: int, target: int) -> tuple[str, bool]:
    """Return what is wrong with reading so many numbers, and whether the read is stuck."""
    from mpi4py import MPI

    out = np.full(size, -1.0)
    try:
        if not _reads(window, out, target):
            return f"{size} numbers did not come within {_SLOW:.0f} s", True
    except MPI.Exception as error:
        return f"{size} numbers: {error}", False
    same = np.array_equal(out, np.arange(size) + target)
    return ("" if same else f"{size} numbers came wrong"), False


def _reads(window: Any, out: "np.ndarray[Any, Any]", target: int) -> bool:
    """Read into `out`; return whether it came in time."""
    from mpi4py import MPI

    requests = []
    whole = out.data.cast("B")
    for at in range(0, len(whole), _PIECE):
        piece = whole[at : at + _PIECE]
        count = len(piece)
        requests.append(window.Rget((piece, count, MPI.BYTE), target, (at, count, MPI.BYTE)))
    limit = time.monotonic() + _SLOW
    while requests:
        if requests[-1].Test():
            requests.pop()
        elif time.monotonic() > limit:
            keep((requests, out))
            return False
        else:
            rest(0.0)
    return True
