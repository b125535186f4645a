"""Reads of the parameters from the servers' own memory, by workers of their host."""

import os
from collections.abc import Sequence
from typing import Any, Final

from mpiml.consistency import Async
from mpiml.payload_memory import take
from mpiml.roles.parameter_server.memory import SharedView
from mpiml.roles.parameter_server.settings import Settings
from mpiml.roles.parameter_server.tree import TreeParts

__all__ = ["LocalReader", "is_near"]

_LOOKS: Final = 100  # at the versions, before all parts are copied
_TRIES: Final = 8  # to copy all parts between the same two updates


class LocalReader:
    """Copies the parameters out of the memory of all servers. Safe from several threads.

    Parameters
    ----------
    views : list of SharedView
        Of each server; the first one tells whether this worker may read.
    worker : int or None
        None: it only reads, and may always.
    """

    def __init__(self, views: Sequence[SharedView], worker: int | None) -> None:
        self._views = views
        self._worker = worker
        self.reads = 0  #: how often all was read so

    @classmethod
    def of(
        cls, opened: Sequence[Any], worker: int | None, settings: Settings
    ) -> "LocalReader | None":
        """Return one, if all servers can be read here and need not know of each read."""
        consistency = settings.consistency
        if isinstance(consistency, Async) and consistency.compensate:
            return None  # they keep what each worker has pulled
        views: list[SharedView] = []
        for each in opened:
            view = None if each.address is None else SharedView.open(each.address)
            if view is None:
                return None
            views.append(view)
        return cls(views, worker)

    @property
    def readable(self) -> bool:
        """Whether the consistency lets this worker read now."""
        return self._worker is None or bool(self._views[0].words[self._worker])

    def _meet(self) -> None:
        """Let servers that are behind others catch up: one has an update before the next."""
        for _ in range(_LOOKS if len(self._views) > 1 else 0):
            if len({view.version for view in self._views}) == 1:
                return
            os.sched_yield()

    def read(self, tree: TreeParts) -> tuple[Any, int] | None:
        """Return a copy of the tree and its version; None if servers are never at the same."""
        plan = tree.plan
        block = memoryview(take(max(1, plan.nbytes)))
        for _ in range(_TRIES):
            self._meet()
            versions = {
                view.copy_to(block[begin:end])
                for view, (begin, end) in zip(self._views, plan.spans, strict=True)
            }
            if len(versions) == 1 and None not in versions:
                (version,) = versions
                assert version is not None
                self.reads += 1
                return tree.of(plan.whole(block)), version
        return None


def is_near(node: Any, shards: Sequence[Any]) -> bool:
    """Tell whether all servers are on a node's host. Local."""
    runtime = getattr(node, "runtime", None)
    if runtime is None:  # code around the program
        return False
    ranks = [shard.__dict__["_target"].rank for shard in shards]
    ranks.append(runtime.ranks[node.vertex])
    return len({runtime.hosts.host_of(rank) for rank in ranks}) == 1
