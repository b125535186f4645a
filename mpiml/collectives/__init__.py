"""Collective operations on arrays: buckets in shared memory, and what reduces them.

Names are loaded when they are first used: this package brings NumPy and optree along.
"""

from typing import TYPE_CHECKING

from mpiml.lazily import lazily

if TYPE_CHECKING:
    from mpiml.collectives.allreducing import allreduce
    from mpiml.collectives.bucket import Bucket
    from mpiml.collectives.explaining import explain
    from mpiml.collectives.neighbors.hosts import hierarchical_neighbor_allreduce
    from mpiml.collectives.neighbors.reducing import neighbor_allreduce
    from mpiml.collectives.onesided.ring_model import RingModel
    from mpiml.collectives.onesided.shared_model import SharedModel
    from mpiml.collectives.onesided.window import Window
    from mpiml.collectives.optimizers.fused import FusedOptimizer
    from mpiml.collectives.optimizers.sharded import ShardedOptimizer

__all__ = [
    "Bucket",
    "FusedOptimizer",
    "RingModel",
    "ShardedOptimizer",
    "SharedModel",
    "Window",
    "allreduce",
    "explain",
    "hierarchical_neighbor_allreduce",
    "neighbor_allreduce",
]

_HOME = {
    "Bucket": "bucket",
    "FusedOptimizer": "optimizers.fused",
    "RingModel": "onesided.ring_model",
    "SharedModel": "onesided.shared_model",
    "ShardedOptimizer": "optimizers.sharded",
    "Window": "onesided.window",
    "allreduce": "allreducing",
    "explain": "explaining",
    "hierarchical_neighbor_allreduce": "neighbors.hosts",
    "neighbor_allreduce": "neighbors.reducing",
}
_ROOMS = ("averaging", "compression", "neighbors", "onesided", "optimizers", "stragglers")

__getattr__, __dir__ = lazily(__name__, _HOME, _ROOMS)
