"""Where the mail of one process comes in, for all its members of a team.

A process that ends says so to the others: who waits for a member of it then gets an error.
"""

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpiml.collectives.arrivals import Apart, Arrival
from mpiml.collectives.messages import adopt, keep, let_go, rest
from mpiml.collectives.over import GUESTS
from mpiml.collectives.room import SLICE
from mpiml.collectives.team import PlainHooks, Team
from mpiml.errors import RankFailedError, ServiceGoneError

__all__ = ["Office"]

_EAGER: Final = 100  # tests in a row before the core is given away between two
_NAP: Final = 1e-4  # s, of a thread that waits beside its member's, at first, and
_LONG_NAP: Final = 1e-3  # at last
_HEADS: Final = 0  # the tag of heads; bodies have higher ones
_CHUNK: Final = 1 << 30  # bytes of a message: MPI counts in 32 bits
_GRACE: Final = 2.0  # s, that what a process has sent may come after its farewell
_FREEING: Final = 10.0  # s, that others have to close where the communicator is freed
_CLOSING: Final = 0.5  # s, that they have where the program ends


class Office:
    """The messages of one process. Local, but made on all processes of the team at once.

    Parameters
    ----------
    team : Team
        Of one of the members here.
    parse : function
        Returns channel, target and `Arrival` of a message by MPI, given rank and bytes.

    Attributes
    ----------
    outside : bool
        Whether there are other processes.
    news : int
        Changes whenever a member here may find something new.
    guests : list of function
        Called before it closes; each returns whether nothing of it is on its way.
    """

    def __init__(
        self, team: Team, parse: Callable[[int, bytearray], tuple[int, int, Arrival]]
    ) -> None:
        self.team = team
        self.outside = team.comm is not None and team.comm.size > 1
        self.news = 0
        self.tags = itertools.count()
        self.guests: list[Callable[[], bool]] = []
        self._parse = parse
        self._limit = _FREEING if isinstance(team.hooks, PlainHooks) else _CLOSING
        self._boxes: dict[tuple[int, int], list[Arrival]] = {}  # by channel and target
        self._shut: set[tuple[int, int]] = set()  # boxes of which nobody takes anything
        self._lock = threading.Lock()  # of the boxes; never held in a wait
        self._ready = threading.Condition(self._lock)  # for waits where all members are here
        self._turn = threading.Lock()  # of who looks into MPI; never held in a wait
        self._coming: dict[int, deque[tuple[Any, bytearray]]] = {}
        self._apart: dict[tuple[int, int], Apart] = {}  # bodies not asked for, by rank and tag
        self._asking = threading.Lock()  # of these; never held in a wait
        self._left: dict[int, float] = {}  # ranks that send nothing any more, since when
        self._farewells: list[Any] | None = None  # requests, once the others are told
        self._comm: Any = None
        self._status: Any = None
        self._byte: Any = None
        self._anyone: Any = None
        if self.outside:
            from mpi4py import MPI

            from mpiml.world import own_duplicate

            self._comm = own_duplicate(team.comm, f"mpiml mail of {team.title}")
            self._status = MPI.Status()
            self._byte, self._anyone = MPI.BYTE, MPI.ANY_SOURCE
            GUESTS.add(self)

    # -- boxes ---------------------------------------------------------------------------------

    def put(self, channel: int, target: int, arrival: Arrival) -> None:
        """Put what has come into a member's box; drop it, if that is shut."""
        key = channel, target
        with self._lock:
            shut = key in self._shut
            if not shut:
                self._boxes.setdefault(key, []).append(arrival)
                self.news += 1
                if not self.outside:  # else nobody waits for it: see `until`
                    self._ready.notify_all()
        if shut:
            self.drop(arrival)

    def shut(self, channel: int, target: int) -> None:
        """Drop what is in a box, and what comes for it from now on."""
        with self._lock:
            self._shut.add((channel, target))
            box = self._boxes.pop((channel, target), [])
            left = box.copy()
            box.clear()  # `take` may have it in hand
        for arrival in left:
            self.drop(arrival)

    def drop(self, arrival: Arrival) -> None:
        """Let go of a message that nobody takes: its sender has its memory back."""
        if arrival.sending is not None:
            arrival.sending.taken()
        if arrival.tag and self._comm is not None:
            requests = self.receive(arrival, np.empty(arrival.nbytes, np.uint8).data)
            adopt(requests, arrival.body.memory)

    def take(self, channel: int, target: int, source: int | None) -> Arrival | None:
        """Return the first message in a box, of one source or of any."""
        box = self._boxes.get((channel, target))
        if not box:
            return None
        with self._lock:
            for i, arrival in enumerate(box):
                if source is None or arrival.source == source:
                    return box.pop(i)
        return None

    def some(self, channel: int, target: int) -> bool:
        """Return whether there is anything in a box."""
        return bool(self._boxes.get((channel, target)))

    def heads(self, channel: int, target: int, source: int) -> list[bytes]:
        """Return what the messages of one source in a box say."""
        with self._lock:
            box = self._boxes.get((channel, target), ())
            return [arrival.head for arrival in box if arrival.source == source]

    def tell(self) -> None:
        """Wake who waits here."""
        with self._lock:
            self.news += 1
            if not self.outside:
                self._ready.notify_all()

    def until(
        self,
        test: Callable[[], Any],
        waiting: Callable[[Sequence[int]], None],
        missing: Sequence[int] = (),
        beside: bool = False,
        coming: Callable[[], bool] | None = None,
    ) -> Any:
        """Call `test` until it returns something that is true, and return that.

        Parameters
        ----------
        test : function
            Called each time after what has come in has been taken in.
        waiting : function
            Called every `SLICE` seconds, with `missing`; ends the wait by raising.
        missing : sequence of int
            The members that are waited for, where they are known.
        beside : bool
            Whether a thread beside the member's own waits: it naps from the start, where it
            would take the core and the interpreter from what the member computes.
        coming : function, optional
            Tells whether all that is waited for has been sent: a farewell means nothing then.
        """
        for _ in range(_EAGER if self.outside and not beside else 1):
            self.progress()
            found = test()
            if found:
                return found
        begun = looked = time.monotonic()
        while True:
            news = self.news
            self.progress()
            found = test()
            if found:
                return found
            now = time.monotonic()
            if now - looked >= SLICE:
                looked = now
                if coming is None or not coming():
                    self.look_for(missing)
                waiting(missing)
            if self.outside:  # nothing wakes it
                if beside:
                    time.sleep(min(max((now - begun) / 50, _NAP), _LONG_NAP))
                else:
                    rest(now - begun)
                continue
            with self._ready:
                if self.news == news:
                    self._ready.wait(SLICE)

    def look_for(self, missing: Sequence[int]) -> None:
        """Look whether members that are waited for may still send something.

        Raises
        ------
        RankFailedError
            The process of one has ended, a while ago: bodies that it sent may come later.
        """
        for member in missing if self._left else ():
            since = self._left.get(self.team.ranks[member])
            if since is not None and time.monotonic() - since > _GRACE:
                name = self.team.names[member]
                raise RankFailedError(
                    f"{self.team.title}: {name} has ended, or has freed the communicator, and will "
                    f"never send what {self.team.names[self.team.index]} waits for. Look for its "
                    "own error above; make the same calls on every member.",
                    (member,),
                )

    # -- MPI -----------------------------------------------------------------------------------

    def send(self, rank: int, front: bytes, tag: int, body: Any) -> list[Any]:
        """Begin to send a head, and, unless `tag` is 0, a body; return the requests."""
        comm, byte = self._comm, self._byte
        if comm is None:
            raise ServiceGoneError(
                f"{self.team.title}: its mail is closed; send before the program ends, or before "
                "the communicator is freed"
            )
        requests = [comm.Isend((front, byte), rank, _HEADS)]
        if tag:
            requests += [
                comm.Isend((body[at : at + _CHUNK], byte), rank, tag)
                for at in range(0, body.nbytes, _CHUNK)
            ]
        return requests

    def receive(self, arrival: Arrival, memory: Any) -> list[Any]:
        """Begin to receive a body that comes apart; return the requests.

        It comes into `Apart.memory`, which is `memory` unless the body had to be received before.
        """
        apart: Apart = arrival.body
        with self._asking:
            if apart.requests is None:
                self._ask(arrival.rank, arrival.tag, apart, memory)
            requests = apart.requests
        assert requests is not None
        return requests

    def _ask(self, rank: int, tag: int, apart: Apart, memory: Any) -> None:
        comm = self._comm
        if comm is None:
            raise ServiceGoneError(
                f"{self.team.title}: its mail is closed; receive before the program ends, or "
                "before the communicator is freed"
            )
        apart.memory = memory
        apart.requests = [
            comm.Irecv((memory[at : at + _CHUNK], self._byte), rank, tag)
            for at in range(0, memory.nbytes, _CHUNK)
        ]
        del self._apart[rank, tag]

    def _expect(self, arrival: Arrival) -> None:
        """Note a body that is to come apart.

        MPI gives bodies of one tag out in the order in which they were sent. Tags come again
        after a while: where nobody has asked for the body before, it is received first.
        """
        key = arrival.rank, arrival.tag
        with self._asking:
            before = self._apart.get(key)
            if before is not None:
                self._ask(*key, before, np.empty(before.nbytes, np.uint8).data)
            self._apart[key] = arrival.body

    def progress(self, one: bool = False) -> None:
        """Put what has come by MPI into the boxes.

        Parameters
        ----------
        one : bool
            Whether to return after the first message that is here, and look for no other.
        """
        if self._comm is not None:
            with self._turn:
                self._progress(one)
            let_go()

    def _progress(self, one: bool) -> None:
        comm, status, coming = self._comm, self._status, self._coming
        if comm is None:
            return
        while (message := comm.Improbe(self._anyone, _HEADS, status)) is not None:
            rank, memory = status.Get_source(), bytearray(status.Get_count(self._byte))
            request = message.Irecv((memory, self._byte))
            if rank not in coming and request.Test():  # it is here, as most are at once
                self._come(rank, memory)
                if one:
                    break
            else:
                coming.setdefault(rank, deque()).append((request, memory))
        if not coming:
            return
        for rank, queue in list(coming.items()):
            while queue and queue[0][0].Test():
                self._come(rank, queue.popleft()[1])
            if not queue:
                del coming[rank]

    def _come(self, rank: int, memory: bytearray) -> None:
        if memory:
            channel, target, arrival = self._parse(rank, memory)
            if arrival.tag:
                self._expect(arrival)
            self.put(channel, target, arrival)
        else:
            self._left.setdefault(rank, time.monotonic())

    # -- its end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the communicator, unless something is left in it. All processes do so."""
        gone = [guest() for guest in list(self.guests)]
        self.guests.clear()
        if self._comm is None:
            return
        from mpi4py import MPI

        with self._turn:
            comm, self._comm = self._comm, None
        if MPI.Is_finalized() or self.team.spoiled:
            return
        self._comm = comm
        requests = self._say_farewell()
        others = comm.size - 1
        limit = time.monotonic() + self._limit
        done = False
        while not done and time.monotonic() < limit:
            self.progress()
            requests = [request for request in requests if not request.Test()]
            done = not requests and len(self._left) == others
            if not done:
                time.sleep(1e-4)
        with self._turn:
            self._comm = None
        if requests:
            keep(requests)
        waiting = any(arrival.tag for box in self._boxes.values() for arrival in box)
        if done and all(gone) and not waiting:
            with contextlib.suppress(MPI.Exception):
                comm.Free()

    def leave_at_end(self) -> None:
        """Tell the other processes that this one ends, if the mail is open. Local."""
        from mpi4py import MPI

        if self._comm is not None and not MPI.Is_finalized():
            with contextlib.suppress(MPI.Exception):  # of peers that have died
                keep(self._say_farewell())

    def _say_farewell(self) -> list[Any]:
        """Tell the other processes that nothing more comes from here; return the requests.

        It is the last message: what was sent before has come, since heads keep their order.
        """
        if self._farewells is None:
            comm, last = self._comm, (b"", self._byte)
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            self._farewells = [comm.Isend(last, rank, _HEADS) for rank in others]
        return self._farewells
