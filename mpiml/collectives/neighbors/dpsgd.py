"""D-PSGD: decentralized parallel SGD.

Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?", algorithm 1.
Each member has parameters x of its own; W is doubly stochastic.

- ``"awc"``, adapt while communicating, the published order: x <- W x - lr g(x);
- ``"atc"``, adapt then combine: x <- W (x - lr g(x)).
"""

from typing import Any, Literal

from mpiml.collectives.averaging.periodic import Step
from mpiml.collectives.neighbors.trained import Neighbourly
from mpiml.errors import UsageError
from mpiml.optim import Optimizer

__all__ = ["DPSGD"]


class DPSGD(Neighbourly):
    """Members take a step of their own, and average with their neighbours, at each step.

    Collective over neighbours: `step`. Collective over the members: construction, `meet`,
    which gives all the mean of all, and `load_state_dict`.

    Parameters
    ----------
    params, optimizer, comm, name
        As for `mpiml.collectives.averaging.LocalSGD`. With rules other than SGD, what SGD
        subtracts is replaced by what the rule does; its state is not averaged.
    topology : Topology, Schedule or sequence of Topology
        Of as many members, connected and doubly stochastic: ``mpiml.topology.ring(n)``.
    order : {"awc", "atc"}
        Whether the step is taken from the average, as published, or before it, which then
        averages the step too. Gradients are those at `params`, before either.

    Raises
    ------
    UsageError
        The topology is not doubly stochastic or not connected, or members differ. On all.

    Examples
    --------
    ::

        model = DPSGD(weights, mpiml.optim.SGD(0.1), mpiml.topology.ring(8))
        for batch in batches:
            model.step(gradient(model.params, batch))
        model.meet()
    """

    where = "DPSGD"
    kind = "doubly"

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        topology: Any,
        order: Literal["awc", "atc"] = "awc",
        comm: Any = None,
        name: str | None = None,
    ) -> None:
        self.order = order
        super().__init__(params, optimizer, topology, comm, name)

    def _compared(self) -> dict[str, Any]:
        if self.order not in ("awc", "atc"):
            raise UsageError(f"DPSGD: order: expected 'awc' or 'atc', got {self.order!r}")
        return {**super()._compared(), "order": self.order}

    def _advance(self, step: Step) -> None:
        edges, leaves = self._edges(), self._replica.leaves  # before the step counts
        if self.order == "awc":
            self._mix(leaves, edges)
            self._local(step.leaves, step.coefficients)
        else:
            self._local(step.leaves, step.coefficients)
            self._mix(leaves, edges)
