"""Averaging with neighbours only: who is slow delays those that hear from it, and nobody else.

Names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpiml.later import refuse_attribute

if TYPE_CHECKING:
    from mpiml.collectives.neighbors.adpsgd import ADPSGD
    from mpiml.collectives.neighbors.dpsgd import DPSGD
    from mpiml.collectives.neighbors.hosts import hierarchical_neighbor_allreduce
    from mpiml.collectives.neighbors.pairs import PairGossip, gossip
    from mpiml.collectives.neighbors.pushsum import SGP, PushSum
    from mpiml.collectives.neighbors.reducing import neighbor_allreduce

__all__ = [
    "ADPSGD",
    "DPSGD",
    "SGP",
    "PairGossip",
    "PushSum",
    "gossip",
    "hierarchical_neighbor_allreduce",
    "neighbor_allreduce",
]

_HOME = {
    "ADPSGD": "adpsgd",
    "DPSGD": "dpsgd",
    "PairGossip": "pairs",
    "PushSum": "pushsum",
    "SGP": "pushsum",
    "gossip": "pairs",
    "hierarchical_neighbor_allreduce": "hosts",
    "neighbor_allreduce": "reducing",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        refuse_attribute(name, "mpiml.collectives.neighbors")
    value = getattr(import_module(f"mpiml.collectives.neighbors.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
