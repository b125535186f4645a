"""Elastic averaging: EASGD and EAMSGD.

Each member x_i is drawn to a center, and the center to the members, by the same force (Zhang,
Choromanska, LeCun 2015, "Deep Learning with Elastic Averaging SGD"). In the synchronous form,
with all x_i and the center of before on the right-hand side::

    x_i    -= lr * g_i + alpha * (x_i - center)
    center += alpha * sum(x_i - center)

In EAMSGD the local step has Nesterov's momentum, ``v = momentum * v - lr * g(x + momentum *
v)``, ``x += v``. Here, as in `mpiml.optim.Momentum`, the parameters that a member holds are the
point x + momentum * v at which gradients are taken; the force is that of x.

`mpiml.collectives.averaging.force` has the range in which that is stable, and
`mpiml.collectives.averaging.elastic_async` the form in which no member waits for another.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiml.collectives.averaging.force import Drawn, number_in
from mpiml.collectives.averaging.replica import difference
from mpiml.collectives.trees import flatten, unflatten, unlike
from mpiml.errors import UsageError
from mpiml.optim import Optimizer

__all__ = ["Elastic", "elastic_difference", "elastic_exchange"]


class _Plan(NamedTuple):
    name: str
    alpha: float


class Elastic(Drawn):
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
        super().__init__(params, optimizer, alpha, rho, every, curvature, comm, name)
        self._center = [leaf.copy() for leaf in self._replica.leaves]
        self._total: list[Any] = []

    @property
    def center(self) -> Any:
        """The center, the same bits on all members: what is evaluated in the end."""
        return self._replica.whole(self._center)

    # -- steps ---------------------------------------------------------------------------------

    def _meets_first(self) -> bool:
        return True

    def _plan(self, number: int) -> _Plan:
        alpha = self._force(max(number, 1))
        after = "" if self.every == 1 else f"step {number}, "
        return _Plan(self._called(f"{after}alpha={alpha!r}"), alpha)

    def _exchange(self, plan: _Plan) -> list[Any]:
        """Move the center; return how far it draws the parameters. Collective."""
        if not self._total:
            self._total = [center.copy() for center in self._center]
        pulls = self._drawn(self._center, plan.alpha)
        total = self._replica.reduced(None, pulls, "sum", plan.name, out=self._total)
        self._reductions += 1
        self._since = 0
        for center, moved in zip(self._center, total, strict=True):
            center += moved
        return pulls

    def close(self) -> None:
        """Let go of the state; parameters and center stay. Local: call it on every member."""
        super().close()
        self._total = []

    # -- checkpoints ---------------------------------------------------------------------------

    def _trees(self) -> dict[str, list[Any]]:
        return {**super()._trees(), "center": self._center}

    def _alike(self, state: Mapping[str, Any]) -> list[str]:
        return ["center"]


def elastic_difference(x: Any, center: Any, alpha: float) -> Any:
    """Return ``alpha * (x - center)``: what a member gives to the center, and gives up.

    Local: no MPI. With `elastic_exchange` the asynchronous protocol, for a center that is kept
    elsewhere than `AsyncElastic` keeps it: a member reads the center, takes the difference,
    subtracts it from its own and has it added to the center, every few steps.

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


def _pair(
    x: Any, center: Any, alpha: float, where: str
) -> tuple[list[Any], list[Any], Any, float]:
    alpha = number_in(f"{where}: alpha", alpha, "a number in [0, 1]", 0.0, 1.0)
    ours, treedef, paths = flatten(x, where)
    theirs, other, _ = flatten(center, where)
    if other != treedef:
        raise UsageError(f"{where}: expected a center like x, {unlike(treedef, other)}")
    for a, b, path in zip(ours, theirs, paths, strict=True):
        if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype or a.dtype.kind != "f":
            raise UsageError(
                f"{where}: expected floating-point arrays of one shape and dtype, got x{path} "
                f"{a.dtype}{tuple(a.shape)} and center{path} {b.dtype}{tuple(b.shape)}"
            )
    return ours, theirs, treedef, alpha
