"""The way an operation takes: shared memory within a host, messages between hosts."""

from typing import Any

from mpiml.collectives.arena import make_arena
from mpiml.collectives.in_host import InHost, box_of
from mpiml.collectives.labels import Label
from mpiml.collectives.regions import Regions
from mpiml.collectives.team import Team
from mpiml.errors import SharedMemoryError

__all__ = ["open_channel"]


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
    if isinstance(arena, SharedMemoryError):
        raise arena
    result = arena.shared(nbytes) if shared else None
    return arena.segment(nbytes), result, InHost(team, arena, regions, shared, check)
