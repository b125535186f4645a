"""`SharedModel`: one model that many members add to without a lock."""

from typing import Any, ClassVar

import numpy as np

from mpiml.collectives.onesided.adding import Adder, Rows, Staleness
from mpiml.collectives.onesided.held import open_alike
from mpiml.collectives.onesided.model import Model
from mpiml.collectives.onesided.pulling import Copy
from mpiml.collectives.onesided.records import ADD, ASSIGN
from mpiml.errors import UsageError

__all__ = ["SharedModel"]


class SharedModel(Model):
    """A model in memory that its members read and add to whenever they like, without a lock: Hogwild!.

    Collective over the members: construction, `barrier`, `close`. All else is local: no other
    member takes part.

    Each component is added to atomically, so no update is lost; an update of several components
    is not atomic, and reads take no lock: a reader may see a part of an update. That is what
    Hogwild! is about, and for sparse updates it converges as if there were locks (Niu, Recht,
    Ré, Wright, "HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
    NIPS 2011). `snapshot` never returns a part of an update.

    On several hosts the model lives on the host of member 0, its home. Each other host has a
    copy, in memory that its members share: `pull` brings it up to date, and what they add goes
    to the copy at once and to the home by messages, without a wait; `flush` waits until it is
    there. `snapshot` is of the home, everywhere, and has all that the member has added.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    like : array or tree of arrays
        Shapes and dtypes, float32 or float64. The model starts at zero: see `assign`.
    fallback : bool
        Without shared memory (``/dev/shm`` too small) let each process be a host of its own,
        instead of failing.
    name : str, optional
        What messages call it. Compared among the members.

    Attributes
    ----------
    tree
        The arrays, in the structure of `like`: read-only views of the memory itself. They
        change while they are read.
    raw
        The same, writable: what is written there, is neither atomic nor seen by `version`.

    Raises
    ------
    UsageError
        The members' trees differ; a leaf is neither float32 nor float64. On all members.
    SharedMemoryError
        A host has no room, and `fallback` is off. On all members.

    Examples
    --------
    ::

        model = SharedModel(like={"w": np.zeros(47_236, np.float32)})
        for row in rows:
            margin = row.label * (model["w"][row.indices] @ row.values)
            if margin < 1:
                model.add_at("w", row.indices, row.values, scale=0.1 * row.label)
    """

    title: ClassVar[str] = "SharedModel"

    def __init__(
        self,
        comm: Any = None,
        like: Any = None,
        *,
        fallback: bool = False,
        name: str | None = None,
    ) -> None:
        memory, layout, remote = open_alike(
            self.title, comm, like, lambda team: team.hosts, fallback, name
        )
        super().__init__(memory, layout, remote, name)
        self._copy: Copy | None = None  # of a member away from home
        if remote is not None and memory.team.hosts[self.index] != memory.team.hosts[0]:
            self._copy = Copy(self._block, layout, remote.route(0))

    # -- reading -------------------------------------------------------------------------------

    @property
    def home(self) -> bool:
        """Whether this member is on the model's host: reads there need no `pull`."""
        return self._copy is None

    @property
    def version(self) -> int:
        """How many updates the model has had, by all members. Away from home it is asked for."""
        if self._copy is None:
            return super().version
        self._open("version")
        return self._copy.version()

    @property
    def _known(self) -> int:
        return super()._known if self._copy is None else self._copy.known

    def pull(self, name: Any = None, indices: Any = None) -> None:
        """Bring this host's copy up to date with the home. Local; at home nothing is to do.

        Additions of members of this host that are still on their way to the home are missing
        from the copy afterwards, until the next pull.

        Parameters
        ----------
        name : optional
            One array, as for `add_at`; all by default.
        indices : int, array of int, or tuple of arrays, optional
            Elements or rows of it; all by default.
        """
        self._open("pull")
        if self._copy is not None:
            self._copy.pull(name, indices)
        elif name is not None:
            self._layout.number(name, "SharedModel.pull")

    def _snapshot(self, out: Any) -> int:
        if self._copy is None:
            return super()._snapshot(out)
        return self._copy.snapshot(out)

    # -- writing -------------------------------------------------------------------------------

    def assign(self, tree: Any) -> None:
        """Set the model to these values: one update. Local.

        Adds of others that come after it stand; a `barrier` afterwards makes all members see
        the values before anybody adds.

        Raises
        ------
        UsageError
            The tree is not like the model.
        """
        self._open("assign")
        leaves = self._adder.leaves_of(tree, "SharedModel.assign")
        self._block.assign(leaves, "SharedModel.assign")
        if self._copy is not None:
            self._copy.write(ASSIGN, leaves, 1.0)

    def _added(self, leaves: "list[np.ndarray[Any, Any]]", scale: float) -> None:
        if self._copy is not None:
            self._copy.write(ADD, leaves, scale)

    def _added_at(self, number: int, positions: Any, values: Any, scale: float) -> None:
        if self._copy is not None:
            self._copy.add_at(number, positions, values, scale)

    def _add_rows(self, number: int, rows: Rows) -> None:
        super()._add_rows(number, rows)
        if self._copy is not None:
            self._copy.add_rows(number, rows)

    # -- staleness -----------------------------------------------------------------------------

    def mark(self) -> None:
        """Note that this member reads the model now: its next add is measured from here. Local.

        Without it, some adds are measured from the end of the add before; away from home from
        some of the pulls.
        """
        self._open("mark")
        (self._copy or self._adder).mark()

    def staleness(self) -> Staleness:
        """Return how many updates of others came between this member's reads and adds. Local."""
        return (self._copy or self._adder).staleness()

    # -- together ------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Return size, way of working and what was measured, for logs.

        Away from home ``version`` is the last one that was heard of: nobody is asked.
        """
        return super().statistics()

    def barrier(self) -> None:
        """Wait until every member is here; what any added before is in the model then.

        Collective over the members. Copies of other hosts are pulled.
        """
        super().barrier()
        if self._copy is not None:
            self._copy.pull(None, None)

    def _direct(self, call: str) -> tuple[Adder, None]:
        """Return what a kernel of this package updates by itself; where not at home, refuse."""
        self._open(call)
        if self._copy is not None:
            raise UsageError(
                f"{call}: expected a model in the memory of this host, got a SharedModel whose "
                f"home is that of {self._team.names[0]}: this step multiplies, which cannot "
                "be sent as an addition. Use RingModel, where each host has a model of its own, "
                "or SharedModel.add_rows."
            )
        return self._adder, None
