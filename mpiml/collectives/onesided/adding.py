"""Additions to a block: what a call says, checked and made arrays; and how stale it was."""

from typing import Any, Final, NamedTuple

import numpy as np

from mpiml._native import hogwild_add, hogwild_add_at, hogwild_add_rows
from mpiml.collectives.onesided.layout import (
    Layout,
    leaves_like,
    values_for,
)
from mpiml.collectives.onesided.memory import Block
from mpiml.errors import UsageError

__all__ = ["Adder", "Meter", "Rows", "Staleness", "index_array"]

_EVERY: Final = 16  # adds, one of which is measured: to look costs a cache line of each member


class Staleness(NamedTuple):
    """How many updates of others came between a member's reads and its writes.

    Measured at some of its adds: at each, from the end of its add before, after which it read,
    or from `SharedModel.mark`.
    """

    samples: int
    mean: float
    largest: int


class Meter:
    """Gathers what `Staleness` tells. Local."""

    def __init__(self) -> None:
        self._samples = self._total = self._largest = 0

    def note(self, stale: int) -> None:
        """Take a sample."""
        self._samples += 1
        self._total += stale
        self._largest = max(self._largest, stale)

    def staleness(self) -> Staleness:
        """Return what has been measured."""
        mean = self._total / self._samples if self._samples else 0.0
        return Staleness(self._samples, mean, self._largest)


class Rows(NamedTuple):
    """Sparse updates of one leaf, as the rows of a CSR block."""

    indptr: "np.ndarray[Any, Any]"
    indices: "np.ndarray[Any, Any]"
    values: "np.ndarray[Any, Any]"
    coefficients: "np.ndarray[Any, Any]"

    def part(self, begin: int, end: int) -> "Rows":
        """Return rows `begin` to `end`, without a copy."""
        if end - begin == len(self.coefficients):
            return self
        coefficients = self.coefficients[begin:end]
        return Rows(self.indptr[begin : end + 1], self.indices, self.values, coefficients)


class Adder:
    """Adds of one member to a block of its host.

    Local: every method; no lock is taken, and nobody is waited for but a snapshot.

    Parameters
    ----------
    block : Block
        Where to.
    layout : Layout
        How its arrays are named.
    title : str
        Opens messages: the class that the user sees.
    """

    def __init__(self, block: Block, layout: Layout, title: str) -> None:
        self.block = block
        self.layout = layout
        self.title = title
        self.adds = 0
        self._mark: int | None = None
        self._meter = Meter()

    # -- what a call says ----------------------------------------------------------------------

    def leaves_of(self, tree: Any, where: str) -> "list[np.ndarray[Any, Any]]":
        """Return the leaves of a tree like the block's: see `leaves_like`."""
        return leaves_like(tree, self.layout.treedef, self.block.views, where)

    def rows(self, number: int, rows: Any, coefficients: Any, where: str) -> Rows:
        """Return the rows of a CSR block as arrays that the kernel takes.

        Raises
        ------
        UsageError
            It is no CSR block.
        """
        dtype = self.block.views[number].dtype
        names = ("indptr", "indices", "values" if hasattr(rows, "values") else "data")
        missing = [name for name in names if not hasattr(rows, name)]
        if missing:
            raise UsageError(
                f"{where}: rows: expected a CSR block with indptr, indices and values (or data), "
                f"as mpiml.datasets.CSR or scipy.sparse.csr_array, got {type(rows).__name__} "
                f"without {', '.join(missing)}"
            )
        indptr, indices, values = [np.ascontiguousarray(getattr(rows, name)) for name in names]
        if indptr.ndim != 1 or not len(indptr) or values.dtype.kind not in "fiub":
            raise UsageError(
                f"{where}: rows: expected indptr of shape (rows + 1,) and real values, got "
                f"{indptr.shape} and {values.dtype}"
            )
        indptr, indices = index_array(indptr), index_array(indices)
        count = len(indptr) - 1
        given = 1.0 if coefficients is None else coefficients
        return Rows(
            indptr,
            indices,
            np.ascontiguousarray(values, dtype),
            values_for(given, dtype, (count,), f"{where}: coefficients"),
        )

    # -- the adds ------------------------------------------------------------------------------

    def add(self, leaves: "list[np.ndarray[Any, Any]]", scale: float) -> None:
        """Add to all arrays: one update, for snapshots."""
        block = self.block
        self.before()
        block.enter(f"{self.title}.add")
        done = 0
        try:
            for own, leaf in zip(block.leaves, leaves, strict=True):
                hogwild_add(own, leaf.reshape(-1), scale)
                done = 1  # a part of an update counts: who reads from afar compares versions
        finally:
            block.gate.leave(done)
        self.after(1)

    def add_leaf(self, number: int, leaf: "np.ndarray[Any, Any]", scale: float) -> None:
        """Add to one array."""
        block = self.block
        self.before()
        try:
            hogwild_add(block.leaves[number], leaf.reshape(-1), scale, gate=block.gate)
        except TimeoutError as error:
            raise block.stuck(error, f"{self.title}.add") from None
        self.after(1)

    def add_at(
        self,
        number: int,
        positions: "np.ndarray[Any, Any]",
        values: "np.ndarray[Any, Any]",
        scale: float,
    ) -> None:
        """Add to elements of a leaf.

        Raises
        ------
        ValueError
            A position is outside of the leaf, or arrays are of kinds that the kernel does not
            take. Nothing has been added.
        """
        block = self.block
        if self._mark is not None:
            self.before()
        try:
            hogwild_add_at(block.leaves[number], positions, values, scale, gate=block.gate)
        except TimeoutError as error:
            raise block.stuck(error, f"{self.title}.add_at") from None
        self.adds += 1
        if not self.adds % _EVERY:
            self._mark = block.gate.version()

    def add_rows(self, number: int, rows: Rows) -> None:
        """Add rows to a leaf, each times its coefficient; each is one update."""
        block = self.block
        self.before()
        try:
            hogwild_add_rows(block.leaves[number], *rows, "atomic", None, block.gate)
        except TimeoutError as error:
            raise block.stuck(error, f"{self.title}.add_rows") from None
        self.after(len(rows.coefficients))

    # -- staleness -----------------------------------------------------------------------------

    def mark(self) -> None:
        """Note that the member reads now, to measure how stale its next add is."""
        self._mark = self.block.gate.version()

    def before(self) -> None:
        """Measure, if the time of the read is known."""
        if self._mark is None:
            return
        self._meter.note(self.block.gate.version() - self._mark)
        self._mark = None

    def after(self, updates: int) -> None:
        """Count, and note when the member may read again."""
        self.adds += updates
        if not self.adds % _EVERY or updates > 1:
            self._mark = self.block.gate.version()

    def staleness(self) -> Staleness:
        """Return what has been measured."""
        return self._meter.staleness()


def index_array(indices: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return integers as the kernel takes them: of 4 or 8 bytes, signed."""
    known = indices.dtype in (np.int32, np.int64)
    return indices if known or indices.dtype.kind not in "iu" else indices.astype(np.int64)
