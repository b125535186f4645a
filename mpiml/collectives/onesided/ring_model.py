"""`RingModel`: a model for each cluster of members, brought together round a ring."""

import struct
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np

from mpiml.collectives.labels import Label
from mpiml.collectives.mail import mail_of
from mpiml.collectives.members import team_of
from mpiml.collectives.onesided.adding import Adder, Rows
from mpiml.collectives.onesided.agent import agent_of, refuse_agents
from mpiml.collectives.onesided.held import open_memory
from mpiml.collectives.onesided.layout import agreed_layout
from mpiml.collectives.onesided.model import Model
from mpiml.collectives.onesided.records import ASSIGN
from mpiml.collectives.onesided.ring_meeting import Meeting
from mpiml.collectives.onesided.ring_member import RingMember
from mpiml.collectives.onesided.ring_places import StepSize, clusters_of, groups_of, wrong
from mpiml.collectives.onesided.ring_rule import RingRule
from mpiml.collectives.onesided.ring_token import WORDS, Carrier

__all__ = ["RingModel"]

_SEEN: Final = struct.Struct("<qq")
_ROUNDS: Final = 1000  # of looking for the token at the end: it may have gone with who had it


class RingModel(Model):
    """A model for each cluster of members, without locks, brought together round a ring: HogWild++.

    Collective over the members: construction, `barrier`, `close`. All else is local: no other
    member takes part, and no member waits for the ring.

    The members of a cluster add to its model as `SharedModel` has it. The clusters stand in a
    ring. One token goes round; whose turn it is, gives what is new in the model of its cluster,
    times beta, to that of the next one, and takes a mean of both, weighted by lambda. Members of
    a cluster have their turns one after another. H. Zhang, C.-J. Hsieh, V. Akella, "HogWild++: A
    New Mechanism for Decentralized Asynchronous Stochastic Gradient Descent", ICDM 2016; what
    the paper leaves open is as in the authors' code. See `RingRule` for beta, lambda and the
    turns. One cluster alone has no turns: it is Hogwild!.

    A turn is had inside of a call that adds, once its updates are counted; it costs a pass over
    three models. Where the next model is on another host, it is asked for by message, the
    member goes on with its updates, and the turn is had in the first call that finds it here.
    The sum over the models is no invariant of the algorithm.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    like : array or tree of arrays
        Shapes and dtypes, float32 or float64. The models start at zero: see `assign`.
    cluster_size : int, optional
        Members of a cluster: those of a host in their order, the last ones perhaps fewer. All
        of a host by default.
    step : float
        The step size of the first epoch, > 0: deltas are multiplied by it. See `step`.
    decay : float
        What becomes of the step size in as many epochs as there are clusters: see `end_epoch`.
    tolerance : float
        Where the delta of a component, times the step size, is no larger than this, it waits
        for more.
    delay : int, optional
        Own updates of a member from its sync to passing the token on, tau0; by default 64 for
        up to 4 clusters, 16 for up to 10, else 4.
    fallback : bool
        Without shared memory (``/dev/shm`` too small) let each process be a host of its own,
        instead of failing.
    name : str, optional
        What messages call it. Compared among the members.

    Attributes
    ----------
    step : float
        The step size now, which may be set: deltas are multiplied by it. What is added is not.
    rule : RingRule
        The ring: its weights, its order.
    cluster : int
        The number of this member's cluster.
    tree
        The arrays of the cluster's model, in the structure of `like`: read-only views of the
        memory itself. They change while they are read.
    raw
        The same, writable: what is written there, is neither atomic nor seen by `version`.

    Raises
    ------
    UsageError
        The members' trees or arguments differ; a leaf is neither float32 nor float64; a number
        is out of its range. On all members.
    SharedMemoryError
        A host has no room, and `fallback` is off. On all members.

    Examples
    --------
    ::

        model = RingModel(like={"w": np.zeros(47_236, np.float32)}, cluster_size=8, step=0.5)
        for _ in range(epochs):
            for row in rows:
                margin = row.label * (model["w"][row.indices] @ row.values)
                if margin < 1:
                    model.add_at("w", row.indices, row.values, scale=model.step * row.label)
            model.end_epoch()
        model.barrier()
        tree, _ = model.evaluated()
    """

    title: ClassVar[str] = "RingModel"

    def __init__(
        self,
        comm: Any = None,
        like: Any = None,
        *,
        cluster_size: int | None = None,
        step: float = 1.0,
        decay: float = 0.8,
        tolerance: float = 1e-2,
        delay: int | None = None,
        fallback: bool = False,
        name: str | None = None,
    ) -> None:
        where = self.title
        team = team_of(comm, where)
        team.agree(wrong(cluster_size, step, decay, tolerance, delay), Label(where, name=name))
        layout, label = agreed_layout(
            team, where, like,
            f"cluster_size={cluster_size}, step={step}, decay={decay}, tolerance={tolerance}, "
            f"delay={delay}, fallback={fallback}", name,
        )  # fmt: skip
        groups = groups_of(team.hosts, cluster_size)
        memory, remote = open_memory(where, team, layout, groups, fallback, label, WORDS, True)
        clusters = clusters_of(memory.team.hosts, groups)
        self.rule = RingRule(
            len(clusters), [len(found) for found in clusters],
            delay=delay, tolerance=tolerance, decay=decay,
        )  # fmt: skip
        self._step = StepSize(self.rule, step)
        own = team.index
        self.cluster = next(i for i, found in enumerate(clusters) if own in found)
        meeting = Meeting(memory, remote, layout, [found[0] for found in clusters], where)
        ring = None
        if self.rule.syncs:
            nbytes = layout.regions.nbytes
            words = memory.beside(memory.team.local[0], nbytes + WORDS)[nbytes:]
            refuse_agents(team, "a RingModel", "Use SharedModel.")
            channel = mail_of(team).open("the token of a RingModel")
            members = [member for found in clusters for member in found]
            carrier = Carrier(self.rule, members, memory.team, channel, words)
            ring = RingMember(
                self.rule, members.index(own), carrier, meeting, agent_of(team), self._step
            )
        super().__init__(memory, layout, remote, name)
        self._meeting = meeting
        self._ring = ring

    # -- reading -------------------------------------------------------------------------------

    def evaluated(self) -> tuple[Any, int]:
        """Return a copy of the model to evaluate, and its version.

        Local. As the authors have it, that of the cluster whose turn was the last to end; at
        first that of the last turn of a round. What other hosts do, this one hears with the
        token and with each `barrier`: after that the members agree, until somebody adds.

        Returns
        -------
        tree
            New arrays, in the structure of ``like``.
        version : int
            Updates of that model so far.

        Raises
        ------
        RankFailedError
            A member has died within an update, or the other host is gone.
        """
        self._open("evaluated")
        last = self.rule.size - 1 if self._ring is None else self._ring.seen[1]
        cluster, label = self.rule.cluster(last), "RingModel.evaluated"
        block = self._meeting.block(cluster)
        source = self._meeting.route(cluster) if block is None else block
        return self._copied(lambda out: source.snapshot(out, label))

    # -- writing -------------------------------------------------------------------------------

    def assign(self, tree: Any) -> None:
        """Set the models of all clusters to these values: one update of each. Local.

        No part of the values is a delta that the ring passes on. Meant for when nobody adds: a
        `barrier` afterwards makes all members see the values before anybody does.

        Raises
        ------
        UsageError
            The tree is not like the model.
        """
        self._open("assign")
        leaves = self._adder.leaves_of(tree, "RingModel.assign")
        for cluster in range(self.rule.clusters):
            block = self._meeting.block(cluster)
            if block is not None:
                block.assign(leaves, "RingModel.assign")
            else:
                route = self._meeting.route(cluster)
                route.write(ASSIGN, leaves)

    def _added(self, leaves: "list[np.ndarray[Any, Any]]", scale: float) -> None:
        if self._ring is not None:
            self._ring.count(1)

    def _added_at(self, number: int, positions: Any, values: Any, scale: float) -> None:
        if self._ring is not None:
            self._ring.count(1)

    def _add_rows(self, number: int, rows: Rows) -> None:
        """Add rows; turns are had between them, when they are due."""
        ring = self._ring
        if ring is None:
            super()._add_rows(number, rows)
            return
        count, begin = len(rows.coefficients), 0
        while True:
            end = min(count, begin + ring.room)
            super()._add_rows(number, rows.part(begin, end))
            ring.count(end - begin)
            if end == count:
                break
            begin = end

    def _direct(self, call: str) -> tuple[Adder, RingMember | None]:
        """Return what a kernel of this package updates by itself, and what counts that."""
        self._open(call)
        return self._adder, self._ring

    # -- the ring ------------------------------------------------------------------------------

    @property
    def step(self) -> float:
        """The step size now: deltas are multiplied by it."""
        return self._step.now

    @step.setter
    def step(self, value: float) -> None:
        self._step.set(value)

    def end_epoch(self) -> float:
        """Let the step size shrink, as at the end of an epoch, and return it. Local.

        By ``decay ** (1 / clusters)``; epochs count from when it was set last.
        """
        self._step.end_epoch()
        return self._step.now

    def done(self) -> None:
        """Have no turns any more: this member adds nothing, or nothing that is to be passed on.

        Local. The others' turns follow each other without it; a cluster that has no members
        left is left out of the ring. To be called at the end of a loop that others go on with.
        A turn that has begun is ended first, which may take until another host has answered.
        """
        self._open("done")
        if self._ring is not None:
            self._ring.aside(end=True)

    # -- together ------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every member is here; what any added before is in its cluster's model then.

        Collective over the members. A member that waits here has no turn meanwhile: the token
        passes over it.
        """
        try:
            self._meet("barrier")
        finally:
            if self._ring is not None:
                self._ring.back()

    def _before_meeting(self, call: str) -> bytes:
        """Step aside; return what has been seen of the ring, for the others."""
        if self._ring is None:
            return b""
        self._ring.aside(end=call == "close")
        return _SEEN.pack(*self._ring.seen)

    def _after_meeting(self, said: Sequence[bytes]) -> None:
        if self._ring is not None:
            for seen in said:
                self._ring.hear(_SEEN.unpack(seen))

    def _close_own(self) -> None:
        """Wait until the token is somewhere, not under way. Collective over the members."""
        if self._ring is None:
            return
        label = Label("RingModel.close", name=self._name)
        with self._team.round(label):
            for _ in range(_ROUNDS):
                if any(self._team.exchange(b"1" * self._ring.settle(), label)):
                    break
        self._ring.close()

    def _abandon(self) -> None:
        if self._ring is not None:
            self._ring.abandon()
        super()._abandon()

    def statistics(self) -> dict[str, Any]:
        """Return size, way of working, and how the ring went, for logs.

        ``moved`` and ``kept`` count components, over this member's turns: those whose delta was
        passed on, and those where it was within the tolerance and waits. If nearly all are
        kept, clusters only take means of each other: a lower tolerance, or a larger step, has
        more passed on. ``late`` are own updates while the token was awaited.
        """
        ring = self._ring
        done = {} if ring is None else ring.statistics()._asdict()
        return {
            **super().statistics(),
            "clusters": self.rule.clusters,
            "cluster": self.cluster,
            "beta": self.rule.beta,
            "lambda": self.rule.lam,
            "delay": self.rule.delay,
            "tolerance": self.rule.tolerance,
            "step": self.step,
            "hops": 0 if ring is None else ring.seen[0],
            **done,
        }

    def __repr__(self) -> str:
        inside = super().__repr__()[:-1]
        return f"{inside}, in cluster {self.cluster} of {self.rule.clusters}>"
