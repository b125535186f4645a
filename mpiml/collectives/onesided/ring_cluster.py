"""The model of one cluster of a ring: what its members read and add to, as in a SharedModel."""

from typing import Any

import numpy as np

from mpiml.collectives.onesided.adding import Adder, Rows, Staleness
from mpiml.collectives.onesided.layout import Layout
from mpiml.collectives.onesided.memory import HostMemory
from mpiml.collectives.onesided.ring_meeting import Meeting
from mpiml.collectives.onesided.ring_member import RingMember
from mpiml.collectives.trees import unflatten
from mpiml.errors import ServiceGoneError, UsageError

__all__ = ["ClusterModel"]


class ClusterModel:
    """One member's use of its cluster's model; `mpiml.collectives.RingModel` is made of it.

    Local: every method.

    Parameters
    ----------
    memory : HostMemory
        Of this host.
    layout : Layout
        How the arrays are named.
    meeting : Meeting
        Finds the models of the other clusters.
    ring : RingMember or None
        Counts the updates; None: there is one cluster.
    """

    def __init__(
        self, memory: HostMemory, layout: Layout, meeting: Meeting, ring: RingMember | None
    ) -> None:
        self._team = memory.team
        self._layout = layout
        self._meeting = meeting
        self._ring = ring
        self._block = memory.block(self.index)
        self._adder = Adder(self._block, layout, "RingModel")
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

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    @property
    def version(self) -> int:
        """How many updates the cluster's model has had: by its members, and by turns."""
        return self._block.gate.version()

    def snapshot(self) -> tuple[Any, int]:
        """Return a copy of the cluster's model between two updates, and its version.

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
        version = self._block.snapshot(out, "RingModel.snapshot")
        return unflatten(self._layout.treedef, self._layout.regions.views(out)), version

    # -- writing -------------------------------------------------------------------------------

    def add(self, tree: Any, scale: float = 1.0) -> None:
        """Add ``scale * tree`` to the cluster's model, component by component. Local.

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
        self._adder.add(self._adder.leaves_of(tree, "RingModel.add"), scale)
        if self._ring is not None:
            self._ring.count(1)

    def add_at(self, name: Any, indices: Any, values: Any, scale: float = 1.0) -> None:
        """Add ``scale * values`` to elements of one array: ``array[indices] += scale * values``.

        Local. As `SharedModel.add_at`: an index that comes twice counts twice.

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
        adder, where = self._adder, "RingModel.add_at"
        number = adder.layout.number(name, where)
        if self._closed:
            self._open("add_at")
        if type(indices) is not np.ndarray or type(values) is not np.ndarray:
            indices, values = adder.at(number, indices, values, where)
        try:  # as they are, mostly
            adder.add_at(number, indices, values, scale)
        except (ValueError, BufferError):  # this makes them fit, or says what is wrong
            adder.add_at(number, *adder.at(number, indices, values, where), scale)
        if self._ring is not None:
            self._ring.count(1)

    def add_rows(self, name: Any, rows: Any, coefficients: Any = None) -> None:
        """Add the rows of a sparse block to one array, each times its coefficient.

        Local. Each row is one update; turns are had between rows, when they are due. Many rows
        in one call cost what memory costs.

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
            Indices are outside of the array; the parts of the block do not fit together. Rows
            before may have been added.
        """
        self._open("add_rows")
        adder, where, ring = self._adder, "RingModel.add_rows", self._ring
        number = adder.layout.number(name, where)
        found = adder.rows(number, rows, coefficients, where)
        count, begin = len(found.coefficients), 0
        try:
            while begin < count or not count:
                end = count if ring is None else min(count, begin + ring.room)
                adder.add_rows(number, _part(found, begin, end))
                if ring is not None:
                    ring.count(end - begin)
                if end == count:
                    break
                begin = end
        except ValueError as error:
            raise UsageError(str(error)) from None

    # -- staleness -----------------------------------------------------------------------------

    def mark(self) -> None:
        """Note that this member reads the model now: its next add is measured from here. Local.

        Without it, some adds are measured from the end of the add before.
        """
        self._adder.mark()

    def staleness(self) -> Staleness:
        """Return how many updates of others came between this member's reads and adds. Local.

        Of the cluster's model: by its other members, and by turns.
        """
        return self._adder.staleness()

    def _direct(self, call: str) -> tuple[Adder, RingMember | None]:
        """Return what a kernel of this package updates by itself, and what counts that."""
        self._open(call)
        return self._adder, self._ring

    def _open(self, call: str) -> None:
        if self._closed:
            raise ServiceGoneError(
                f"RingModel.{call}: the model is closed; use it before close(), or make another"
            )


def _part(rows: Rows, begin: int, end: int) -> Rows:
    """Return rows `begin` to `end` of a block."""
    if end - begin == len(rows.coefficients):
        return rows
    coefficients = rows.coefficients[begin:end]
    return Rows(rows.indptr[begin : end + 1], rows.indices, rows.values, coefficients)


def _read_only(view: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    found = view.view()
    found.flags.writeable = False
    return found
