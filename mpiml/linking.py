"""Builds a rank's link, with its bell in shared memory where that works."""

from typing import Any

from mpiml.config import Config
from mpiml.engine import Engine
from mpiml.transport import Bell, MpiLink, SharedBell, SleepBell

__all__ = ["link"]


def link(world: Any, engine: Engine, hosts: Any, config: Config, token: bytes) -> MpiLink:
    """Return the link of this rank. Collective over the program's ranks.

    Parameters
    ----------
    world
        The program's communicators.
    engine
        What takes frames in.
    hosts
        Which ranks share a host; pretended hosts (``MPIML_HOST_SIZE``) share nothing either.
    config
        What may be tuned.
    token
        Random bytes that the ranks of this host agree on.
    """
    me = engine.rank
    ranks = hosts.rows[hosts.host_of(me)].ranks
    lines = {rank: line for line, rank in enumerate(ranks)}
    path = f"/dev/shm/mpiml-{token.hex()}" if config.doorbell else None
    memory = world.prepare(path, lines)
    bell: Bell = SleepBell() if memory is None else SharedBell(memory, lines, me)
    return MpiLink(world.engine_comm, bell, engine.dispatch)
