"""How the members of other hosts hear that a member has left, and will never come again.

Members of one host see it in their memory. Between hosts whoever has a lane tells the others
that have it, by a small message; those that wait look for such messages. A farewell says how
many operations its sender has taken part in, so that what it still sends for the last of them
may arrive later. For each channel every one comes from every other one, once: whoever closes
waits for them, to know which lanes are broken before it frees one.
"""

import itertools
import json
import threading
import time
from typing import Any, Final

from mpiml.collectives.notes import FAREWELLS, notes_of
from mpiml.collectives.team import PlainHooks, Team

__all__ = ["Door", "Farewells", "farewells_of"]

_WHO: Final = (
    200  # characters of a name: a message stays so small that sending waits for nobody
)
_STEP: Final = 0.001
_ENDING: Final = 5.0  # s, that requests under way have to end when the communicator is freed
_FREEING: Final = 10.0  # s, that others have to free it too
_CLOSING: Final = 0.5  # s, that they have where it stays
_FREED: Final = "the communicator has been freed; free it after the last operation"


class Door:
    """By which one member enters the operations of a channel, and leaves it.

    Local.

    Attributes
    ----------
    number : int
        Of the channel; the same on all members.
    turn : int
        How many operations the member has entered.
    """

    def __init__(
        self, farewells: "Farewells", team: Team, lane: Any, peers: list[int], mates: list[int]
    ) -> None:
        self._farewells = farewells
        self._peers = peers
        self._mates = mates
        self.lane = lane
        self.worker = team.worker
        self.own = team.names[team.index]
        self.number = 0
        self.turn = 0
        self.inside = False  #: whether an operation is under way
        self.left = False

    def look(self) -> str:
        """Return who will not come to the operation that is under way; empty: nobody."""
        return self._farewells.look(self)

    @property
    def ended(self) -> str:
        """Why no operation is possible any more."""
        return self._farewells.ended

    def close(self) -> None:
        """Tell the others that this member will not come again."""
        self.leave(self.own, self.inside)

    def leave(self, who: str, halfway: bool = True) -> None:
        """Tell the others who it is that will not come, from which they learn that we do not.

        Parameters
        ----------
        who : str
            For instance ``"rank 3"``.
        halfway : bool
            Whether it is the operation under way that will not be done.
        """
        if not self.left:
            self.left = True
            self._farewells.leave(self, who, self.turn - halfway)

    def telling(self) -> list[tuple[int, bool]]:
        """Return whom to tell: processes, and whether they hear it from all hosts."""
        return [(p, True) for p in self._peers] + [(p, False) for p in self._mates]


class Farewells:
    """Those that a process sends and receives. Local.

    Parameters
    ----------
    team : Team
        Of one of its members.
    """

    def __init__(self, team: Team) -> None:
        self._notes = notes_of(team)
        self._limit = _FREEING if isinstance(team.hooks, PlainHooks) else _CLOSING
        self._lock = threading.Lock()
        self._numbers: dict[int, Any] = {}  # by member
        self._last = 0
        self._doors: dict[int, list[Door]] = {}
        self._lanes: dict[int, Any] = {}
        self._heard: dict[int, tuple[int, str]] = {}  # by channel: operations done, who
        self._due = 0  # farewells that will come yet
        self.ended = ""  #: why nothing goes any more

    def open(self, team: Team, lane: Any, stripes: bool) -> Door:
        """Return the door of a member to a new channel. Collective over the members.

        Parameters
        ----------
        team : Team
            The members.
        lane : mpiml.collectives.hosts.lanes.Lane or None
            The member's.
        stripes : bool
            Whether each member has one, and not the first of each host.
        """
        peers, mates = [], []
        if lane is not None:
            place = team.local.index(team.index) if stripes else 0
            for host in sorted(set(team.hosts) - {team.hosts[team.index]}):
                members = [i for i in range(team.size) if team.hosts[i] == host]
                peers.append(team.ranks[members[place]])
            mates = sorted({team.ranks[i] for i in team.local} - {team.rank})
        door = Door(self, team, lane, peers, mates)
        with self._lock:
            door.number = next(self._numbers.setdefault(team.index, itertools.count(1)))
            self._last = max(self._last, door.number)
            self._doors.setdefault(door.number, []).append(door)
            self._due += len(peers)
            if lane is not None:
                self._lanes[lane.number] = lane
            self._receive()
        return door

    def look(self, door: Door) -> str:
        """Return who will not come to the operation in which a member is."""
        with self._lock:
            self._receive()
            done, who = self._heard.get(door.number, (door.turn, ""))
        return who if done < door.turn else ""

    def leave(self, door: Door, who: str, done: int) -> None:
        """Tell those whom a door leads to."""
        with self._lock:
            rest = self._doors.get(door.number, [])
            if door in rest:
                rest.remove(door)
            if not rest:
                self._doors.pop(door.number, None)
                self._heard.pop(door.number, None)
            if self._notes is None:
                return
            lane = door.lane.number if door.lane is not None and door.lane.broken else 0
            for process, first in door.telling():
                if not first and who == door.own:
                    continue  # that is seen in the host's memory
                lost = lane if first else 0
                said = json.dumps([door.number, done, lost, first, who[:_WHO]])
                self._notes.send(process, FAREWELLS, said.encode())

    def _receive(self) -> None:
        for _, text in () if self._notes is None else self._notes.take(FAREWELLS):
            self._take(*json.loads(text))

    def _take(self, number: int, done: int, lane: int, first: bool, who: str) -> None:
        self._due -= first
        if lane in self._lanes and not self._lanes[lane].broken:
            self._lanes[lane].broken = f"an earlier operation ended early: {who} left it"
        if number in self._doors or number > self._last:  # not yet made here
            known = self._heard.get(number)
            if known is None or done < known[0]:
                self._heard[number] = done, who

    def close(self) -> None:
        """End what is under way, leave all channels, and take in the farewells of others.

        Local; where the communicator is about to be freed, all do so.
        """
        with self._lock:
            doors = [door for each in self._doors.values() for door in each]
        workers = {id(door.worker): door.worker for door in doors}.values()
        self._until(lambda: not any(w.busy for w in workers), _ENDING)
        self.ended = _FREED
        self._until(lambda: not any(w.busy for w in workers), _ENDING)
        for door in doors:
            door.close()
        self._until(self._complete, self._limit)

    def _complete(self) -> bool:
        if self._notes is None or not self._notes.open:
            return True
        with self._lock:
            self._receive()
            return self._due <= 0

    def _until(self, done: Any, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not done() and time.monotonic() < limit:
            time.sleep(_STEP)


def farewells_of(team: Team) -> Farewells:
    """Return those of this process, made once. Local."""
    found: Farewells | None = team.room.shared.get("farewells")
    if found is None:
        made = Farewells(team)
        found = team.room.shared.setdefault("farewells", made)
        if found is made:
            team.closes(made.close)
    return found
