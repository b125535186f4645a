"""What one shard holds of the parameters: how it changes, and what pulls get of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiml.consistency import Async, Consistency
from mpiml.errors import UsageError
from mpiml.roles.parameter_server.following import Apply
from mpiml.roles.parameter_server.memory import Private, Shared, memory_of
from mpiml.roles.parameter_server.plan import LINE, Plan
from mpiml.roles.parameter_server.settings import Settings
from mpiml.roles.parameter_server.store import Sparse, Store

__all__ = ["Part"]


class Part:
    """The pieces of one shard. Local; not safe from several threads.

    Parameters
    ----------
    leaves : list of ndarray or Keys
        Of the whole tree, as it is at first.
    plan : Plan
        Where they are.
    shard : int
        Which of its shards.
    settings : Settings
        The user's.
    workers : int
        How many there are.
    shared : bool
        Whether workers of this host are to read its memory.
    filters : ServerFilters, optional
        Of messages.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        plan: Plan,
        shard: int,
        settings: Settings,
        workers: int,
        shared: bool,
        filters: Any = None,
    ) -> None:
        self._plan, self._shard = plan, shard
        self._store = Store(leaves, plan.pieces[shard], settings.optimizer)
        self._placed = False
        begin, end = plan.spans[shard]
        self.memory: Private | Shared = memory_of(
            end - begin, begin % LINE, self._moved, workers, shared
        )
        self._compensate = _compensation(settings.consistency)
        if self._compensate and plan.tables:
            raise UsageError(
                "ParameterServerNode: expected arrays only with Async(compensate=), since servers "
                f"keep what each worker has pulled, got {plan.leaves[plan.tables[0]]}, of which "
                "workers pull rows. Leave the one or the other out."
            )
        self._then: dict[int, tuple[int, Any]] = {}  # what each worker has pulled last
        self._filters = filters
        self._decode = settings.decode

    def _moved(self, memory: Any) -> None:
        """Put the arrays into new memory; it has their values, but the first time."""
        for i, new in enumerate(self._plan.arrays(self._shard, memory)):
            if new is not None:
                if not self._placed:
                    new[:] = self._store.arrays[i]
                self._store.arrays[i] = new
        self._placed = True

    @property
    def version(self) -> int:
        """How many updates there were."""
        return self._store.step

    # -- updates -------------------------------------------------------------------------------

    def decode(self, worker: int, message: Any) -> Any:
        """Return the gradient in a message: one for each piece.

        Raises
        ------
        UsageError
            It does not fit the pieces.
        """
        if self._filters is not None:
            gradient = self._filters.decode(worker, message)
        else:
            gradient = self._plan.received(self._shard, message)
            if self._decode is not None:
                gradient = [_decoded(part, self._decode) for part in gradient]
        self._store.check(gradient)
        return gradient

    def apply(self, entry: Apply, gradients: Sequence[Sequence[Any]]) -> None:
        """Do one step with the mean of some gradients."""
        if self._compensate:
            gradients = [
                self._compensated(worker, version, gradient)
                for worker, version, gradient in zip(
                    entry.workers, entry.versions, gradients, strict=True
                )
            ]
        self.memory.begin()
        try:
            self._store.apply(gradients, entry.rate)
        finally:
            self.memory.end()

    def _compensated(self, worker: int, version: int, gradient: Sequence[Any]) -> list[Any]:
        """Add what the gradient misses of what has changed since it was computed."""
        known, then = self._then.get(worker, (-1, None))
        if known != version:
            return list(gradient)
        found: list[Any] = []
        arrays = self._plan.arrays(self._shard, then)
        for g, old, now in zip(gradient, arrays, self._store.arrays, strict=True):
            if g is None or old is None:
                found.append(g)
            elif isinstance(g, Sparse):
                moved = now[g.indices] - old[g.indices]
                more = self._compensate * g.values * g.values * moved
                found.append(Sparse(g.indices, g.values + more))
            else:
                found.append(g + self._compensate * g * g * (now - old))
        return found

    # -- reads ---------------------------------------------------------------------------------

    def whole(self, worker: int | None) -> Any:
        """Return all there is, for a worker or a reader: bytes, or messages of filters."""
        bytes_ = self.memory.snapshot()
        if worker is not None:
            if self._compensate:
                self._then[worker] = self.version, bytes_
            if self._filters is not None and self._filters.pulls:
                return self._filters.encode(worker, self._plan.arrays(self._shard, bytes_))
        return bytes_

    def some(self, selected: Sequence[tuple[int, Any]]) -> list[Any]:
        """Return copies of some elements or rows."""
        found = []
        for piece, indices in selected:
            array = self._store.arrays[piece]
            found.append(
                np.array(array) if indices is None else self._store.take(piece, indices)
            )
        return found

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all there is."""
        return self._store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned, of the same shard of as many.

        Raises
        ------
        UsageError
            It is of other pieces, or of fewer updates than there have been here: workers know
            of these.
        """
        before = self.version
        if state["step"] < before:
            raise UsageError(
                f"ParameterServerNode: expected a state of {before} updates or more, as there have "
                f"been, got one of {state['step']}. Load it before workers push."
            )
        self.memory.begin()
        try:
            self._store.load_state_dict(state)
        finally:
            self.memory.end(self.version - before)
        self._then.clear()


def _decoded(part: Any, decode: Any) -> Any:
    """Return what the user's codec makes of what it has made of an array."""
    return part if part is None or isinstance(part, Sparse) else decode(part)


def _compensation(consistency: Consistency) -> float:
    return consistency.compensate if isinstance(consistency, Async) else 0.0
