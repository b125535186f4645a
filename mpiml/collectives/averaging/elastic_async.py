"""Asynchronous elastic averaging: EASGD and EAMSGD in which no member waits for another.

Zhang, Choromanska, LeCun 2015, "Deep Learning with Elastic Averaging SGD", algorithms 1 and 2:
in the first of its steps and then in every tau-th, a member reads the center and does ::

    d = alpha * (x - center)
    x -= d;  center += d;  x -= lr * g

with the gradient of before, and with momentum as in `mpiml.collectives.averaging.elastic`. The
published master is a `SharedModel` here, to which each member adds by itself.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpiml.arrays import namespace
from mpiml.collectives.averaging.force import Drawn
from mpiml.collectives.averaging.replica import put
from mpiml.collectives.onesided.shared_model import SharedModel
from mpiml.collectives.trees import host_array
from mpiml.optim import Optimizer

__all__ = ["AsyncElastic"]


class AsyncElastic(Drawn):
    """Members train at their own pace, drawn to a center in shared memory: asynchronous EASGD.

    Collective over the members: construction, `finish`, `load_state_dict`, `close`. All else is
    local, `step` too: members make as many steps as they like, and none waits for another.

    What a member gives up in an exchange the center gets, to the rounding of one addition: it
    is added component by component, atomically, and nothing of another member is lost. The
    center is read without a lock, so that a read may see another's exchange in some components
    and not yet in others; each component's two changes cancel all the same.

    On several hosts the center lives on that of member 0. A member elsewhere waits in an
    exchange until what it gave the last time is there, and reads the center; only that host's
    service answers, no member has to.

    The force is checked against the range of members that exchange all at once, `elastic_limit`
    for their number: nothing keeps them from doing so. It knows of no delay between the read of
    a center and the addition to it; see `statistics` for how many exchanges of others came
    between.

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
        tau, the number of a member's steps from one exchange to the next, >= 1.
    curvature : float
        The largest curvature of the loss, for which learning rate and force are checked; > 0.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node, or the
        members of the bucket.
    fallback : bool
        Without shared memory (``/dev/shm`` too small) let each process be a host of its own,
        instead of failing.
    name : str, optional
        What messages call it. Compared among the members.

    Raises
    ------
    UsageError
        An argument is out of range; ``members * alpha`` exceeds 1, or alpha `elastic_limit`;
        or members differ. On all members.
    SharedMemoryError
        A host has no room for the center, and `fallback` is off. On all members.

    Examples
    --------
    ::

        with AsyncElastic(weights, mpiml.optim.SGD(0.1), every=16) as model:
            for batch in batches:
                model.step(gradient(model.params, batch))
            center = model.finish()
        evaluate(center)
    """

    where = "AsyncElastic"

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
        fallback: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(params, optimizer, alpha, rho, every, curvature, comm, name)
        self._exchanges = 0
        self._kept: list[Any] = []  # the center, when it was last looked at
        leaves = self._replica.leaves
        like = [np.broadcast_to(np.zeros((), a.dtype), a.shape) for a in leaves]
        self._model = SharedModel(self._team, like, fallback=fallback, name=name)
        self._start(leaves)

    def _start(self, center: list[Any]) -> None:
        """Set the center to that of member 0, for all. Collective over the members."""
        if self._team.index == 0:
            self._model.assign([host_array(leaf) for leaf in center])
        self._model.barrier()

    # -- the center ----------------------------------------------------------------------------

    @property
    def center(self) -> Any:
        """A copy of the center as it is now, between two exchanges, with all of this member's.

        Local. After `close` the last one.
        """
        found = [namespace(leaf).empty_like(leaf) for leaf in self._replica.leaves]
        put(found, self._looked())
        return self._replica.whole(found)

    def _looked(self) -> list[Any]:
        if not self._closed:
            self._kept, _ = self._model.snapshot()
        return self._kept

    # -- steps ---------------------------------------------------------------------------------

    def step(self, grads: Any) -> None:
        """Do one step with the gradients of this member, with an exchange if it is time for one.

        Local: others may be in any step of theirs.

        Parameters
        ----------
        grads : Bucket, array or tree of arrays
            Like the parameters; of any floating dtype.

        Raises
        ------
        UsageError
            The gradients are not like the parameters; the force is out of its range.
        RankFailedError
            The host of the center is gone.
        ServiceGoneError
            This object is closed.
        """
        self._advance(self._ready(grads))

    def meet(self) -> None:
        """Exchange with the center now; the next time is `every` steps from here.

        Local. Does nothing right after an exchange.
        """
        alpha = self._ready_to_meet()
        if self._since:
            self._meet(alpha)

    def _plan(self, number: int) -> float:
        return self._force(max(number, 1))

    def _exchange(self, plan: float) -> list[Any]:
        """Move the center; return how far it draws the parameters. Local."""
        model = self._model
        if model.home:
            model.mark()
        else:
            model.flush()  # so that no more than one exchange of a member is on its way
            model.pull()
        pulls = self._drawn(model.tree, plan)
        model.add([host_array(pull) for pull in pulls])
        self._exchanges += 1
        self._since = 0
        return pulls

    # -- together ------------------------------------------------------------------------------

    def finish(self) -> Any:
        """Wait until every member is here; return the center with all that they have given.

        Collective over the members. The same bits on all of them. Training may go on.

        Returns
        -------
        array or tree of arrays
            Like the parameters; new ones.
        """
        self._check_open(f"{self.where}.finish")
        self._model.barrier()
        found = self.center
        self._model.barrier()  # nobody goes on before all have looked
        return found

    def close(self) -> None:
        """Let go of the state, and of the shared memory; parameters and `center` stay.

        Collective over the members, in which it waits for all of them.
        """
        if self._closed:
            return
        self._model.barrier()
        self._looked()
        self._model.close()
        super().close()

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:  # the others may never come
            self._model.__exit__(*exception)
            super().close()

    # -- checkpoints ---------------------------------------------------------------------------

    def _trees(self) -> dict[str, list[Any]]:
        # an old look will do where only the names are asked for, or memory to load into
        return {**super()._trees(), "center": self._kept or self._looked()}

    def _said(self, state: Mapping[str, Any], found: Mapping[str, list[Any]]) -> str:
        """Return what members compare of a state: they need not be in the same step."""
        return "\n".join([f"{name}={state[name]!r}" for name in self._optimizers()])

    def state_dict(self) -> dict[str, Any]:
        """Return everything a checkpoint of this member needs, as copies in host memory.

        Local: each member keeps its own, with the center as it is now. For checkpoints of one
        moment let all members `finish` before.
        """
        self._looked()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, with the center that member 0 passes.

        Collective over the members; each passes its own.

        Raises
        ------
        UsageError
            It is of other parameters or another rule, or members differ in the
            hyperparameters. On all members, and nothing is changed.
        """
        super().load_state_dict(state)
        self._model.barrier()  # what is on its way to the center comes before
        self._start(self._kept)

    def statistics(self) -> dict[str, Any]:
        """Return what this member did since construction, for logs.

        Returns
        -------
        dict
            ``"members"``; ``"steps"`` and ``"exchanges"`` of this member, and the ``"bytes"``
            that it read of the center and added to it; ``"hosts"`` and the ``"way"`` of the
            center; ``"staleness"``: how many exchanges of others came between a read of the
            center and the addition that followed, for how many of its exchanges that was
            looked at, on average and at most.
        """
        model = self._model.statistics() if not self._closed else {}
        return {
            "members": self.members,
            "steps": self._steps,
            "exchanges": self._exchanges,
            "bytes": 2 * self._exchanges * self._replica.nbytes,
            **{name: model[name] for name in ("hosts", "way", "staleness") if name in model},
        }
