"""Roles that count no rounds any more, though they have: they stop all the same.

A role that has counted rounds stops after the next one, see `mpiml.agree`. Where none follows,
as with a collective that only hands out first values, no replica would ever reach it. So, some
time after a stop has come, a node whose body only waits in mpiml or looks at ``stopping``, and
begins no round, says that it is idle, which promises to ask before it begins another. Once all
of a role are idle or have left, the top of the role's tree stops them all at once.
"""

import threading
import time
from typing import Any

from mpiml.hosting import HostedNode

__all__ = ["Idle"]

_FIRST = 0.5  # s from the stop to the first look; most programs have ended by then
_STEP = 0.1  # s between looks
_STILL = 0.4  # s without a round, until a node may count as idle


class Idle:
    """Looks for idle nodes of one rank. Local.

    Parameters
    ----------
    runtime
        The program on this rank.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._seen: dict[int, tuple[int, int, float]] = {}  # vertex -> rounds, polls, since
        self._told: set[int] = set()  # nodes that will begin no round, as has been said

    def watch(self) -> None:
        """Begin: a stop has come. A second call does nothing."""
        nodes = [n for n in self._runtime.nodes if n.spec.replicas > 1 and not n.broken]
        with self._lock:
            if self._thread is None and nodes and not self._end.is_set():
                now = time.monotonic()
                self._seen = {n.vertex: (n.agreement.rounds, n.polls, now) for n in nodes}
                self._thread = threading.Thread(
                    target=self._watch, args=(nodes,), name="mpiml-idle", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End: all bodies here are over, which is said where it has not been."""
        with self._lock:
            self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, nodes: list[HostedNode]) -> None:
        runtime, pause, over = self._runtime, _FIRST, False
        while not over:
            over = self._end.wait(pause)  # then look once more: it has to be said
            pause = _STEP
            for node in nodes:
                if runtime.done or runtime.ending.abandoned:
                    return
                self._look(node)

    def _look(self, node: HostedNode) -> None:
        agreement = node.agreement
        if node.vertex in self._told or agreement.at_once:
            return
        if node.agreed or node.returned:
            self._told.add(node.vertex)
            self._runtime.agreeing.idle(node.vertex, True)
            return
        if not agreement.ending:
            return
        now = time.monotonic()
        rounds, polls, since = self._seen[node.vertex]
        if rounds != agreement.rounds:
            self._seen[node.vertex] = (agreement.rounds, node.polls, now)
            return
        still = now - since >= _STILL and (node.polls > polls + 1 or self._waits(node))
        if not node.idle and still and not self._runtime.teams.busy(node):
            node.rest(rounds)

    def _waits(self, node: HostedNode) -> bool:
        """Tell whether the body is in an mpiml wait."""
        if node.scope.awaiting:
            return True
        sleepers = list(self._runtime.engine.sleepers.values())
        return any(sleeper.thread == node.thread for sleeper in sleepers)
