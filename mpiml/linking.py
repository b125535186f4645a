"""Builds a rank's link, with its bell in shared memory where that works."""

from typing import Any

from mpiml import threads
from mpiml.config import Config
from mpiml.engine import Engine
from mpiml.transport import Bell, FunneledLink, MpiLink, SharedBell, SleepBell

__all__ = ["link", "share"]


def share(
    world: Any, rank: int, hosts: Any, config: Config, token: bytes
) -> tuple[Any, dict[int, int]]:
    """Map the memory that the ranks of a host share. Collective over the program's ranks.

    Parameters
    ----------
    world
        The program's communicators.
    rank
        This rank.
    hosts
        Which ranks share a host; pretended hosts (``MPIML_HOST_SIZE``) share nothing either.
    config
        What may be tuned.
    token
        Random bytes that the ranks of this host agree on.

    Returns
    -------
    memory, lines
        The memory or None, and the line of each rank that has it.
    """
    ranks = hosts.rows[hosts.host_of(rank)].ranks
    lines = {rank: line for line, rank in enumerate(ranks)}
    path = f"/dev/shm/mpiml-{token.hex()}" if config.doorbell else None
    return world.prepare(path, lines), lines


def link(world: Any, engine: Engine, memory: Any, lines: dict[int, int]) -> MpiLink:
    """Return the link of this rank, with what `share` returned. Local."""
    bell: Bell = SleepBell() if memory is None else SharedBell(memory, lines, engine.rank)
    kind = FunneledLink if threads.funneled() else MpiLink
    return kind(world.engine_comm, bell, engine.dispatch)
