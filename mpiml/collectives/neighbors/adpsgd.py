"""AD-PSGD: asynchronous decentralized parallel SGD.

Lian, Zhang, Zhang and Liu 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
algorithm 1. Each member keeps x. It computes a gradient at a copy of x; meanwhile its x and that
of one random neighbour become their mean, in one atomic operation; then x <- x - lr g. Nobody
waits for who is slow: members make as many steps as they can.

The graph is bipartite. Members of one side, the active ones, ask; those of the other answer, on
a thread of their own. As who answers waits for nobody, no circle of waiting can arise.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mpiml.collectives.averaging.periodic import Periodic, Step
from mpiml.collectives.averaging.replica import put
from mpiml.collectives.labels import Label
from mpiml.collectives.neighbors.meeting import Answering, Asking, Shared
from mpiml.collectives.trees import host_array
from mpiml.errors import RankFailedError, ServiceGoneError, UsageError
from mpiml.optim import Optimizer
from mpiml.optim_step import apply
from mpiml.topology import ActivePassive, Topology

__all__ = ["ADPSGD"]

_FINISH: Final = (
    "If its body had no error: each member calls ADPSGD.finish() after its last step, and answers "
    "its neighbours until all have called it."
)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Have an error that tells of a member which is not there any more tell of `finish` too."""
    try:
        yield
    except (UsageError, RankFailedError) as error:
        if _FINISH not in (text := str(error)):
            error.args = (f"{text} {_FINISH}", *error.args[1:])
        raise


class ADPSGD(Periodic):
    """Members train at their own pace, and average with one random neighbour at a time.

    Collective over the members: construction, `finish`, `meet`, `load_state_dict`. `step` waits,
    on an active member, for the answer of one passive member; on a passive one for nobody.

    Parameters
    ----------
    params, optimizer, comm, name
        As for `mpiml.collectives.averaging.LocalSGD`. `params` are the copy at which gradients are
        to be computed, set anew by each step.
    topology : Topology or ActivePassive
        Of as many members, connected and bipartite: ``mpiml.topology.bipartite(n)``, or a
        `ring` of an even number. Its weights do not count: a meeting is half and half.
    seed : int
        Of the draws of neighbours, where `topology` is a Topology.

    Raises
    ------
    UsageError
        The topology is not bipartite, has another number of members, or members differ. On
        all.

    Notes
    -----
    A step is a round of the agreed stop of a program: members stop after the same number of
    steps of their own. Call `finish` on all members before their bodies end, unless it is
    because the program stops.

    Examples
    --------
    ::

        model = ADPSGD(weights, mpiml.optim.SGD(0.1), mpiml.topology.bipartite(n))
        for batch in batches:  # as many as there are, not the same number on all members
            model.step(gradient(model.params, batch))
        model.finish()
    """

    where = "ADPSGD"

    def __init__(
        self,
        params: Any,
        optimizer: Optimizer,
        topology: Topology | ActivePassive,
        comm: Any = None,
        name: str | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._given = topology
        self._seed = seed
        self._thread: Asking | Answering | None = None
        super().__init__(params, optimizer, 1, comm, name)
        team = self._team
        self._shared = shared = Shared(self._replica.leaves, self._replica.paths)
        self._states = [optimizer.init(x) for x in shared.leaves]
        made = Asking if self._sides.is_active(team.index) else Answering
        self._thread = made(team, shared, self._sides)
        self._thread.resume()

    @property
    def active(self) -> bool:
        """Whether this member asks others; else it answers."""
        return self._sides.is_active(self._team.index)

    def _compared(self) -> dict[str, Any]:
        given = self._given
        try:
            sides = (
                given if isinstance(given, ActivePassive) else ActivePassive(given, self._seed)
            )
        except UsageError as error:
            raise UsageError(f"{self.where}: topology: {error}") from None
        if sides.n != self._team.size:
            raise UsageError(
                f"{self.where}: topology: expected one of {self._team.size} members, as many as "
                f"there are, got {given!r}"
            )
        self._sides = sides
        return {"topology": f"{sides.topology!r}, {sides!r}, seed={sides.seed}"}

    def _joint(self) -> bool:
        return False

    def step(self, grads: Any) -> None:
        """Do one step with the gradients of this member.

        On an active member it waits until the meeting that goes with the step is over, which
        began after the step before. Local on a passive one.

        Parameters
        ----------
        grads : Bucket, array or tree of arrays
            Like the parameters; computed at `params`.

        Raises
        ------
        UsageError
            The gradients are not like the parameters. Nothing is changed.
        ServiceGoneError
            This object is closed, or `finish` has been called.
        """
        label = Label(f"{self.where}.step", name=self._name)
        step = self._ready(grads)
        with self._team.round(label):
            with _telling():
                self._running().pause(label)
            self._advance(step)
            self._running().resume()

    def _advance(self, step: Step) -> None:
        who, rule = self.optimizer.name, self.optimizer.rule
        shared = self._shared
        with shared.lock:
            for x, grad, state in zip(shared.leaves, step.leaves, self._states, strict=True):
                apply(who, rule, step.coefficients, x, host_array(grad), state)
            put(self._replica.leaves, shared.leaves)
        self._steps += 1
        self._since += 1
        self._here += 1

    def finish(self) -> None:
        """End the meetings, when all members are done; `params` are set to this member's x.

        Collective over the members. Until all have called it, passive ones go on to answer.
        For one model take the mean: call `meet` before.
        """
        self._check_open(f"{self.where}.finish")
        if self._thread is None:
            return
        self._quiet(Label(f"{self.where}.finish", name=self._name))
        self._end()

    def meet(self) -> None:
        """Set the parameters of all members to the mean of all. Collective over the members."""
        self._check_open(f"{self.where}.meet")
        self._quiet(Label(f"{self.where}.meet", name=self._name))
        self._meet(self._plan(self._steps))
        if self._thread is not None:
            self._thread.resume()

    def _quiet(self, label: Label) -> None:
        """Wait until no meeting is under way anywhere. Collective over the members."""
        with self._team.round(label), _telling():
            if self._thread is not None:
                self._thread.pause(label)
            self._team.exchange(b"", label)
        with self._shared.lock:
            put(self._replica.leaves, self._shared.leaves)

    def _plan(self, number: int) -> str:
        return self._called("parameters of all")

    def _meet(self, plan: Any) -> None:
        self._replica.mean(plan)
        self._reductions += 1
        self._since = 0
        with self._shared.lock:
            put(self._shared.leaves, self._replica.leaves)

    def _running(self) -> "Asking | Answering":
        if self._thread is None:
            raise ServiceGoneError(
                f"{self.where}.step: finish() has been called; make another on all members"
            )
        return self._thread

    def _ready(self, grads: Any) -> Step:
        self._check_open(f"{self.where}.step")
        self._running()
        return super()._ready(grads)

    # -- checkpoints -------------------------------------------------------------------------------

    def _trees(self) -> dict[str, list[Any]]:
        return {**super()._trees(), "params": self._shared.leaves}

    def state_dict(self) -> dict[str, Any]:
        """Return everything a checkpoint of this member needs, as copies in host memory.

        Local; but a meeting may be under way, of which another member's checkpoint has the
        result and this one has not. After `meet` or `finish` there is none.
        """
        with self._shared.lock:
            return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Collective over the members; each passes its own, all of which are of the same number
        of steps or have been taken after `finish`.
        """
        self._check_open(f"{self.where}.load_state_dict")
        self._quiet(Label(f"{self.where}.load_state_dict", name=self._name))
        try:
            super().load_state_dict(state)
        finally:
            put(self._replica.leaves, self._shared.leaves)
            if self._thread is not None:
                self._thread.resume()

    def _said(self, state: Mapping[str, Any], found: Mapping[str, list[Any]]) -> str:
        # members make steps at their own pace
        return super()._said({**state, "step": 0, "since": 0}, found)

    # -- its end -----------------------------------------------------------------------------------

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def close(self) -> None:
        """Let go of the state; parameters stay. Local: call it on every member, after `finish`."""
        self._end()
        super().close()

    def statistics(self) -> dict[str, Any]:
        """Return what this member did since construction, for logs.

        Returns
        -------
        dict
            ``"members"``, ``"steps"``, ``"meetings"`` with a neighbour that are over,
            ``"bytes"`` sent in them, and ``"reductions"`` over all members, by `meet`, of which
            the bytes are not counted.
        """
        meetings = self._shared.meetings
        return {
            "members": self.members,
            "steps": self._steps,
            "meetings": meetings,
            "bytes": meetings * self._shared.memory.nbytes,
            "reductions": self._reductions,
        }

    def __repr__(self) -> str:
        side = "active" if self.active else "passive"
        return (
            f"<ADPSGD, {self.optimizer!r}, {self._sides!r}, {self._steps} steps, member "
            f"{self._team.index} of {self.members}, {side}>"
        )
