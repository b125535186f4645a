"""A host's copy of a model whose home is another host, as one member uses it."""

import time
from typing import Any, Final

import numpy as np

from mpiml.collectives.onesided.adding import Meter, Rows, Staleness
from mpiml.collectives.onesided.layout import Layout, flat_indices
from mpiml.collectives.onesided.memory import Block
from mpiml.collectives.onesided.remote import Route
from mpiml.errors import UsageError

__all__ = ["Copy"]

_EVERY: Final = 16  # pulls, one of which may be measured: it asks the home for its version
_PAUSE: Final = 0.05  # s between two that are: the home's agent looks often after a question


class Copy:
    """One member's use of its host's copy.

    Local: every method.

    Parameters
    ----------
    block : Block
        The copy.
    layout : Layout
        How its arrays are named.
    route : Route
        To the home.
    """

    def __init__(self, block: Block, layout: Layout, route: Route) -> None:
        self._block = block
        self._layout = layout
        self.route = route
        regions = layout.regions
        self._offsets = [regions.leaf(number)[0] for number in range(len(regions.leaves))]
        self._pulls = 0
        self._marked = 0.0  # when
        self._asked: int | None = None  # the question for the version of the last mark
        self._meter = Meter()
        self.known = 0  #: the home's version, when it was last heard of

    # -- reading -------------------------------------------------------------------------------

    def pull(self, name: Any, indices: Any) -> None:
        """Bring the copy up to date, or elements of it.

        Raises
        ------
        UsageError
            There is no such array, or it has no such elements.
        """
        where = "SharedModel.pull"
        self._pulls += 1
        if not self._pulls % _EVERY and time.monotonic() - self._marked > _PAUSE:
            self.mark(wait=False)
        elif self._asked is not None:
            self._unmark()  # this read is later
        if name is None and None not in self._layout.places:
            if indices is not None:
                raise UsageError(f"{where}: indices: expected the name of an array besides")
            self.route.read(0, self._block.data, where)
            return
        number = self._layout.number(name, where)
        leaf = self._block.leaves[number]
        size, at = leaf.itemsize, self._offsets[number]
        if indices is None:
            if leaf.nbytes:
                self.route.read(at, self._block.data[at : at + leaf.nbytes], where)
            return
        if type(indices) is int and 0 <= indices < len(self._block.views[number]):
            step = leaf.nbytes // len(self._block.views[number])
            begin = at + indices * step
            self.route.read(begin, self._block.data[begin : begin + step], where)
            return
        positions, _ = flat_indices(indices, self._block.views[number].shape, where)
        self._parts(at, size, np.unique(positions), where)

    def _parts(self, at: int, size: int, positions: "np.ndarray[Any, Any]", where: str) -> None:
        """Read elements that may lie apart; those side by side in one piece."""
        if not positions.size:
            return
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        firsts = positions[np.r_[0, breaks]]
        lasts = positions[np.r_[breaks - 1, positions.size - 1]]
        data = self._block.data
        self.route.read_parts(
            [
                (begin, data[begin:end])
                for begin, end in zip(
                    (at + firsts * size).tolist(),
                    (at + (lasts + 1) * size).tolist(),
                    strict=True,
                )
            ],
            where,
        )

    def version(self) -> int:
        """Return how many updates the home has had."""
        self.known = self.route.link.mark(self.route.block).version
        return self.known

    def snapshot(self, out: Any) -> int:
        """Copy the home's arrays between two updates; return its version."""
        self.known = self.route.snapshot(out, "SharedModel.snapshot")
        return self.known

    # -- writing -------------------------------------------------------------------------------

    def add_at(self, number: int, positions: Any, values: Any, scale: float) -> None:
        """Send an addition to elements of a leaf."""
        self._look()
        self.route.link.add_at(self.route.block, number, positions, values, scale)

    def add_rows(self, number: int, rows: Rows) -> None:
        """Send the rows of a CSR block."""
        self._look()
        self.route.link.add_rows(self.route.block, number, rows)

    def write(self, kind: int, leaves: "list[np.ndarray[Any, Any]]", scale: float) -> None:
        """Send values for all arrays, to be added or assigned."""
        self._look()
        self.route.write(kind, leaves, scale)

    # -- staleness -----------------------------------------------------------------------------

    def mark(self, wait: bool = True) -> None:
        """Ask for the home's version: how stale the next addition is counts from it.

        Parameters
        ----------
        wait : bool
            Whether the answer is waited for; else the home gives it when it comes to it, and
            what others add until then does not count.
        """
        self._marked = time.monotonic()
        self._look()
        self._unmark()
        if self._asked is None:  # else an addition that was marked is on its way
            self._asked = self.route.link.begin_mark(self.route.block)
            self.route.link.mark_next()
            if wait:
                self.route.link.answered(self._asked, "reading a version")

    def _unmark(self) -> None:
        """Forget the mark, if nothing has been added since."""
        if self._asked is not None and self.route.link.unmark():
            self.route.link.forget(self._asked)
            self._asked = None

    def _look(self) -> None:
        """Take in what the home has said of a mark, and of the addition after it."""
        link = self.route.link
        if self._asked is None or link.seen is None:
            return
        said = link.answer(self._asked)  # it has come: answers keep their order
        seen, link.seen, self._asked = link.seen, None, None
        if said is not None:
            self.known = seen.version
            self._meter.note((seen.version - seen.own) - (said.version - said.own))

    def staleness(self) -> Staleness:
        """Return what has been measured."""
        self._look()
        return self._meter.staleness()
