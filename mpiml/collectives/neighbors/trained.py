"""What the rules share by which members train and average with neighbours only."""

from typing import Any, ClassVar

from mpiml.collectives.alike import guarded
from mpiml.collectives.averaging.periodic import Periodic, Step
from mpiml.collectives.averaging.replica import put
from mpiml.collectives.labels import Label
from mpiml.collectives.neighbors.edges import Edges
from mpiml.collectives.neighbors.exchange import exchange_of
from mpiml.collectives.neighbors.reducing import meeting_of, mixed, static_edges
from mpiml.errors import UsageError
from mpiml.optim import Optimizer
from mpiml.topology import Schedule
from mpiml.topology.schedule import as_schedule

__all__ = ["Neighbourly", "schedule_for"]


def schedule_for(topology: Any, size: int, kind: Any, where: str) -> Schedule:
    """Return a schedule of so many members whose weights sum to 1 as `kind` says. Local.

    Raises
    ------
    UsageError
        It is none, has another number of members, is not connected, or its weights do not.
    """
    try:
        schedule = as_schedule(topology)
    except UsageError as error:
        raise UsageError(f"{where}: topology: {error}") from None
    if schedule.n != size:
        raise UsageError(
            f"{where}: topology: expected one of {size} members, as many as there are, got "
            f"{topology!r}"
        )
    schedule.require(kind, where)
    return schedule


class Neighbourly(Periodic):
    """Parameters that each member trains, and averages with those of its neighbours.

    Collective over the members: construction, `meet`, `load_state_dict`. Collective over
    neighbours: `step`. All members make the same number of steps.

    Parameters
    ----------
    params : Bucket, array or tree of arrays, float32 or float64
        NumPy or CuPy arrays, trained in place. At construction those of member 0 are given to
        all.
    optimizer : mpiml.optim.Optimizer
        The local one. Its state stays with the member.
    topology : Topology, Schedule or sequence of Topology
        Of as many members; a schedule goes by the number of the step, from 0.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node, or the
        members of the bucket.
    name : str, optional
        What messages call it. Compared among the members.
    """

    kind: ClassVar[str]  #: what the weights must sum to 1 over

    def __init__(
        self, params: Any, optimizer: Optimizer, topology: Any, comm: Any, name: str | None
    ) -> None:
        self._topology = topology
        self._rounds = self._sent = 0
        super().__init__(params, optimizer, 1, comm, name)
        self._exchange = exchange_of(self._team)

    @property
    def topology(self) -> Schedule:
        """Who averages with whom, by step."""
        return self._schedule

    def _compared(self) -> dict[str, Any]:
        self._schedule = schedule_for(self._topology, self._team.size, self.kind, self.where)
        return {"topology": repr(self._topology)}

    def _joint(self) -> bool:
        return False

    def step(self, grads: Any) -> None:
        """Do one step with the gradients of this member.

        Collective over neighbours: it waits for those that it hears from, and for nobody else.

        Parameters
        ----------
        grads : Bucket, array or tree of arrays
            Like the parameters; of any floating dtype.

        Raises
        ------
        UsageError
            The gradients are not like the parameters: on this member and those that hear from
            it. A neighbour does something else.
        ServiceGoneError
            This object is closed.
        """
        where = f"{self.where}.step"
        team, edges = self._team, self._edges()
        with team.round(Label(where, name=self._name)):
            meeting = meeting_of(self._exchange, edges)
            step = guarded(team, where, lambda: self._ready(grads), meeting)
            self._advance(step)

    def _edges(self) -> Edges:
        number = self._steps
        return static_edges(self._team, self._schedule, number, self.kind, self.where)

    def _mix(self, leaves: list[Any], edges: Edges) -> None:
        """Set arrays to the weighted sum of neighbours'. Collective over them."""
        where, team = f"{self.where}.step", self._team
        put(leaves, mixed(team, self._exchange, edges, leaves, None, self._name, where))
        self._rounds += 1
        self._sent += len(edges.sends) * sum(leaf.nbytes for leaf in leaves)

    def _advance(self, step: Step) -> None:
        raise NotImplementedError

    def _plan(self, number: int) -> str:
        return self._called(f"parameters after {number} steps")

    def _meet(self, plan: Any) -> None:
        """Take the mean of all members' parameters."""
        self._replica.mean(plan)
        self._reductions += 1

    def statistics(self) -> dict[str, Any]:
        """Return what this member did since construction, for logs.

        Returns
        -------
        dict
            ``"members"``, ``"steps"`` in all, ``"rounds"`` of averaging with neighbours,
            ``"bytes"`` sent in them, and ``"reductions"`` over all members, by `meet`, of which
            the bytes are not counted.
        """
        return {
            "members": self.members,
            "steps": self._steps,
            "rounds": self._rounds,
            "bytes": self._sent,
            "reductions": self._reductions,
        }

    def __repr__(self) -> str:
        return (
            f"<{self.where}, {self.optimizer!r}, {self._topology!r}, {self._steps} steps, member "
            f"{self._team.index} of {self.members}>"
        )
