"""Builds a rank's link, with its bell in shared memory where that works."""

from typing import Any

from mpiml import threads
from mpiml.config import Config
from mpiml.engine import Engine
from mpiml.transport import Bell, FunneledLink, MpiLink, SharedBell, SleepBell

__all__ = ["bell_path", "link", "share"]


def share(
    world: Any, rank: int, hosts: Any, config: Config, token: bytes, keep: bool = False
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
    keep
        Let the file have its name: ranks of other programs are to map it too.

    Returns
    -------
    memory, lines
        The memory or None, and the line of each rank that has it.
    """
    ranks = hosts.rows[hosts.host_of(rank)].ranks
    lines = {rank: line for line, rank in enumerate(ranks)}
    path = bell_path(token) if config.doorbell else None
    return world.prepare(path, lines, keep), lines


def bell_path(token: bytes) -> str:
    """Return the file that the ranks of a host with this token share. Local."""
    return f"/dev/shm/mpiml-{token.hex()}"


def link(world: Any, engine: Engine, memory: Any, lines: dict[int, int]) -> MpiLink:
    """Return the link of this rank, with what `share` returned. Local."""
    bell: Bell = SleepBell() if memory is None else SharedBell(memory, lines, engine.rank)
    kind = FunneledLink if threads.funneled() else MpiLink
    return kind(world.engine_comm, bell, engine.dispatch)
