"""Local SGD, and post-local SGD.

Each member does `every` steps of its optimizer with its own gradients; then all take the mean of
their parameters (Stich 2019, "Local SGD Converges Fast and Communicates Little"). Post-local
SGD (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD") trains synchronously
first, until the learning rate drops, say, and locally from there.

With H = ``every = 1`` both are synchronous SGD. The mean of parameters after a step with own
gradients, and a step with the mean of the gradients, are the same point for the linear rules
(SGD, Momentum), but rounded differently; for Adam and Adagrad they are different points. What
is meant is the second, so it is what is done: with H = 1 gradients are reduced before the
step, by the same `allreduce` and the same step as synchronous SGD takes, whose bits it gives.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mpiml.collectives.alike import guarded
from mpiml.collectives.averaging.periodic import Periodic, Step
from mpiml.collectives.averaging.replica import meeting_of
from mpiml.errors import UsageError
from mpiml.optim import Optimizer
from mpiml.whole import whole_number

__all__ = ["LocalSGD", "PostLocalSGD"]


class LocalSGD(Periodic):
    """Members train apart, and take the mean of their parameters now and then.

    Collective over the members: construction, `meet`, `load_state_dict`, and each `step` in
    which they meet: one in `every`. With ``every=1`` gradients are reduced instead, as in
    synchronous SGD, to the same bits.

    Parameters
    ----------
    params : Bucket, array or tree of arrays, float32 or float64
        NumPy or CuPy arrays, trained in place. At construction those of member 0 are given to
        all.
    optimizer : mpiml.optim.Optimizer
        Its state, momentum, is the member's own and is not averaged.
    every : int
        H, the number of steps from one mean to the next, >= 1; by default 16, that of
        post-local SGD.
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

        model = LocalSGD(weights, mpiml.optim.SGD(0.1), every=16)
        for batch in batches:
            model.step(gradient(model.params, batch))
        model.meet()
    """

    where = "LocalSGD"

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        *,
        every: int = 16,
        comm: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(params, optimizer, every, comm, name)

    @property
    def synchronous(self) -> bool:
        """Whether gradients are reduced in each step, instead of parameters now and then."""
        return self.every == 1

    def _joint(self) -> bool:
        return self.synchronous or super()._joint()

    def _plan(self, number: int) -> str:
        if self.synchronous:
            return self._called("gradients")
        return self._called(f"parameters after {number} steps")

    def _meet(self, plan: str) -> None:
        self._replica.mean(plan)
        self._reductions += 1

    def _advance(self, step: Step) -> None:
        if not self.synchronous:
            super()._advance(step)
            return
        mean = self._replica.reduced(step.grads, step.leaves, "mean", step.plan)
        self._reductions += 1
        self._local(mean, step.coefficients)
        self._since = 0

    def _meets_first(self) -> bool:
        return self.synchronous

    def _met_in(self, grads: Any) -> Any:
        return grads if self.synchronous else self._replica.bucket

    def _alike(self, state: Mapping[str, Any]) -> list[str]:
        if self.every == 1 or not state.get("apart", True):
            return list(self._trees())
        return [] if state["since"] else ["params"]


class PostLocalSGD(LocalSGD):
    """Synchronous SGD first, local SGD from a step on.

    Collective over the members: construction, `meet`, `load_state_dict`, and each `step` in
    which they meet: each one at first, one in `every` later.

    Parameters
    ----------
    params, optimizer, every, comm, name
        As for `LocalSGD`.
    until : int or callable
        How many steps are synchronous; or a function of the number of steps done before that
        returns whether members train apart from there on. It is asked before each step until
        it says so, and must say the same on all members.

    Raises
    ------
    UsageError
        An argument is out of range, or members differ. On all members.

    Examples
    --------
    ::

        model = PostLocalSGD(
            weights, optimizer, every=16, until=lambda done: optimizer.rate(done + 1) < 0.1
        )
    """

    where = "PostLocalSGD"

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        *,
        every: int = 16,
        until: int | Callable[[int], bool],
        comm: Any = None,
        name: str | None = None,
    ) -> None:
        self._until = until
        self._apart = False
        super().__init__(params, optimizer, every=every, comm=comm, name=name)

    @property
    def synchronous(self) -> bool:
        """Whether gradients are reduced in each step, instead of parameters now and then."""
        return self.every == 1 or not self._apart

    def _compared(self) -> dict[str, Any]:
        if callable(self._until):
            return {"until": "a function"}
        try:
            return {"until": whole_number(f"{self.where}: until", self._until, 0)}
        except UsageError as error:
            raise UsageError(
                f"{error}; or a function of the number of steps done before"
            ) from None

    def step(self, grads: Any) -> None:
        """Do one step with the gradients of this member; see `LocalSGD.step`.

        Collective over the members where they meet in it; otherwise local.
        """
        if not self._apart and not self._closed:
            where, meeting = f"{self.where}.step", meeting_of(grads, self._team)
            self._apart = guarded(self._team, where, self._over, meeting)
        super().step(grads)

    def _over(self) -> bool:
        until = self._until
        return bool(until(self._steps)) if callable(until) else self._steps >= until

    def _numbers(self) -> dict[str, Any]:
        return {**super()._numbers(), "apart": self._apart}

    def _resume(self, numbers: Mapping[str, Any]) -> None:
        super()._resume(numbers)
        self._apart = bool(numbers["apart"])
