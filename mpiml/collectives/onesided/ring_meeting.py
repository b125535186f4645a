"""How the model of a cluster meets that of the next one in HogWild++'s ring.

On one host the kernel works on both models in place. A model of another host is asked for
by message and copied; when it is here, the kernel works on the copy, and what the other model
is to be given is sent. Nobody waits in between: the member goes on with its updates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiml._native import ring_prepare, ring_sync
from mpiml.collectives.onesided.layout import Layout
from mpiml.collectives.onesided.links import Link
from mpiml.collectives.onesided.memory import Block, HostMemory
from mpiml.collectives.onesided.records import ADD
from mpiml.collectives.onesided.remote import Remote, Route

__all__ = ["Meeting"]

_Counts = tuple[int, int]  # components that were passed on, and that were not


class Meeting:
    """One member's way to bring its cluster's model and another's together.

    Local: every method. `begin`, then `ready` until it is true, then `finish`.

    Parameters
    ----------
    memory : HostMemory
        Of this host, with twins: the snapshots of the clusters.
    remote : Remote or None
        The way to other hosts.
    layout : Layout
        The arrays.
    firsts : sequence of int
        For each cluster a member of it.
    title : str
        Opens messages.
    """

    def __init__(
        self,
        memory: HostMemory,
        remote: Remote | None,
        layout: Layout,
        firsts: Sequence[int],
        title: str,
    ) -> None:
        self._memory = memory
        self._remote = remote
        self._regions = layout.regions
        self._firsts = firsts
        self._label = f"{title}: a turn in the ring"
        self._own = memory.block(memory.team.index)
        self._blocks: dict[int, Block] = {}
        self._routes: dict[int, Route] = {}
        self._copy: np.ndarray[Any, Any] | None = None
        self._to: int | None = None  # the cluster, once begun
        self._came: Callable[[], bool] | None = None
        self._sent: Link | None = None  # that may have something on its way

    @property
    def begun(self) -> bool:
        """Whether one has been begun and not finished."""
        return self._to is not None

    def begin(self, to: int) -> None:
        """Begin to meet a cluster's model."""
        self._to = to
        if self.block(to) is None:
            if self._copy is None:
                self._copy = np.empty(self._regions.nbytes, np.uint8)
            route = self.route(to)
            self._came = route.link.begin_read(route.spot.data, self._copy.data)

    def ready(self) -> bool:
        """Return whether it can be finished; does not wait."""
        if self._came is not None and self._came():
            self._came = None
        return self._came is None

    def wait(self) -> None:
        """Wait until it can be finished."""
        if self._came is not None:
            assert self._to is not None
            self.route(self._to).link.until(self.ready, "a turn in the ring")

    def finish(self, step: float, beta: float, lam: float, tolerance: float) -> _Counts:
        """Have the models meet; return how many components were passed on, and were not."""
        assert self._to is not None
        numbers = step, beta, lam, tolerance
        block = self.block(self._to)
        self._own.enter(self._label)
        try:
            if block is not None:
                counts = self._near(block, numbers)
            else:
                counts, passed = self._far(numbers)
        finally:
            self._own.gate.leave(1)
        if block is None and counts[0]:
            route = self.route(self._to)
            route.write(ADD, passed)
            self._sent = route.link
        self._to = None
        return counts

    def _near(self, block: Block, numbers: tuple[float, float, float, float]) -> _Counts:
        own = self._own
        moved = kept = 0
        block.enter(self._label)
        try:
            for mine, snapshot, other in zip(own.leaves, own.twins, block.leaves, strict=True):
                more, less = ring_sync(mine, snapshot, other, *numbers)
                moved, kept = moved + more, kept + less
        finally:
            block.gate.leave(1 if moved else 0)
        return moved, kept

    def _far(
        self, numbers: tuple[float, float, float, float]
    ) -> "tuple[_Counts, list[np.ndarray[Any, Any]]]":
        own = self._own
        moved = kept = 0
        assert self._copy is not None
        others = [view.reshape(-1) for view in self._regions.views(self._copy)]
        passed = [np.empty_like(leaf) for leaf in own.leaves]
        for mine, snapshot, other, out in zip(
            own.leaves, own.twins, others, passed, strict=True
        ):
            more, less = ring_prepare(mine, snapshot, other, *numbers, out)
            moved, kept = moved + more, kept + less
        return (moved, kept), passed

    def applied(self) -> bool:
        """Return whether the other model has what it was given; does not wait."""
        return self._sent is None or self._sent.applied

    def flush(self) -> None:
        """Wait until it has."""
        if self._sent is not None:
            self._sent.flush()

    def drop(self) -> None:
        """Leave what has been begun."""
        self._to = self._came = None

    # -- clusters ------------------------------------------------------------------------------

    def block(self, cluster: int) -> Block | None:
        """Return a cluster's model, if it is of this host."""
        found = self._blocks.get(cluster)
        if found is None and self._firsts[cluster] in self._memory.team.local:
            found = self._blocks[cluster] = self._memory.block(self._firsts[cluster])
        return found

    def route(self, cluster: int) -> Route:
        """Return the way to a cluster's model of another host."""
        found = self._routes.get(cluster)
        if found is None:
            assert self._remote is not None
            found = self._routes[cluster] = self._remote.route(self._firsts[cluster])
        return found
