"""The way an operation takes: shared memory within a host, messages between hosts."""

from typing import Any

from mpiml.collectives.arena import Arena, by_process, make_arena, private_arena
from mpiml.collectives.hosts.between import Between
from mpiml.collectives.hosts.chunks import Choice, choose
from mpiml.collectives.hosts.lanes import open_lane
from mpiml.collectives.in_host import InHost, box_of
from mpiml.collectives.labels import Label
from mpiml.collectives.regions import Regions
from mpiml.collectives.team import Team
from mpiml.config import Config
from mpiml.errors import SharedMemoryError

__all__ = ["chosen", "open_channel"]


def open_channel(
    team: Team, regions: Regions, shared: bool, fallback: bool, check: bool, label: Label
) -> tuple[memoryview, memoryview | None, Any]:
    """Make memory for a tree, and what reduces it.

    Collective over the members.

    Parameters
    ----------
    team : Team
        The members.
    regions : Regions
        The layout of each one's memory.
    shared : bool
        Whether the host has one result.
    fallback : bool
        Whether messages will do where shared memory is refused.
    check : bool
        Whether members compare what they do.
    label : Label
        What this is for.

    Returns
    -------
    own, result, channel
        The member's memory, zeroed; the host's result, or None; the channel.

    Raises
    ------
    SharedMemoryError
        There is none, and no fallback. On all members.
    """
    nbytes = regions.nbytes
    box = box_of(nbytes, len(team.local))
    arena = make_arena(team, nbytes, label, box, nbytes if shared else 0)
    way = "shared memory"
    if isinstance(arena, SharedMemoryError):
        if not fallback:
            raise arena
        team = by_process(team)
        box = box_of(nbytes, len(team.local))
        arena = private_arena(team, nbytes, label, box, nbytes if shared else 0)
        way = "memory of each process"
    result = arena.shared(nbytes) if shared else None
    channel = _channel(team, arena, regions, shared, check, label)
    channel.way = channel.way.replace("shared memory", way)
    return arena.segment(nbytes), result, channel


def _channel(
    team: Team, arena: Arena, regions: Regions, shared: bool, check: bool, label: Label
) -> InHost:
    if not team.several_hosts:
        return InHost(team, arena, regions, shared, check)
    choice = chosen(team, regions.nbytes, label)
    lane = open_lane(team, choice, label)
    return Between(team, arena, regions, shared, check, choice, lane)


def chosen(team: Team, nbytes: int, label: Label) -> Choice:
    """Return who sends between hosts. Collective over the members.

    Parameters
    ----------
    team : Team
        The members, on several hosts.
    nbytes : int
        How much there is to send.
    label : Label
        What this is for.
    """
    config = Config.read()
    crowded = any(team.exchange(b"1" if team.spin_us == 0 else b"", label))
    return choose(team.hosts, team.ranks, nbytes, config.between, config.between_chunk, crowded)
