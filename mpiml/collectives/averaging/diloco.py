"""DiLoCo: many steps of an inner optimizer, then one of an outer optimizer on what they moved.

Each member does `every` steps of the inner optimizer, AdamW, from the outer parameters. The
mean of how far the members have come from there, old minus new, is the gradient of one step of
the outer optimizer, gradient descent with Nesterov momentum, from whose result all go on
(Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
algorithm 1). The state of the inner optimizer goes on from round to round.

The differences are reduced, not the parameters: the same in exact arithmetic, and nearer to it
in floating point, where a difference is small beside the parameter.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiml.collectives.averaging.periodic import Periodic
from mpiml.collectives.averaging.replica import difference
from mpiml.collectives.optimizers.shards import check_optimizer
from mpiml.optim import Coefficients, Momentum, Optimizer
from mpiml.optim_step import apply

__all__ = ["DiLoCo"]


class _Plan(NamedTuple):
    name: str
    coefficients: Coefficients


class DiLoCo(Periodic):
    """Members train apart, and follow an outer optimizer every few hundred steps.

    Collective over the members: construction, `meet`, `load_state_dict`, and each `step` in
    which they meet: one in `every`.

    Parameters
    ----------
    params : Bucket, array or tree of arrays, float32 or float64
        NumPy or CuPy arrays, trained in place. At construction those of member 0 are given to
        all.
    inner : mpiml.optim.Optimizer
        The local one, as a rule AdamW.
    outer : mpiml.optim.Optimizer, optional
        What is done with the mean of the differences; by default the published
        ``Momentum(0.7, 0.9, nesterov=True)``. ``SGD(1.0)`` is local SGD, within rounding.
    every : int
        H, the number of inner steps of a round, >= 1.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node, or the
        members of the bucket.
    name : str, optional
        What messages call it. Compared among the members.

    Raises
    ------
    UsageError
        An argument is out of range, or members differ. On all members.

    Examples
    --------
    ::

        model = DiLoCo(weights, mpiml.optim.AdamW(4e-4), every=500)
        for batch in batches:
            model.step(gradient(model.params, batch))
        model.statistics()["bytes_saved"]
    """

    where = "DiLoCo"

    def __init__(
        self,
        params: Any,
        inner: Optimizer,
        outer: Optimizer | None = None,
        *,
        every: int = 500,
        comm: Any = None,
        name: str | None = None,
    ) -> None:
        self.outer = Momentum(0.7, 0.9, nesterov=True) if outer is None else outer
        self._rounds = 0
        super().__init__(params, inner, every, comm, name)
        self._old = [leaf.copy() for leaf in self._replica.leaves]
        self._outer_states = [self.outer.init(leaf) for leaf in self._old]

    @property
    def outer_params(self) -> Any:
        """The parameters that the present round began with: the same bits on all members."""
        return self._replica.whole(self._old)

    @property
    def rounds(self) -> int:
        """How many outer steps have been done."""
        return self._rounds

    def _compared(self) -> dict[str, Any]:
        return {"outer": check_optimizer(self.outer, f"{self.where}: outer")}

    def _plan(self, number: int) -> _Plan:
        outer = self._rounds + 1
        said = f"round {outer} after {number} steps, {self.outer.described(outer)}"
        return _Plan(self._called(said), self.outer.coefficients(outer))

    def _meet(self, plan: _Plan) -> None:
        leaves = self._replica.leaves
        moved = [difference(old, new) for old, new in zip(self._old, leaves, strict=True)]
        mean = self._replica.reduced(None, moved, "mean", plan.name, out=moved)
        self._reductions += 1
        who, rule = self.outer.name, self.outer.rule
        parts = zip(self._old, leaves, mean, self._outer_states, strict=True)
        for old, leaf, gradient, state in parts:
            apply(who, rule, plan.coefficients, old, gradient, state)
            leaf[...] = old
        self._rounds += 1

    def _numbers(self) -> dict[str, Any]:
        return {**super()._numbers(), "rounds": self._rounds}

    def _resume(self, numbers: Mapping[str, Any]) -> None:
        super()._resume(numbers)
        self._rounds = int(numbers["rounds"])

    def _trees(self) -> dict[str, list[Any]]:
        outer = self._by_name(self.outer, self._outer_states, "outer ")
        return {**super()._trees(), "outer params": self._old, **outer}

    def _optimizers(self) -> dict[str, Optimizer]:
        return {**super()._optimizers(), "outer": self.outer}

    def _alike(self, state: Mapping[str, Any]) -> list[str]:
        return [name for name in self._trees() if name.startswith("outer ")]

    def close(self) -> None:
        """Let go of the state; parameters stay. Local: call it on every member."""
        super().close()
        self._outer_states = [() for _ in self._old]

    def statistics(self) -> dict[str, Any]:
        """Return what `Periodic.statistics` does, and ``"rounds"``."""
        return {**super().statistics(), "rounds": self._rounds}
