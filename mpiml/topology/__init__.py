"""Who averages with whom, and with what weights: graphs, schedules and pairs of members.

A `Topology` says which members a member hears from in one round of averaging; a `Schedule`
gives a topology for each step. All of it is arithmetic: the same call on every member gives
the same value, and nothing here communicates.

    from mpiml import topology

    topology.ring(8)                        # each with the one before and the one after
    topology.one_peer_exponential(8)[step]  # one message per step, the mean after 3 steps
    topology.from_matrix(W)                 # x <- W x, refused unless it averages
"""

from mpiml.topology.graphs import (
    bipartite,
    complete,
    exponential,
    from_networkx,
    grid,
    ring,
    star,
)
from mpiml.topology.pairs import ActivePassive, RandomPairs
from mpiml.topology.schedule import Cycle, Schedule, as_schedule, one_peer_exponential
from mpiml.topology.value import Topology, from_matrix
from mpiml.topology.weights import metropolis, push_sum, uniform

__all__ = [
    "ActivePassive",
    "Cycle",
    "RandomPairs",
    "Schedule",
    "Topology",
    "as_schedule",
    "bipartite",
    "complete",
    "exponential",
    "from_matrix",
    "from_networkx",
    "grid",
    "metropolis",
    "one_peer_exponential",
    "push_sum",
    "ring",
    "star",
    "uniform",
]
