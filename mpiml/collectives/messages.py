"""MPI messages of a team: nonblocking, so that whoever waits can be told to stop."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from mpiml.collectives.over import OVER
from mpiml.errors import UsageError
from mpiml.funnel import DRIVERS, drive

__all__ = ["Waiting", "adopt", "complete", "exchange_bytes", "keep", "let_go", "rest"]

_MOST = (1 << 31) - 1  # bytes; counts and offsets of the v-collectives are 32-bit numbers
_left: list[Any] = []  # requests that nobody waits for any more
_orphans: deque[tuple[list[Any], Any]] = deque()  # requests to be let go, and their memory
_SOME = 64  # of these that are tested at a time
_LASTING = 1.0  # s, after which a wait looks at what the others wait for
_AGAIN = 0.04  # s between two such looks
_EAGER = 200  # tests in a row before the core is given away between two
_YIELDING = 1e-3  # s that a wait only yields, before it sleeps


class Waiting:
    """What one wait calls from time to time: knows since when it waits.

    Parameters
    ----------
    hooks : mpiml.collectives.team.Hooks
        Of the team.
    label
        What is waited in.
    look : mpiml.collectives.desk.Look, optional
        What tells whether the others wait for something else.
    """

    __slots__ = ("_hooks", "_label", "_look", "_next", "_since")

    def __init__(self, hooks: Any, label: Any, look: Any = None) -> None:
        self._hooks = hooks
        self._label = label
        self._look = look
        self._next = _LASTING
        self._since = time.monotonic()

    def __call__(self, missing: Sequence[int] = ()) -> None:
        """Look around; raises what ends the wait."""
        if OVER:
            raise OVER[0]
        if DRIVERS:
            drive()
        seconds = time.monotonic() - self._since
        if seconds >= self._next and self._look is not None:
            self._next = seconds + _AGAIN
            self._look()
        self._hooks.waiting(seconds, missing, self._label)

    def settle(self) -> None:
        """Raise the error for which others have left, if there is one."""
        if self._look is not None:
            self._look.settle()


def complete(
    request: Any, waiting: Callable[[], None], between: Callable[[], None] | None = None
) -> None:
    """Wait for an MPI request.

    Local. Raises what `waiting` raises; the request is left then, and kept with its buffers:
    the library may still write there.

    Parameters
    ----------
    request : mpi4py.MPI.Request
        Of a nonblocking operation.
    waiting : function
        Called every 50 ms.
    between : function, optional
        Other progress to make meanwhile.
    """
    try:
        _complete(request, waiting, between)
    except BaseException:
        keep(request)
        raise


def keep(requests: Any) -> None:
    """Keep requests that nobody waits for any more, and their buffers: MPI may still use them."""
    _left.append(requests)


def adopt(requests: list[Any], memory: Any) -> None:
    """Keep requests whose owner is gone, and their memory, until MPI is done with them.

    Local; from any thread, a finalizer too: takes no lock.
    """
    _orphans.append((requests, memory))


def let_go() -> None:
    """Forget what has been adopted and MPI is done with, some of it at a time. Local."""
    for _ in range(min(len(_orphans), _SOME)):
        try:
            requests, memory = _orphans.popleft()  # no other thread has them now
        except IndexError:
            return
        try:
            while requests and requests[-1].Test():
                requests.pop()
        except Exception:  # of MPI: a peer has died
            keep((requests, memory))
            continue
        if requests:
            _orphans.append((requests, memory))


def _complete(
    request: Any, waiting: Callable[[], None], between: Callable[[], None] | None
) -> None:
    for _ in range(_EAGER):
        if request.Test():
            return
    begun = looked = now = time.monotonic()
    while not request.Test():
        if between is not None:
            between()
        rest(now - begun)
        now = time.monotonic()
        if now - looked > 0.05:
            looked = now
            waiting()


def rest(waited: float) -> None:
    """Let other threads and ranks have the core; sleep, where one has waited for long. Local.

    Parameters
    ----------
    waited : float
        Seconds since the wait began. A sleep is at most a fiftieth of it, and 1 ms; however
        short it is asked to be, the kernel makes it 50 us longer, `time.sleep(0)` too.
    """
    if DRIVERS and drive():  # one thread makes all calls of MPI, and it waits here
        return
    if waited < _YIELDING:
        os.sched_yield()
    else:
        time.sleep(min(waited / 50, 1e-3))


def exchange_bytes(
    comm: Any, values: Sequence[bytes], waiting: Callable[[], None]
) -> list[list[bytes]]:
    """Give every process the bytes that each process brings. Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Of the processes.
    values : sequence of bytes
        What this one brings: any number, of any length.

    Returns
    -------
    list of list of bytes
        For each rank what it brought.

    Raises
    ------
    UsageError
        On every rank, if they are over 2 GiB together.
    """
    from mpi4py import MPI

    head = len(values).to_bytes(8, "little")
    own = head + b"".join([len(v).to_bytes(8, "little") for v in values]) + b"".join(values)
    lengths = bytearray(8 * comm.size)
    mine = len(own).to_bytes(8, "little")
    complete(comm.Iallgather([mine, MPI.BYTE], [lengths, MPI.BYTE]), waiting)
    sizes = [int.from_bytes(lengths[8 * i : 8 * i + 8], "little") for i in range(comm.size)]
    *starts, total = accumulate(sizes, initial=0)
    if total > _MOST:
        raise UsageError(
            f"mpiml.collectives: expected at most {_MOST} bytes to agree on, got {total}, the "
            f"most of them from rank {sizes.index(max(sizes))}."
        )
    everything = bytearray(total)
    complete(comm.Iallgatherv([own, MPI.BYTE], [everything, sizes, starts, MPI.BYTE]), waiting)
    return [_parts(everything[s : s + n]) for s, n in zip(starts, sizes, strict=True)]


def _parts(text: bytearray) -> list[bytes]:
    count = int.from_bytes(text[:8], "little")
    at = 8 + 8 * count
    parts = []
    for i in range(count):
        length = int.from_bytes(text[8 + 8 * i : 16 + 8 * i], "little")
        parts.append(bytes(text[at : at + length]))
        at += length
    return parts
