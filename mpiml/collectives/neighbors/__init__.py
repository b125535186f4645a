"""Averaging with neighbours only: who is slow delays those that hear from it, and nobody else.

Names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from mpiml.lazily import lazily

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

__getattr__, __dir__ = lazily(__name__, _HOME)
