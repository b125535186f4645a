"""The memory of other hosts, for one member: what serves its own, and its ways to theirs."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mpiml._native import Gate
from mpiml.collectives.mail import mail_of
from mpiml.collectives.onesided.agent import agent_of, refuse_agents
from mpiml.collectives.onesided.links import Link
from mpiml.collectives.onesided.memory import HostMemory, Spot
from mpiml.collectives.onesided.serving import Serving
from mpiml.collectives.onesided.windows import Reads, open_windows
from mpiml.collectives.regions import Regions
from mpiml.collectives.team import Team

__all__ = ["Remote", "Route"]

_TRIES: Final = 3  # snapshots that others may spoil, before the other host is asked for one


class Route:
    """One member's way to a block of another host.

    Local: every method.

    Parameters
    ----------
    block : int
        The member whose block it is.
    spot : Spot
        Where it lies.
    regions : Regions
        How its arrays lie there.
    writers : int
        How many writers its gate has.
    link : Link
        Sends additions and questions to its host.
    reads : Reads
        Reads the host's memory.
    """

    def __init__(
        self, block: int, spot: Spot, regions: Regions, writers: int, link: Link, reads: Reads
    ) -> None:
        self.block = block
        self.spot = spot
        self._regions = regions
        self.link = link
        self.reads = reads
        self._words = memoryview(bytearray(spot.gate_nbytes + 128))
        at = -np.frombuffer(self._words, np.uint8).ctypes.data % 128  # gates are aligned
        self._before = self._words[at : at + spot.gate_nbytes]
        self._gate = Gate(self._before, 0, writers)

    def version(self, label: Any) -> int | None:
        """Return how many updates the block has had; None while somebody is within one."""
        self.reads.read([(self.spot.gate, self._before)], label)
        return self._gate.quiet_version()

    def read(self, at: int, out: Any, label: Any) -> None:
        """Copy bytes of the arrays, from `at` on. What is written meanwhile may come in parts."""
        self.reads.read([(self.spot.data + at, out)], label)

    def read_parts(self, parts: list[tuple[int, Any]], label: Any) -> None:
        """Copy several parts of the arrays, at once."""
        data = self.spot.data
        self.reads.read([(data + at, out) for at, out in parts], label)

    def write(
        self, kind: int, leaves: "Sequence[np.ndarray[Any, Any]]", scale: float = 1.0
    ) -> None:
        """Send values for all arrays, to be added or assigned (`ADD`, `ASSIGN`): one update."""
        body = np.zeros(self._regions.nbytes, np.uint8)
        for view, leaf in zip(self._regions.views(body), leaves, strict=True):
            view[...] = leaf.reshape(view.shape)
        self.link.write(kind, self.block, -1, body, scale)

    def write_leaf(
        self, kind: int, number: int, leaf: "np.ndarray[Any, Any]", scale: float = 1.0
    ) -> None:
        """Send values for one array: one update."""
        self.link.write(kind, self.block, number, leaf.tobytes(), scale)

    def snapshot(self, out: Any, label: Any, clear: bool = False) -> int:
        """Copy the arrays between two updates, after all that this member has added; the version.

        What is read tells by its version, before and after, whether it is whole; where others
        write all the time, the other host is asked to make one.
        """
        if not clear:
            self.link.flush()
            for _ in range(_TRIES):
                before = self.version(label)
                if before is not None:
                    self.read(0, out, label)
                    if self.version(label) == before:
                        return before
        return self.link.snapshot(self.block, out, clear)


class Remote:
    """What one member has to do with other hosts.

    Collective over the members: construction, `close`.

    Parameters
    ----------
    team : Team
        The members; not `memory`'s, which may take processes for hosts.
    memory : HostMemory
        Of this host.
    title : str
        What it is for, in messages.
    label
        The same, of the call.
    """

    def __init__(self, team: Team, memory: HostMemory, title: str, label: Any) -> None:
        refuse_agents(
            team, "one-sided memory of several hosts", "Make it on ranks of one host."
        )
        self._team = team
        self._memory = memory
        mail = mail_of(team)
        self._asks = mail.open(title)
        self._answers = mail.open(title)
        self._agent = agent_of(team)
        self._opened = open_windows(memory, label)
        self._links: dict[int, Link] = {}
        self._serving: Serving | None = None
        local = memory.team.local
        if team.index == memory.leader:
            blocks = {member: memory.block(member, acting=True) for member in local}
            self._serving = Serving(memory, self._asks, self._answers, blocks, self._agent)
            self._agent.add(self._serving.turn)

    @property
    def way(self) -> str:
        """How the memory of other hosts is read."""
        return self._opened.way

    def route(self, member: int) -> Route:
        """Return the way to a member's block on another host. Local."""
        team = self._memory.team
        leader = next(i for i in range(team.size) if team.hosts[i] == team.hosts[member])
        link = self._links.get(leader)
        if link is None:
            link = self._links[leader] = Link(
                self._team, self._asks, self._answers, leader, self._agent
            )
            self._agent.add(link.turn)
        writers = team.hosts.count(team.hosts[member]) + 1
        reads = self._opened.reads(leader, link)
        spot, regions = self._memory.spots[member], self._memory.regions
        return Route(member, spot, regions, writers, link, reads)

    def flush(self) -> None:
        """Wait until everything this member has sent is applied. Local."""
        for link in self._links.values():
            link.flush()

    def close(self) -> None:
        """Serve no more, once all members are here. Collective: the caller has met them."""
        for link in self._links.values():
            self._agent.remove(link.turn)
        if self._serving is not None:
            self._agent.remove(self._serving.turn)
        self._asks.close()
        self._answers.close()
        self._opened.close()

    def abandon(self) -> None:
        """Send no more. Local.

        This host's memory is served on, to those who have not left; the window stays, too, until
        the team ends.
        """
        for link in self._links.values():
            self._agent.remove(link.turn)
        self._answers.close()
        if self._serving is None:
            self._asks.close()
