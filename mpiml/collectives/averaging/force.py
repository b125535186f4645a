"""The force of elastic averaging, and the range in which it is stable.

Zhang, Choromanska, LeCun 2015, "Deep Learning with Elastic Averaging SGD": a member x is drawn
to the center by ``alpha * (x - center)``, and the center to it by the same.

The range in which nothing swings ever wider, of quadratics up to a curvature h and p members,
follows from the eigenvalue -1 of the synchronous step: with e = lr * h, or with momentum e /
(1 + momentum - momentum * e), ``alpha <= (4 - 2 e) / (2 + p (2 - e))``. For one member at a
time it is the published range of the round-robin scheme, (4 - 2 e) / (4 - e). Exchanging less
often does not narrow it without momentum; with momentum that has not been tried.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mpiml.arrays import namespace
from mpiml.collectives.averaging.periodic import Periodic, Step
from mpiml.collectives.averaging.replica import beside, difference, scaled
from mpiml.errors import UsageError
from mpiml.optim import SGD, Momentum, Optimizer

__all__ = ["Drawn", "elastic_limit", "number_in"]

_BETA = 0.9  # the published force of all members together
_ROUND = 1 + 1e-12  # a limit may be computed in another order


class Drawn(Periodic):
    """A member that is drawn to a center: what the synchronous and asynchronous form share.

    Parameters as of `Elastic`.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        alpha: float | None,
        rho: float | None,
        every: int,
        curvature: float,
        comm: Any,
        name: str | None,
    ) -> None:
        self._alpha, self._rho, self._curvature = alpha, rho, curvature
        self._rate = 0.0  # of the step before
        self._fine = (math.nan, math.nan)  # rate and force that have been checked
        super().__init__(params, optimizer, every, comm, name)
        self._pulls: list[Any] = []
        self._since = self.every  # the first step is one with an exchange

    @property
    def positions(self) -> Any:
        """What the center draws: the parameters, or where they look ahead from, as new arrays."""
        own = self._replica.leaves
        found = zip(self._positions(), own, strict=True)
        return self._replica.whole([x.copy() if x is leaf else x for x, leaf in found])

    @property
    def alpha(self) -> float:
        """The force in the next step."""
        return self._force(self._steps + 1)

    def _positions(self) -> list[Any]:
        leaves = self._replica.leaves
        if not (isinstance(self.optimizer, Momentum) and self.optimizer.nesterov):
            return leaves
        ahead = self._rate * self.optimizer.momentum  # the buffer holds -v / lr
        found = [scaled(buffer, ahead) for (buffer,) in self._states]
        for x, leaf in zip(found, leaves, strict=True):
            x += leaf
        return found

    # -- the force -----------------------------------------------------------------------------

    def _compared(self) -> dict[str, Any]:
        if self._alpha is not None and self._rho is not None:
            raise UsageError(
                f"{self.where}: expected alpha or rho, of which alpha = lr * rho follows, got "
                f"alpha={self._alpha!r} and rho={self._rho!r}"
            )
        given = {"alpha": self._alpha, "rho": self._rho, "curvature": self._curvature}
        for name, value in given.items():
            if value is not None:
                number_in(f"{self.where}: {name}", value, "a number > 0", 0.0, open_end=True)
        self._force(1)
        return given

    def _force(self, number: int) -> float:
        """Return the force in a step, from 1, that goes with its learning rate."""
        rate = self.optimizer.rate(number)
        if self._rho is not None:
            alpha = rate * self._rho
        else:
            alpha = _BETA / self.members if self._alpha is None else float(self._alpha)
        if (rate, alpha) != self._fine:
            self._check(rate, alpha)
            self._fine = (rate, alpha)
        return alpha

    def _check(self, rate: float, alpha: float) -> None:
        p, optimizer = self.members, self.optimizer
        if p * alpha > _ROUND:
            raise UsageError(
                f"{self.where}: alpha: expected at most 1 / members, {1 / p:.4g}, got {alpha:.4g}: "
                f"{p} members would draw the center by beta = {p * alpha:.4g}, beyond their mean. "
                "Lower alpha or rho."
            )
        if not isinstance(optimizer, SGD | Momentum):  # no range is known
            return
        eta = rate * (self._curvature + optimizer.weight_decay)
        momentum, nesterov = 0.0, True
        if isinstance(optimizer, Momentum):
            momentum, nesterov = optimizer.momentum, optimizer.nesterov
        try:
            limit = elastic_limit(eta, p, momentum, nesterov=nesterov)
        except UsageError as error:
            text = str(error).removeprefix("elastic_limit: ")
            raise UsageError(f"{self.where}: optimizer: {text}") from None
        if alpha > limit * _ROUND:
            raise UsageError(
                f"{self.where}: alpha: expected at most {limit:.4g} for {p} members, "
                f"lr={rate:.4g} and the curvature {self._curvature:.4g}, got {alpha:.4g}: member "
                "and center would swing ever wider. Lower alpha or the learning rate; or, where "
                "the loss is less curved, give curvature=."
            )

    # -- steps ---------------------------------------------------------------------------------

    def _joint(self) -> bool:
        return self._since >= self.every

    def _advance(self, step: Step) -> None:
        pulls = None if step.plan is None else self._exchange(step.plan)
        self._local(step.leaves, step.coefficients)  # at the point of before, as it was checked
        self._rate = step.coefficients.rate
        if pulls is not None:
            self._pull(pulls)

    def _meet(self, plan: Any) -> None:
        self._pull(self._exchange(plan))

    @abstractmethod
    def _exchange(self, plan: Any) -> list[Any]:
        """Move the center; return how far it draws the parameters."""

    def _drawn(self, center: Sequence[Any], alpha: float) -> list[Any]:
        """Return ``alpha * (x - center)`` for each array, until the next call."""
        if not self._pulls:  # memory that is not asked for anew in each exchange
            leaves = self._replica.leaves
            self._pulls = [namespace(leaf).empty_like(leaf, order="C") for leaf in leaves]
        parts = zip(self._positions(), center, self._pulls, strict=True)
        return [difference(x, beside(x, c), alpha, out=pull) for x, c, pull in parts]

    def _pull(self, pulls: list[Any]) -> None:
        for leaf, pull in zip(self._replica.leaves, pulls, strict=True):
            leaf -= pull

    def close(self) -> None:
        """Let go of the state; parameters and center stay. Local: call it on every member."""
        super().close()
        self._pulls = []

    # -- checkpoints ---------------------------------------------------------------------------

    def _numbers(self) -> dict[str, Any]:
        return {**super()._numbers(), "rate": self._rate}

    def _resume(self, numbers: Mapping[str, Any]) -> None:
        super()._resume(numbers)
        self._rate = float(numbers["rate"])


def elastic_limit(
    eta: float, members: int = 1, momentum: float = 0.0, *, nesterov: bool = True
) -> float:
    """Return the largest force for which elastic averaging of quadratics is stable.

    Local: no MPI.

    Parameters
    ----------
    eta : float
        Learning rate times the largest curvature, >= 0; without momentum at most 2.
    members : int
        How many act on the center at once; 1: one after another, as without a barrier.
    momentum : float
        Of the local step, in [0, 1).
    nesterov : bool
        Whether its gradient is taken ahead.

    Returns
    -------
    float
        At most ``1 / members``, beyond which the center would leave the members' mean.

    Raises
    ------
    UsageError
        The local step alone is unstable, or an argument is out of range.
    """
    where = "elastic_limit"
    eta = number_in(f"{where}: eta", eta, "a number >= 0", 0.0)
    momentum = number_in(f"{where}: momentum", momentum, "a number in [0, 1)", 0.0, 1.0)
    most = (2 + 2 * momentum) / (1 + 2 * momentum) if nesterov else 2 + 2 * momentum
    if momentum == 1 or members < 1:
        raise UsageError(
            f"{where}: expected momentum below 1 and at least one member, got {momentum!r} and "
            f"{members!r}"
        )
    if eta > most * _ROUND:
        raise UsageError(
            f"{where}: expected eta, learning rate times curvature, in 0..{most:.4g} with the "
            f"momentum {momentum:.4g}, got {eta:.4g}: beyond that each local step moves farther "
            "than the one before. Lower the learning rate; or, where the loss is less curved, "
            "give its curvature."
        )
    e = eta / (1 + momentum - momentum * eta if nesterov else 1 + momentum)
    return min(1 / members, max(4 - 2 * e, 0.0) / (2 + members * (2 - e)))


def number_in(
    where: str,
    value: Any,
    expected: str,
    least: float,
    most: float = math.inf,
    *,
    open_end: bool = False,
) -> float:
    """Return a number from `least` to `most`; with `open_end` not `least` itself. Local.

    Raises
    ------
    UsageError
        It is none, or outside.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (
        math.isfinite(number) and least <= number <= most and (number > least or not open_end)
    ):
        raise UsageError(f"{where}: expected {expected}, got {value!r}")
    return number
