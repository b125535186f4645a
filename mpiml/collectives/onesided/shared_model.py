"""`SharedModel`: one model that many members add to without a lock."""

from typing import Any

import numpy as np

from mpiml.collectives.labels import Label
from mpiml.collectives.members import team_of
from mpiml.collectives.onesided.adding import Adder, Staleness
from mpiml.collectives.onesided.layout import agreed_layout
from mpiml.collectives.onesided.memory import host_memory
from mpiml.collectives.onesided.pulling import Copy
from mpiml.collectives.onesided.records import ADD, ASSIGN
from mpiml.collectives.onesided.remote import Remote
from mpiml.collectives.trees import unflatten
from mpiml.errors import ServiceGoneError, UsageError

__all__ = ["SharedModel"]


class SharedModel:
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

    def __init__(
        self,
        comm: Any = None,
        like: Any = None,
        *,
        fallback: bool = False,
        name: str | None = None,
    ) -> None:
        where = "SharedModel"
        team = team_of(comm, where)
        self._name = name
        layout, label = agreed_layout(team, where, like, f"fallback={fallback}", name)
        with team.round(label):
            memory = host_memory(team, layout.regions, team.hosts, fallback, label)
        self._team = memory.team
        self._layout = layout
        self._block = memory.block(self._team.index)
        self._adder = Adder(self._block, layout, where)
        self._remote: Remote | None = None
        self._copy: Copy | None = None  # of a member away from home
        if self._team.several_hosts:
            with team.round(label):
                self._remote = Remote(team, memory, where, label)
            if self._team.hosts[self._team.index] != self._team.hosts[0]:
                self._copy = Copy(self._block, layout, self._remote.route(0))
        self._closed = False
        views = self._block.views
        self.raw = unflatten(layout.treedef, views)
        self.tree = unflatten(layout.treedef, [_read_only(view) for view in views])

    # -- reading -------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The number of this member."""
        return self._team.index

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._team.size

    @property
    def home(self) -> bool:
        """Whether this member is on the model's host: reads there need no `pull`."""
        return self._copy is None

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    @property
    def version(self) -> int:
        """How many updates the model has had, by all members."""
        if self._copy is not None:
            return self._copy.version()
        return self._block.gate.version()

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

    def snapshot(self) -> tuple[Any, int]:
        """Return a copy of the model between two updates, and its version.

        Local. Members that add meanwhile wait until the memory is copied.

        Returns
        -------
        tree
            New arrays, in the structure of ``like``.
        version : int
            Updates so far, all of which the copy has, and no part of others.

        Raises
        ------
        RankFailedError
            A member has died within an update.
        """
        self._open("snapshot")
        out = np.empty(self._layout.regions.nbytes, np.uint8)
        if self._copy is not None:
            version = self._copy.route.snapshot(out.data, "SharedModel.snapshot")
        else:
            version = self._block.snapshot(out, "SharedModel.snapshot")
        return unflatten(self._layout.treedef, self._layout.regions.views(out)), version

    # -- writing -------------------------------------------------------------------------------

    def add(self, tree: Any, scale: float = 1.0) -> None:
        """Add ``scale * tree`` to the model, component by component. Local.

        Parameters
        ----------
        tree : array or tree of arrays
            In the structure and the shapes of the model.
        scale : float
            What it is multiplied with.

        Raises
        ------
        UsageError
            It is not like the model.
        """
        self._open("add")
        leaves = self._adder.leaves_of(tree, "SharedModel.add")
        self._adder.add(leaves, scale)
        if self._copy is not None:
            self._copy.write(ADD, leaves, scale)

    def add_at(self, name: Any, indices: Any, values: Any, scale: float = 1.0) -> None:
        """Add ``scale * values`` to elements of one array: ``array[indices] += scale * values``.

        Local. Unlike NumPy's, an index that comes twice counts twice.

        Parameters
        ----------
        name
            A key of the tree; a tuple of keys for an inner array; None if the model is one
            array.
        indices : array of int, or tuple of arrays
            Elements of a vector, rows of a table; a tuple has an index for each axis.
        values : array
            One for each element, or what broadcasts to that.
        scale : float
            What they are multiplied with.

        Raises
        ------
        UsageError
            There is no such array; indices are outside of it; values do not fit.
        """
        adder = self._adder
        number = adder.layout.number(name, "SharedModel.add_at")
        if self._closed:
            self._open("add_at")
        if type(indices) is np.ndarray and type(values) is np.ndarray:
            try:  # as they are, mostly
                adder.add_at(number, indices, values, scale)
                if self._copy is not None:
                    self._copy.add_at(number, indices, values, scale)
                return
            except (
                ValueError,
                BufferError,
            ):  # the long way makes them fit, or says what is wrong
                pass
        positions, found = adder.at(number, indices, values, "SharedModel.add_at")
        adder.add_at(number, positions, found, scale)
        if self._copy is not None:
            self._copy.add_at(number, positions, found, scale)

    def add_rows(self, name: Any, rows: Any, coefficients: Any = None) -> None:
        """Add the rows of a sparse block to one array, each times its coefficient.

        Local. Each row is one update. Many rows in one call cost what memory costs.

        Parameters
        ----------
        name
            As for `add_at`; the array counts as one axis.
        rows : mpiml.datasets.CSR or scipy.sparse.csr_array
            ``indptr``, ``indices`` and ``values`` (or ``data``).
        coefficients : array, optional
            (rows,); 1 by default.

        Raises
        ------
        UsageError
            Indices are outside of the array; the parts of the block do not fit together.
        """
        self._open("add_rows")
        adder, where = self._adder, "SharedModel.add_rows"
        number = adder.layout.number(name, where)
        found = adder.rows(number, rows, coefficients, where)
        try:
            adder.add_rows(number, found)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self._copy is not None:
            self._copy.add_rows(number, found)

    def assign(self, tree: Any) -> None:
        """Set the model to these values: one update. Local.

        Adds of others that come after it stand; a `barrier` afterwards makes all members see
        the values before anybody adds.
        """
        self._open("assign")
        block = self._block
        leaves = self._adder.leaves_of(tree, "SharedModel.assign")
        block.enter("SharedModel.assign")
        try:
            for own, leaf in zip(block.views, leaves, strict=True):
                own[...] = leaf
        finally:
            block.gate.leave(1)
        if self._copy is not None:
            self._copy.write(ASSIGN, leaves, 1.0)

    # -- staleness -----------------------------------------------------------------------------

    def mark(self) -> None:
        """Note that this member reads the model now: its next add is measured from here. Local.

        Without it, some adds are measured from the end of the add before.
        """
        (self._copy or self._adder).mark()

    def staleness(self) -> Staleness:
        """Return how many updates of others came between this member's reads and adds. Local."""
        return (self._copy or self._adder).staleness()

    # -- together ------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every member is here; what any added before is in the model then.

        Collective over the members. Copies of other hosts are pulled.
        """
        self._meet("barrier")
        if self._copy is not None:
            self._copy.pull(None, None)

    def flush(self) -> None:
        """Wait until the home has all that this member has added. Local; at home it has.

        Raises
        ------
        RankFailedError
            The home is gone.
        """
        self._open("flush")
        if self._remote is not None:
            self._remote.flush()

    def _meet(self, call: str) -> None:
        """Flush, and wait for the others. Collective over the members."""
        self._open(call)
        label = Label(f"SharedModel.{call}", name=self._name)
        with self._team.round(label):
            if self._remote is not None:
                self._remote.flush()
            self._team.exchange(b"", label)

    def close(self) -> None:
        """Let go of the memory. Collective over the members. Views stay readable."""
        if self._closed:
            return
        self._meet("close")
        self._closed = True
        if self._remote is not None:
            self._remote.close()

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

    def _open(self, call: str) -> None:
        if self._closed:
            raise ServiceGoneError(
                f"SharedModel.{call}: the model is closed; use it before close(), or make another"
            )

    def statistics(self) -> dict[str, Any]:
        """Return size and way of working, for logs."""
        return {
            "arrays": len(self._layout.regions.leaves),
            "bytes": self._layout.regions.nbytes,
            "members": self.size,
            "hosts": len(set(self._team.hosts)),
            "way": "shared memory" if self._remote is None else self._remote.way,
            "adds": self._adder.adds,
            "version": self.version,
            "staleness": self.staleness()._asdict(),
        }

    def __enter__(self) -> "SharedModel":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:  # the others may never come
            self._closed = True
            if self._remote is not None:
                self._remote.abandon()

    def __repr__(self) -> str:
        name = "" if self._name is None else f" {self._name!r}"
        return (
            f"<SharedModel{name} of {len(self._layout.regions.leaves)} arrays, "
            f"{self._layout.regions.nbytes:,} bytes, member {self.index} of {self.size}>"
        )


def _read_only(view: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    found = view.view()
    found.flags.writeable = False
    return found
