"""Notes: small messages between the processes of a team that nobody is bound to wait for.

Who waits in what, and who has left, is told by notes. They go through MPI, nonblocking, from
whichever thread has one to send, and are taken by whoever looks. All are counted, so that none
is left in a communicator that is freed: an MPI gives the next one the same number, and with it
what was left.
"""

import threading
import time
from array import array
from collections import deque
from typing import Any, Final

from mpiml.collectives.messages import adopt, keep, rest

__all__ = ["BROKEN", "DESK", "FAREWELLS", "Notes", "drain", "notes_of"]

BROKEN: Final = "broken"  #: in a room's `shared`: why its team can make nothing any more
DESK: Final = 1  #: the tag of `mpiml.collectives.desk`
FAREWELLS: Final = 2  #: and of `mpiml.collectives.hosts.farewells`
_KEY: Final = "notes"


class Notes:
    """The notes of one process, on its team's communicator; nothing else is sent there.

    Local; from any thread.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The team's.

    Attributes
    ----------
    received : int
        How many have come, from all processes.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._comm: Any = comm
        self._lock = threading.Lock()
        self._sent_to = array("q", [0] * comm.size)
        self.received = 0
        self._under_way: list[tuple[Any, bytes]] = []
        self._coming: dict[int, deque[tuple[int, Any, bytearray]]] = {
            DESK: deque(),
            FAREWELLS: deque(),
        }
        self._status, self._byte, self._anyone = MPI.Status(), MPI.BYTE, MPI.ANY_SOURCE

    def send(self, process: int, tag: int, text: bytes) -> None:
        """Begin to send a note: so small that MPI takes it before it is received.

        Parameters
        ----------
        process : int
            Rank of the receiver.
        tag : int
            `DESK` or `FAREWELLS`.
        text : bytes
            At most some 4 KiB.
        """
        with self._lock:
            if self.open:
                self._sent()
                request = self._comm.Isend([text, self._byte], process, tag)
                self._under_way.append((request, text))
                self._sent_to[process] += 1

    def unsent(self) -> bool:
        """Return whether any is still in the sender's memory."""
        with self._lock:
            return self.open and not self._sent()

    def _sent(self) -> bool:
        self._under_way = [note for note in self._under_way if not note[0].Test()]
        return not self._under_way

    def take(self, tag: int) -> list[tuple[int, bytes]]:
        """Return what has come: each note with the rank of its sender, in the order it sent them."""
        with self._lock:
            return self._take(tag) if self.open else []

    def _take(self, tag: int) -> list[tuple[int, bytes]]:
        comm, status, coming = self._comm, self._status, self._coming[tag]
        while comm.Iprobe(self._anyone, tag, status):
            source, memory = status.Get_source(), bytearray(status.Get_count(self._byte))
            request = comm.Irecv([memory, self._byte], source, tag)
            coming.append((source, request, memory))
        found = []
        while coming and coming[0][1].Test():
            source, _, memory = coming.popleft()
            found.append((source, bytes(memory)))
        self.received += len(found)
        return found

    @property
    def open(self) -> bool:
        """Whether notes still go: not after `close`, nor after MPI has ended."""
        if self._comm is None:
            return False
        from mpi4py import MPI

        return bool(MPI.Is_initialized() and not MPI.Is_finalized())

    def close(self, seconds: float) -> bool:
        """Take in all that are on their way; nothing is sent or taken from then on.

        Collective over the processes of the team, once all its waits are over.

        Parameters
        ----------
        seconds : float
            How long the others have to come.

        Returns
        -------
        bool
            Whether nothing is left; else the communicator must stay.
        """
        with self._lock:
            if not self.open:
                return False
            done = self._until_all_are_here(seconds)
            self._comm = None
            return done

    def _until_all_are_here(self, seconds: float) -> bool:
        from mpi4py import MPI

        told, coming = False, array("q", [0] * len(self._sent_to))
        request = self._comm.Ialltoall([self._sent_to, MPI.INT64_T], [coming, MPI.INT64_T])
        begun = time.monotonic()
        while True:
            told = told or request.Test()
            for tag in self._coming:
                self._take(tag)
            if told and self._sent() and self.received >= sum(coming):
                return True
            waited = time.monotonic() - begun
            if waited > seconds:
                keep((request, self._sent_to, coming))
                return False
            rest(waited)

    def __del__(self) -> None:  # of a team that has failed: MPI may still read or write here
        notes = [
            *self._under_way,
            *[note[1:] for each in self._coming.values() for note in each],
        ]
        adopt([request for request, _ in notes], notes)


def notes_of(team: Any) -> Notes | None:
    """Return those of this process, made once; None: the team is of one process. Local."""
    if team.comm is None or team.comm.size == 1:
        return None
    shared = team.room.shared
    found: Notes | None = shared.get(_KEY)
    if found is None:
        found = shared.setdefault(_KEY, Notes(team.comm))
    return found


def drain(team: Any, seconds: float) -> bool:
    """Take in the notes of a team that are on their way, before its communicator is freed.

    Collective over the processes of the team, once all its waits are over. As `Notes.close`; but
    where an exchange was left halfway, processes have not begun the same collectives of MPI, and
    may begin no other one: the communicator stays.
    """
    notes = notes_of(team)
    if notes is None:
        return True
    return BROKEN not in team.room.shared and notes.close(seconds)
