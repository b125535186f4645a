"""Builds a rank's link: its bell in shared memory where that works, and a probe that does."""

from typing import Any

from mpiml.config import Config
from mpiml.engine import Engine
from mpiml.transport import Bell, MpiLink, SharedBell, SleepBell

__all__ = ["link"]


def link(world: Any, engine: Engine, hosts: Any, config: Config) -> MpiLink:
    """Return the link of this rank. Collective over the program's ranks."""
    bell: Bell = SleepBell()
    shared = world.bell_memory() if config.doorbell else None
    if shared is not None:
        memory, lines = shared
        bell = SharedBell(memory, lines, engine.rank)
    matched = config.matched_probe == "on" or (
        config.matched_probe == "auto" and world.matched_probe_works()
    )
    return MpiLink(world.engine_comm, bell, engine.dispatch, matched)
