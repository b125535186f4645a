"""A block as one reads and writes it: in the memory of this host, or on another."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpiml.collectives.onesided.adding import Adder
from mpiml.collectives.onesided.layout import Layout
from mpiml.collectives.onesided.memory import Block
from mpiml.collectives.onesided.records import ADD, ASSIGN
from mpiml.collectives.onesided.remote import Route

__all__ = ["Away", "Here", "Target"]

_Arrays = Sequence["np.ndarray[Any, Any]"]


class Target(Protocol):
    """What can be done to a block. Local: every method.

    Leaves are named by their numbers; None stands for all of them, one behind the other.
    """

    def get(self, number: int | None, out: Any, label: Any) -> None:
        """Copy a leaf, or the whole block, to a buffer of its size, as it is."""

    def snapshot(self, out: Any, label: Any, clear: bool = False) -> int:
        """Copy the block between two updates; return its version."""

    def assign(self, number: int | None, leaves: _Arrays, label: Any) -> None:
        """Set leaves: one update."""

    def add(self, number: int | None, leaves: _Arrays, scale: float, label: Any) -> None:
        """Add to leaves: one update."""

    def add_at(self, number: int, positions: Any, values: Any, scale: float) -> None:
        """Add to elements of a leaf: one update."""


class Here:
    """A block in the memory of this host."""

    def __init__(self, block: Block, layout: Layout, title: str) -> None:
        self.block = block
        self._adder = Adder(block, layout, title)

    def get(self, number: int | None, out: Any, label: Any) -> None:
        """Copy a leaf, or the whole block, as it is."""
        data = self.block.data
        if number is not None:
            data = self.block.leaves[number].data.cast("B")
        out[:] = data

    def snapshot(self, out: Any, label: Any, clear: bool = False) -> int:
        """Copy the block between two updates."""
        return self.block.snapshot(out, label, clear)

    def assign(self, number: int | None, leaves: _Arrays, label: Any) -> None:
        """Set leaves."""
        block = self.block
        if number is None:
            block.assign(list(leaves), label)
            return
        block.enter(label)
        try:
            block.views[number][...] = leaves[0]
        finally:
            block.gate.leave(1)

    def add(self, number: int | None, leaves: _Arrays, scale: float, label: Any) -> None:
        """Add to leaves."""
        if number is None:
            self._adder.add(list(leaves), scale)
        else:
            self._adder.add_leaf(number, leaves[0], scale)

    def add_at(self, number: int, positions: Any, values: Any, scale: float) -> None:
        """Add to elements of a leaf."""
        self._adder.add_at(number, positions, values, scale)


class Away:
    """A block in the memory of another host."""

    def __init__(self, route: Route, layout: Layout) -> None:
        self.route = route
        self._layout = layout

    def get(self, number: int | None, out: Any, label: Any) -> None:
        """Copy a leaf, or the whole block, as it is."""
        at = 0 if number is None else self._layout.regions.leaf(number)[0]
        self.route.read(at, out, label)

    def snapshot(self, out: Any, label: Any, clear: bool = False) -> int:
        """Copy the block between two updates, after what this member has sent."""
        return self.route.snapshot(out, label, clear)

    def assign(self, number: int | None, leaves: _Arrays, label: Any) -> None:
        """Send values to be set."""
        self._write(ASSIGN, number, leaves, 1.0)

    def add(self, number: int | None, leaves: _Arrays, scale: float, label: Any) -> None:
        """Send values to be added."""
        self._write(ADD, number, leaves, scale)

    def add_at(self, number: int, positions: Any, values: Any, scale: float) -> None:
        """Send values to be added to elements."""
        self.route.link.add_at(self.route.block, number, positions, values, scale)

    def _write(self, kind: int, number: int | None, leaves: _Arrays, scale: float) -> None:
        if number is None:
            self.route.write(kind, leaves, scale)
        else:
            self.route.write_leaf(kind, number, leaves[0], scale)
