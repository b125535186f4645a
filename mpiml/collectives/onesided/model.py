"""A model in the memory of a host, which its members read and add to: the base of both kinds."""

from typing import Any

import numpy as np

from mpiml.collectives.onesided.adding import Adder, Rows, Staleness
from mpiml.collectives.onesided.held import Held
from mpiml.collectives.onesided.layout import Layout, elements_of, scale_for
from mpiml.collectives.onesided.memory import HostMemory
from mpiml.collectives.onesided.remote import Remote
from mpiml.collectives.trees import unflatten
from mpiml.errors import UsageError

__all__ = ["Model"]


class Model(Held):
    """One member's use of the model of its group of members.

    Local: every method but those of `Held`.

    Parameters
    ----------
    memory : HostMemory
        Of this host.
    layout, remote, name
        As for `Held`.
    """

    def __init__(
        self, memory: HostMemory, layout: Layout, remote: Remote | None, name: str | None
    ) -> None:
        super().__init__(memory.team, layout, remote, name)
        self._block = memory.block(self.index)
        self._adder = Adder(self._block, layout, self.title)
        self._add_at = f"{self.title}.add_at"
        self._axes = [view.ndim for view in self._block.views]
        views = self._block.views
        self.raw = unflatten(layout.treedef, views)
        self.tree = unflatten(layout.treedef, [_read_only(view) for view in views])

    # -- reading -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """How many updates the model has had, by anybody."""
        return self._block.gate.version()

    @property
    def _known(self) -> int:
        """The version, as far as it is known here: nobody is asked."""
        return self._block.gate.version()

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
        return self._copied(self._snapshot)

    def _snapshot(self, out: Any) -> int:
        return self._block.snapshot(out, f"{self.title}.snapshot")

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
            It is not like the model; `scale` is no number.
        """
        self._open("add")
        where = f"{self.title}.add"
        leaves, scale = self._adder.leaves_of(tree, where), scale_for(scale, where)
        self._adder.add(leaves, scale)
        self._added(leaves, scale)

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
            There is no such array; indices are outside of it; values do not fit; `scale` is no
            number.
        """
        adder = self._adder
        where = self._add_at
        number = adder.layout.number(name, where)
        if self._closed:
            self._open("add_at")
        plain = type(indices) is np.ndarray and type(values) is np.ndarray
        if plain and indices.ndim == values.ndim == self._axes[number] == 1:
            try:  # as they are, mostly
                adder.add_at(number, indices, values, scale)
            except (
                TypeError,
                ValueError,
                BufferError,
            ):  # this makes them fit, or says what is wrong
                plain = False
        else:
            plain = False
        if not plain:
            indices, values = elements_of(self._block.views[number], indices, values, where)
            scale = scale_for(scale, where)
            adder.add_at(number, indices, values, scale)
        self._added_at(number, indices, values, scale)

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
            Indices are outside of the array; the parts of the block do not fit together. Rows
            before may have been added.
        """
        self._open("add_rows")
        where = f"{self.title}.add_rows"
        number = self._layout.number(name, where)
        found = self._adder.rows(number, rows, coefficients, where)
        try:
            self._add_rows(number, found)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _added(self, leaves: "list[np.ndarray[Any, Any]]", scale: float) -> None:
        """Do what follows on an addition to all arrays."""

    def _added_at(self, number: int, positions: Any, values: Any, scale: float) -> None:
        """Do what follows on an addition to elements."""

    def _add_rows(self, number: int, rows: Rows) -> None:
        """Add rows that have been checked, and do what follows."""
        self._adder.add_rows(number, rows)

    # -- staleness -----------------------------------------------------------------------------

    def mark(self) -> None:
        """Note that this member reads the model now: its next add is measured from here. Local.

        Without it, some adds are measured from the end of the add before.
        """
        self._open("mark")
        self._adder.mark()

    def staleness(self) -> Staleness:
        """Return how many updates of others came between this member's reads and adds. Local."""
        return self._adder.staleness()

    def statistics(self) -> dict[str, Any]:
        """Return size, way of working and what was measured, for logs."""
        return {
            **super().statistics(),
            "adds": self._adder.adds,
            "version": self._known,
            "staleness": self.staleness()._asdict(),
        }


def _read_only(view: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    found = view.view()
    found.flags.writeable = False
    return found
