"""Elastic averaging: EASGD and EAMSGD.

Each member x_i is drawn to a center, and the center to the members, by the same force (Zhang,
Choromanska, LeCun 2015, "Deep Learning with Elastic Averaging SGD"). In the synchronous form,
with all x_i and the center of before on the right-hand side::

    x_i    -= lr * g_i + alpha * (x_i - center)
    center += alpha * sum(x_i - center)

In EAMSGD the local step has Nesterov's momentum, ``v = momentum * v - lr * g(x + momentum *
v)``, ``x += v``. Here, as in `mpiml.optim.Momentum`, the parameters that a member holds are the
point x + momentum * v at which gradients are taken; the force is that of x.

The range in which nothing swings ever wider, of quadratics up to a curvature h and p members,
follows from the eigenvalue -1 of the synchronous step: with e = lr * h, or with momentum e /
(1 + momentum - momentum * e), ``alpha <= (4 - 2 e) / (2 + p (2 - e))``. For one member at a
time it is the published range of the round-robin scheme, (4 - 2 e) / (4 - e). Exchanging less
often does not narrow it without momentum; with much of it, it may.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiml.collectives.averaging.periodic import Periodic, Step
from mpiml.collectives.averaging.replica import difference, scaled
from mpiml.collectives.trees import flatten, unflatten
from mpiml.errors import UsageError
from mpiml.optim import SGD, Momentum, Optimizer

__all__ = ["Elastic", "elastic_difference", "elastic_exchange", "elastic_limit"]

_BETA = 0.9  # the published force of all members together
_ROUND = 1 + 1e-12  # a limit may be computed in another order


class _Plan(NamedTuple):
    name: str
    alpha: float


class Elastic(Periodic):
    """Members train apart, drawn to a center that is drawn to them: EASGD and EAMSGD.

    Collective over the members: construction, `meet`, `load_state_dict`, and each `step` in
    which they meet: the first, and then one in `every`.

    Parameters
    ----------
    params : Bucket, array or tree of arrays, float32 or float64
        NumPy or CuPy arrays, trained in place. At construction those of member 0 are given to
        all, and to the center.
    optimizer : mpiml.optim.Optimizer
        The local one: ``SGD(lr)`` is EASGD, ``Momentum(lr, 0.99, nesterov=True)`` EAMSGD.
    alpha : float, optional
        The force, > 0; 0.9 / members unless this or `rho` is given.
    rho : float, optional
        The force is ``lr * rho``, > 0, with the learning rate of the step.
    every : int
        tau, the number of steps from one exchange to the next, >= 1.
    curvature : float
        The largest curvature of the loss, for which learning rate and force are checked; > 0.
        Give a smaller one where a learning rate above 2 is meant.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node, or the
        members of the bucket.
    name : str, optional
        What messages call it. Compared among the members.

    Raises
    ------
    UsageError
        An argument is out of range; ``members * alpha`` exceeds 1, or alpha `elastic_limit`;
        or members differ. On all members.

    Examples
    --------
    ::

        model = Elastic(weights, mpiml.optim.SGD(0.1), every=16)
        for batch in batches:
            model.step(gradient(model.params, batch))
        evaluate(model.center)
    """

    where = "Elastic"

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        *,
        alpha: float | None = None,
        rho: float | None = None,
        every: int = 1,
        curvature: float = 1.0,
        comm: Any = None,
        name: str | None = None,
    ) -> None:
        self._alpha, self._rho, self._curvature = alpha, rho, curvature
        self._rate = 0.0  # of the step before
        self._fine = (math.nan, math.nan)  # rate and force that have been checked
        super().__init__(params, optimizer, every, comm, name)
        self._center = [leaf.copy() for leaf in self._replica.leaves]
        self._pulls: list[Any] = []
        self._total: list[Any] = []
        self._since = self.every  # the first step is one with an exchange

    @property
    def center(self) -> Any:
        """The center, the same bits on all members: what is evaluated in the end."""
        return self._replica.whole(self._center)

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
                _number(f"{self.where}: {name}", value, "a number > 0", 0.0, open_end=True)
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
        limit = elastic_limit(eta, p, momentum, nesterov=nesterov)
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

    def _meets_first(self) -> bool:
        return True

    def _plan(self, number: int) -> _Plan:
        alpha = self._force(max(number, 1))
        after = "" if self.every == 1 else f"step {number}, "
        return _Plan(self._called(f"{after}alpha={alpha!r}"), alpha)

    def _advance(self, step: Step) -> None:
        pulls = None if step.plan is None else self._exchange(step.plan)
        self._local(step.leaves, step.coefficients)  # at the point of before, as it was checked
        self._rate = step.coefficients.rate
        if pulls is not None:
            self._pull(pulls)

    def _meet(self, plan: _Plan) -> None:
        self._pull(self._exchange(plan))

    def _exchange(self, plan: _Plan) -> list[Any]:
        """Move the center; return how far it draws the parameters. Collective."""
        if not self._pulls:  # memory that is not asked for anew in each step
            self._pulls = [center.copy() for center in self._center]
            self._total = [center.copy() for center in self._center]
        parts = zip(self._positions(), self._center, self._pulls, strict=True)
        pulls = [difference(x, center, plan.alpha, out=pull) for x, center, pull in parts]
        total = self._replica.reduced(None, pulls, "sum", plan.name, out=self._total)
        self._reductions += 1
        self._since = 0
        for center, moved in zip(self._center, total, strict=True):
            center += moved
        return pulls

    def _pull(self, pulls: list[Any]) -> None:
        for leaf, pull in zip(self._replica.leaves, pulls, strict=True):
            leaf -= pull

    def close(self) -> None:
        """Let go of the state; parameters and center stay. Local: call it on every member."""
        super().close()
        self._pulls, self._total = [], []

    # -- checkpoints ---------------------------------------------------------------------------

    def _numbers(self) -> dict[str, Any]:
        return {**super()._numbers(), "rate": self._rate}

    def _resume(self, numbers: Mapping[str, Any]) -> None:
        super()._resume(numbers)
        self._rate = float(numbers["rate"])

    def _trees(self) -> dict[str, list[Any]]:
        return {**super()._trees(), "center": self._center}

    def _alike(self, state: Mapping[str, Any]) -> list[str]:
        return ["center"]


def elastic_difference(x: Any, center: Any, alpha: float) -> Any:
    """Return ``alpha * (x - center)``: what a member gives to the center, and gives up.

    Local: no MPI. With `elastic_exchange` the asynchronous protocol: a member reads the
    center, takes the difference, subtracts it from its own and has it added to the center,
    every few steps, and waits for nobody.

    Parameters
    ----------
    x, center : array or tree of arrays
        Alike; NumPy or CuPy.
    alpha : float
        In [0, 1]; see `elastic_limit`, for one member.

    Returns
    -------
    array or tree of arrays
        New ones, like `x`.

    Raises
    ------
    UsageError
        The trees differ, or alpha is out of range.
    """
    ours, theirs, treedef, alpha = _pair(x, center, alpha, "elastic_difference")
    pairs = zip(ours, theirs, strict=True)
    return unflatten(treedef, [difference(a, b, alpha) for a, b in pairs])


def elastic_exchange(x: Any, center: Any, alpha: float) -> tuple[Any, Any]:
    """Return member and center after one exchange: what one has lost the other has won.

    Local: no MPI. Arguments and errors as of `elastic_difference`.

    Returns
    -------
    x, center : array or tree of arrays
        New ones.
    """
    ours, theirs, treedef, alpha = _pair(x, center, alpha, "elastic_exchange")
    moved = [difference(a, b, alpha) for a, b in zip(ours, theirs, strict=True)]
    ours, theirs = [a.copy() for a in ours], [b.copy() for b in theirs]
    for a, b, d in zip(ours, theirs, moved, strict=True):
        a -= d
        b += d
    return unflatten(treedef, ours), unflatten(treedef, theirs)


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
    eta = _number(f"{where}: eta", eta, "a number >= 0", 0.0)
    momentum = _number(f"{where}: momentum", momentum, "a number in [0, 1)", 0.0, 1.0)
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


def _pair(
    x: Any, center: Any, alpha: float, where: str
) -> tuple[list[Any], list[Any], Any, float]:
    alpha = _number(f"{where}: alpha", alpha, "a number in [0, 1]", 0.0, 1.0)
    ours, treedef, paths = flatten(x, where)
    theirs, other, _ = flatten(center, where)
    if other != treedef:
        raise UsageError(f"{where}: expected a center like x, {treedef}, got {other}")
    for a, b, path in zip(ours, theirs, paths, strict=True):
        if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype or a.dtype.kind != "f":
            raise UsageError(
                f"{where}: expected floating-point arrays of one shape and dtype, got x{path} "
                f"{a.dtype}{tuple(a.shape)} and center{path} {b.dtype}{tuple(b.shape)}"
            )
    return ours, theirs, treedef, alpha


def _number(
    where: str,
    value: Any,
    expected: str,
    least: float,
    most: float = math.inf,
    *,
    open_end: bool = False,
) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (
        math.isfinite(number) and least <= number <= most and (number > least or not open_end)
    ):
        raise UsageError(f"{where}: expected {expected}, got {value!r}")
    return number
