"""Memory of a host that holds blocks: one for each group of its members.

A group is all members of the host, one of them, or a cluster. A block is the arrays of a tree
behind a gate (`mpiml._native.Gate`). Whoever writes goes through the gate, so that a snapshot
can be taken between two updates; whoever reads single elements does not. The memory is the
arena's, in every mode: ranks, threads of one process, both. Where a host has no room for it,
each process may be a host of its own (``fallback=True``).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiml._native import Gate, gate_bytes
from mpiml.collectives.arena import Arena, by_process, make_arena, private_arena
from mpiml.collectives.labels import Label
from mpiml.collectives.regions import Regions
from mpiml.collectives.team import Team
from mpiml.errors import RankFailedError, SharedMemoryError

__all__ = ["Block", "HostMemory", "Spot", "host_memory"]

_SLICE_US = 50_000  # how long to wait at a gate before looking around
_BOX = 128  # bytes of a mailbox of the arena, which only keeps the memory here
_LOCK = 128  # bytes before the arrays, for those who update under a lock: a line of its own


class Spot(NamedTuple):
    """Where a block lies in the memory of a host, for those who read it from elsewhere."""

    gate: int  #: byte at which its gate begins
    gate_nbytes: int
    data: int  #: byte at which its arrays begin
    nbytes: int  #: of the arrays; what the group keeps besides comes after them


class Block:
    """The arrays of a tree in the memory of this host, behind a gate.

    Local: every method; other members of the host may be in theirs at the same time.

    Parameters
    ----------
    team : Team
        Of the member whose view this is.
    memory : buffer
        Of the host.
    spot : Spot
        Where in it.
    regions : Regions
        How the arrays lie there.
    writer : int
        Which of the gate's writers this is.
    twin : buffer, optional
        Memory of a second set of the arrays, which assignments set too.
    """

    def __init__(
        self,
        team: Team,
        memory: Any,
        spot: Spot,
        regions: Regions,
        writer: int,
        writers: int,
        twin: Any = None,
    ) -> None:
        whole = memoryview(memory)
        self._team = team
        self._writer = writer
        self.data = whole[spot.data : spot.data + spot.nbytes]  #: all arrays, as bytes
        self.gate = Gate(whole[spot.gate : spot.gate + spot.gate_nbytes], writer, writers)
        self.lock = whole[spot.data - _LOCK : spot.data]  #: of the kernels' ways with one
        self.views = regions.views(self.data)
        self.leaves = [view.reshape(-1) for view in self.views]  #: each as one axis
        twins = [] if twin is None else regions.views(twin)
        self.twins = [view.reshape(-1) for view in twins]  #: of the second set, if there is one

    def enter(self, label: Any) -> None:
        """Begin an update of several parts; `gate.leave` ends it."""
        if not self.gate.enter(_SLICE_US):
            self._wait(lambda: self.gate.enter(_SLICE_US) or None, label)

    def assign(self, leaves: "list[np.ndarray[Any, Any]]", label: Any) -> None:
        """Set the arrays, and the second set if there is one: one update."""
        self.enter(label)
        try:
            for own, leaf in zip(self.views, leaves, strict=True):
                own[...] = leaf
            for twin, leaf in zip(self.twins, leaves, strict=False):
                twin[...] = leaf.reshape(-1)
        finally:
            self.gate.leave(1)

    def snapshot(self, out: Any, label: Any, clear: bool = False) -> int:
        """Copy the arrays between two updates; return the number of updates so far.

        Parameters
        ----------
        out : buffer
            As many bytes as the arrays have.
        label
            What waits, should a writer stay.
        clear : bool
            Whether they are zero afterwards, in the same moment.

        Raises
        ------
        RankFailedError
            A writer has died within an update.
        """
        version = self.gate.snapshot(self.data, out, _SLICE_US, clear)
        if version is None:
            version = self._wait(
                lambda: self.gate.snapshot(self.data, out, _SLICE_US, clear), label
            )
        return version

    def _wait(self, attempt: Callable[[], Any], label: Any) -> Any:
        """Attempt until it comes off; raises what ends waits of the team."""
        waiting = self._team.waiting(label)
        while True:
            waiting(self.holders())
            found = attempt()
            if found is not None:
                return found

    def holders(self) -> list[int]:
        """Return the members within an update, or in the midst of a snapshot."""
        gate = self.gate
        closed_by = gate.closed_by
        writers = gate.inside() + ([closed_by] if closed_by >= 0 else [])
        local = self._team.local
        # The last writer of a gate acts for other hosts, in the process of the first member.
        others = [w for w in writers if w != self._writer]
        return sorted({local[w] if w < len(local) else local[0] for w in others})

    def stuck(self, error: TimeoutError, label: Any) -> RankFailedError:
        """Return the error for a gate that stayed closed."""
        holders = self.holders()
        names = ", ".join(self._team.names[i] for i in holders) or "another member"
        return RankFailedError(
            f"{label}: {error}. {names} entered an update or a snapshot and did not leave it: "
            "look for its own error, or for a debugger that holds it.",
            tuple(holders),
        )


class HostMemory:
    """The blocks of one host, as one of its members sees them.

    Parameters
    ----------
    team : Team
        The members, by `by_process` where each process is its own host.
    arena : Arena
        The memory.
    regions : Regions
        The arrays of a block.
    spots : sequence of Spot
        Of every member's block; members of a group have the same.
    twins : bool
        Whether what a group keeps besides begins with a second set of the arrays.
    """

    def __init__(
        self, team: Team, arena: Arena, regions: Regions, spots: list[Spot], twins: bool
    ) -> None:
        self.team = team
        self.memory = arena.memory
        self.regions = regions
        self.spots = spots
        self._twins = twins

    def block(self, member: int, acting: bool = False) -> Block:
        """Return the block of a member of this host.

        Parameters
        ----------
        member : int
            Whose.
        acting : bool
            Whether to write in the name of other hosts: the gate's last writer.
        """
        local = self.team.local
        writer = len(local) if acting else local.index(self.team.index)
        twin = self.beside(member, self.regions.nbytes) if self._twins else None
        return Block(
            self.team,
            self.memory,
            self.spots[member],
            self.regions,
            writer,
            len(local) + 1,
            twin,
        )

    def beside(self, member: int, nbytes: int) -> memoryview:
        """Return what a member's group keeps besides the arrays of its block."""
        spot = self.spots[member]
        begin = spot.data + spot.nbytes
        return memoryview(self.memory)[begin : begin + nbytes]

    @property
    def leader(self) -> int:
        """The member in whose process this host's memory is served to others."""
        return self.team.local[0]


def host_memory(
    team: Team,
    regions: Regions,
    groups: Sequence[int],
    fallback: bool,
    label: Label,
    beside: int = 0,
    twins: bool = False,
) -> HostMemory:
    """Make a block for each group. Collective over the members.

    A block lies in the segments of its members, so that each NUMA node has a part of it.

    Parameters
    ----------
    team : Team
        The members.
    regions : Regions
        The arrays of a block.
    groups : sequence of int
        Of each member the number of its group; those of a host that are in one group follow
        each other. A group that spans hosts has a block on each.
    fallback : bool
        Whether every process may be its own host where ``/dev/shm`` has no room.
    label : Label
        What it is for.
    beside : int
        Bytes that a group keeps besides.
    twins : bool
        Whether it keeps a second set of the arrays before these, which assignments set too.

    Raises
    ------
    SharedMemoryError
        There is no room. On all members.
    """
    used = team
    nbytes = regions.nbytes * (1 + twins) + beside
    arena = make_arena(used, _segment(used, groups, nbytes), label, _BOX)
    if isinstance(arena, SharedMemoryError):
        if not fallback:
            raise arena
        used = by_process(team)
        arena = private_arena(used, _segment(used, groups, nbytes), label, _BOX)
    said = used.exchange(arena.own_at.to_bytes(8, "little"), label)
    spots: list[Spot] = []
    firsts: dict[tuple[int, int], int] = {}  # by host and group: where its first segment is
    for host, group, text in zip(used.hosts, groups, said, strict=True):
        at = firsts.setdefault((host, group), int.from_bytes(text, "little"))
        gate = _gate_nbytes(used.hosts.count(host))
        spots.append(Spot(at, gate, at + gate + _LOCK, regions.nbytes))
    return HostMemory(used, arena, regions, spots, twins)


def _segment(team: Team, groups: Sequence[int], nbytes: int) -> int:
    """Return the bytes of a segment such that those of every group hold its block."""
    sizes: dict[int, int] = {}
    for member in team.local:
        sizes[groups[member]] = sizes.get(groups[member], 0) + 1
    total = _gate_nbytes(len(team.local)) + _LOCK + nbytes
    return max(-(-total // size) for size in sizes.values())


def _gate_nbytes(members: int) -> int:
    return gate_bytes(members + 1)  # a multiple of 128, so that arrays begin on a cache line
