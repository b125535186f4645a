"""Push-sum, and stochastic gradient push: averaging on directed graphs.

Kempe, Dobra and Gehrke 2003, "Gossip-based computation of aggregate information"; Assran et al.
2019, "Stochastic Gradient Push for Distributed Deep Learning", algorithm 1. Each member keeps a
pair: x, and a weight w that starts at 1. Both are mixed with column-stochastic weights, which keep
the sums over all members; z = x / w tends to the mean, on any connected directed graph and on
graphs that change.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpiml.arrays import namespace
from mpiml.collectives.alike import agree_on
from mpiml.collectives.allreducing import allreduce
from mpiml.collectives.averaging.periodic import Step
from mpiml.collectives.labels import Label
from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors.exchange import exchange_of
from mpiml.collectives.neighbors.leaves import Leaves
from mpiml.collectives.neighbors.reducing import mixed, static_edges
from mpiml.collectives.neighbors.trained import Neighbourly, schedule_for
from mpiml.collectives.trees import flatten, unflatten
from mpiml.optim import Optimizer
from mpiml.optim_step import apply

__all__ = ["SGP", "PushSum"]


class PushSum:
    """Arrays whose mean over all members is computed by messages to neighbours only.

    Collective over neighbours: `step`. Construction is collective over the members. All make
    the same number of steps.

    Parameters
    ----------
    values : array or tree of arrays
        Floating-point or complex numbers, of NumPy, CuPy, torch or JAX; this member's own.
        Copied.
    topology : Topology, Schedule or sequence of Topology
        Of as many members, connected and column-stochastic: ``mpiml.topology.push_sum``, or any
        that is doubly stochastic. A schedule goes by the number of the step.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    name : str, optional
        What messages call it. Compared among the members.

    Raises
    ------
    UsageError
        The topology is not column-stochastic or not connected; a leaf is no array of such
        numbers; members differ. On all of them.

    Attributes
    ----------
    steps : int
        How many have been done.
    weight : float
        w, of which the sum over all members stays their number.
    """

    def __init__(
        self, values: Any, topology: Any, comm: Any = None, name: str | None = None
    ) -> None:
        self._team = team = team_of(comm, "PushSum")
        self._name = name
        self.steps = 0
        self.weight = 1.0
        label = Label("PushSum", name=name)
        error: Exception | None = None
        said = text = ""
        try:
            self._schedule = schedule_for(topology, team.size, "column", "PushSum")
            said, text = f"topology={topology!r}", Leaves(values, None, "PushSum").layout.text
            leaves, self._treedef, _ = flatten(values, "PushSum")
            self._leaves = [_copied(leaf) for leaf in leaves]
        except Exception as caught:  # the others must hear of it
            error = caught
        cure = "Give the same topology, shapes and dtypes on every member."
        with team.round(label):
            agree_on(team, label.head, said, error, "topology and arrays", cure, label, text)
        self._exchange = exchange_of(team)

    def step(self) -> None:
        """Mix once with the neighbours: x <- W x, w <- W w.

        Collective over neighbours: it waits for those that it hears from, and for nobody else.
        """
        edges = static_edges(self._team, self._schedule, self.steps, "column", "PushSum")
        pair = [self._leaves, np.array(self.weight)]
        args = (self._team, self._exchange, edges, pair, None, self._name, "PushSum.step")
        self._leaves, weight = mixed(*args)
        self.weight = float(weight)
        self.steps += 1

    @property
    def value(self) -> Any:
        """Z = x / w, this member's estimate of the mean: new arrays like `values`."""
        return unflatten(self._treedef, [_over(leaf, self.weight) for leaf in self._leaves])

    @property
    def biased(self) -> Any:
        """x, of which the sum over all members stays what it was: not to be changed."""
        return unflatten(self._treedef, self._leaves)

    def __repr__(self) -> str:
        return f"<PushSum by {self._schedule!r}, {self.steps} steps, weight {self.weight:.4g}>"


class SGP(Neighbourly):
    """Stochastic gradient push: SGD whose parameters are averaged by push-sum.

    Collective over neighbours: `step`. Collective over the members: construction, `meet`,
    which gives all the mean of all, and `load_state_dict`.

    Each step does what algorithm 1 of Assran et al. says: x <- x - lr g(z), by the optimizer;
    then x and w are mixed, and z = x / w. `params` are z, where gradients are to be computed.

    Parameters
    ----------
    params, optimizer, comm, name
        As for `mpiml.collectives.averaging.LocalSGD`. Weight decay is of x.
    topology : Topology, Schedule or sequence of Topology
        Of as many members, connected and column-stochastic: ``mpiml.topology.push_sum``, or
        ``mpiml.topology.one_peer_exponential(n)``, with one message for each step.

    Raises
    ------
    UsageError
        The topology is not column-stochastic or not connected, or members differ. On all.
    """

    where = "SGP"
    kind = "column"

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        topology: Any,
        comm: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(params, optimizer, topology, comm, name)
        self._x = [leaf.copy(order="C") for leaf in self._replica.leaves]
        self._weight = 1.0

    @property
    def weight(self) -> float:
        """w, of which the sum over all members stays their number."""
        return self._weight

    def _advance(self, step: Step) -> None:
        edges = self._edges()  # before the step counts
        self._local(step.leaves, step.coefficients)
        pair = [*self._x, np.array(self._weight)]
        self._mix(pair, edges)
        self._weight = float(pair[-1])
        self._show()

    def _local(self, grads: list[Any], coefficients: Any) -> None:
        who, rule = self.optimizer.name, self.optimizer.rule
        for x, grad, state in zip(self._x, grads, self._states, strict=True):
            apply(who, rule, coefficients, x, grad, state)
        self._steps += 1
        self._since += 1
        self._here += 1

    def _show(self) -> None:
        for leaf, x in zip(self._replica.leaves, self._x, strict=True):
            leaf[...] = x / self._weight

    def _meet(self, plan: Any) -> None:
        pair = [*self._x, np.array(self._weight)]
        mean = allreduce(pair, "mean", self._team, name=plan)
        for x, new in zip(self._x, mean, strict=False):
            x[...] = new
        self._weight = float(mean[-1])
        self._reductions += 1
        self._show()

    def _trees(self) -> dict[str, list[Any]]:
        return {**super()._trees(), "biased": self._x}

    def _numbers(self) -> dict[str, Any]:
        return {**super()._numbers(), "weight": self._weight}

    def _resume(self, numbers: Mapping[str, Any]) -> None:
        super()._resume(numbers)
        self._weight = float(numbers["weight"])

    def _said(self, state: Mapping[str, Any], found: Mapping[str, list[Any]]) -> str:
        return super()._said({**state, "weight": 1.0}, found)  # each member has its own


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(leaf)
    copy = getattr(leaf, "clone", None) or leaf.copy
    return copy()


def _over(leaf: Any, weight: float) -> Any:
    if isinstance(leaf, np.ndarray):
        return np.divide(leaf, leaf.dtype.type(weight), out=np.empty_like(leaf))
    return namespace(leaf).divide(leaf, weight)
