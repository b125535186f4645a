"""When services end as publishers: once nothing is left that could call them.

A service without ``run()`` publishes when it is called, so no return says that it has put its last
message. Its topics end when nobody could call it any more: every body has returned, sits in
`wait_for_stop` or waits in mpiml, no method runs, and no frame is under way. The last is known as
in Mattern's four-counter method (Algorithms for distributed termination detection, 1987): two
waves of questions, one after the other, find all ranks waiting, and as many frames taken in as
sent, both times the same number.

A thread made with ``context().bind`` counts as the body does. One that mpiml does not know is not
seen: a service that publishes from such a thread needs a ``run()`` that returns when the thread is
done.

Rank 0 asks once its own frames have stood still for a look, and less and less often while the
answer is no. The questions go down a tree, and what comes up is summed (see `mpiml.waves`).
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpiml.callbacks import callbacks
from mpiml.control import children
from mpiml.hosting import has_body
from mpiml.survey import coroutines_of
from mpiml.waves import Values, Waves
from mpiml.wire import TOPIC_ASK, TOPIC_OVER, TOPIC_QUIET, Frame

__all__ = ["Quiet"]

_STEP = 0.05  # s between looks, at first
_LONGEST = 1.0  # s between them in the end, where asking has been in vain
_PAUSE = 0.002  # s between two waves, so that what the first has sent is counted in the second
_LIMIT = 2.0  # s to wait for answers; a rank that computes may be late, and is not quiet then


class _State(NamedTuple):
    """What a rank says: frames, bodies that have not returned, and whether all there wait."""

    sent: int
    received: int
    open: int
    quiet: bool


class _Answer:
    """What all ranks say together. A late one still lands where it was asked for, and only there."""

    def __init__(self) -> None:
        self.state: _State | None = None
        self.complete = threading.Event()

    def take(self, values: Values) -> None:
        sent, received, open_, quiet = values
        self.state = _State(sent, received, open_, bool(quiet))
        self.complete.set()


class Quiet:
    """Ends the topics of services, on one rank. Local; rank 0 looks, from a thread of its own.

    Parameters
    ----------
    runtime
        The program on this rank, whose engine's table of handlers is filled.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._closed = threading.Event()
        self.looks = 0  #: how often rank 0 has looked whether its own nodes wait
        self.waves = 0  #: how often it has asked all ranks
        self._wave: _Answer | None = None
        self._asks = Waves(
            runtime.engine, TOPIC_ASK, TOPIC_QUIET, lambda: tuple(self.local()), _together
        )
        runtime.engine.handlers[TOPIC_OVER] = self._on_over

    def watch(self) -> None:
        """Begin, if some service publishes and has no body. Called once.

        Without a body that the program waits for it runs until it is stopped: nothing ends before.
        """
        runtime = self._runtime
        nodes = (runtime.vertices[v].node for v in runtime.topics.publishers)
        waited = runtime.engine.rank == 0 and runtime.ending.bodies
        if waited and not all(map(has_body, nodes)):
            threading.Thread(target=self._watch, name="mpiml-quiet", daemon=True).start()

    def close(self) -> None:
        """End: the program stops."""
        self._closed.set()
        wave = self._wave
        if wave is not None:
            wave.complete.set()

    # -- this rank -----------------------------------------------------------------------------

    def local(self) -> _State:
        """Return how this rank stands; waits for nothing."""
        runtime = self._runtime
        engine = runtime.engine
        sleepers = [*engine.sleepers.values(), *runtime.teams.sleepers()]
        quiet = not callbacks.under_way(engine) and not runtime.stopping
        quiet = quiet and all(_waits(node, sleepers) for node in runtime.present)
        sent, received = engine.counts()
        left = sum(
            not (node.returned or node.waiting or node.spec.daemon) for node in runtime.present
        )
        # the frames of these waves do not count
        return _State(sent - self._asks.sent, received - self._asks.received, left, quiet)

    def _on_over(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self._over()

    def _over(self) -> None:
        """End the topics of services here, and let the ranks below know."""
        runtime = self._runtime
        engine = runtime.engine
        for rank in children(engine.rank, engine.size):
            engine.transmit(rank, TOPIC_OVER, engine.rank, rank)
        for node in runtime.nodes:
            if not node.body:
                runtime.topics.end(node.vertex, late=True)

    # -- rank 0 --------------------------------------------------------------------------------

    def _watch(self) -> None:
        runtime = self._runtime
        step, before = _STEP, None
        while not self._closed.wait(step) and not runtime.stopping:
            self.looks += 1
            here = self.local()
            if not here.quiet or (here.sent, here.received) != before:
                step, before = _STEP, (here.sent, here.received)
                continue
            first = self._ask(here)
            paused = first is not None and not self._closed.wait(_PAUSE)
            if paused and self._ask(self.local()) == first:
                self._over()
                return
            step = min(2 * step, _LONGEST)

    def _ask(self, here: _State) -> tuple[int, int] | None:
        """Return how many frames were sent and taken in; None where some rank is not quiet.

        Nor is the program where these differ, or where no body is left that could wait for a
        message: then it ends by itself, or runs until it is stopped.
        """
        self.waves += 1
        answer = self._wave = _Answer()
        if not here.quiet or self._closed.is_set():  # after the assignment: see `close`
            return None
        self._asks.ask(answer.take)
        if not answer.complete.wait(_LIMIT) or answer.state is None:
            return None
        sent, received, left, quiet = answer.state
        return (sent, received) if quiet and sent == received and left else None


def _together(one: Values, other: Values) -> Values:
    sent, received, left = (a + b for a, b in zip(one[:3], other[:3], strict=True))
    return sent, received, left, one[3] & other[3]


def _waits(node: Any, sleepers: Sequence[Any]) -> bool:
    """Return whether all that runs for a node waits in mpiml, for as long as it takes."""
    mine = [s for s in sleepers if s.scope is not None and s.scope.owner is node]
    if node.constructing or any(s.deadline is not None or s.wait.ready for s in mine):
        return False
    # by thread, not by scope: one that sits in wait_for_stop has none
    asleep = {s.thread for s in sleepers if s.deadline is None and not s.wait.ready}
    if not asleep.issuperset(list(node.bound.values())):
        return False
    if node.server.active != sum(bool(s.scope.nested) for s in mine):
        return False  # a method computes, is queued, or is a coroutine
    if not node.body or node.returned or node.waiting:
        return True
    if any(s.thread == node.thread for s in mine):
        return True
    tasks = coroutines_of(node)
    return bool(tasks) and all(waits for waits, _ in tasks) and node.loop.idle
