"""A node on its rank: constructs it, runs its body, serves its methods, ends it."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from mpiml.agree import Agreement
from mpiml.aio import Loop, is_async, start_async
from mpiml.batching import Batcher, start_batched
from mpiml.errors import Stopped
from mpiml.graph import Vertex
from mpiml.handles import bind
from mpiml.nodes import PyNode, ServiceNode, is_stream, served_methods
from mpiml.readiness import READY
from mpiml.reducing import REDUCE, reduce_here
from mpiml.scope import BodyScope, current_scope, enter, leave
from mpiml.server import MethodScope, Request, Server
from mpiml.streams import start_stream
from mpiml.waits import Wait

__all__ = ["LEFT", "HostedNode", "has_body"]

LEFT = "\0left"
"""A method of every node: answers when the body is over; True, if it has returned by itself."""

RUNS, RETURNED, STOPPED, FAILED = range(4)
"""How a body was left."""

_SWITCH = 5e-5


def has_body(node: Any) -> bool:
    """Return whether a node runs by itself: a function, or a ``run()``."""
    return not isinstance(node, ServiceNode) or hasattr(node.callable, "run")


class _Beside:
    """What holds while some ``run()`` of a service computes beside its methods.

    A request must get the interpreter from it soon, and it must get it back between requests.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: list[
            Any
        ] = []  # one entry for each run(), in all programs of the process
        self._interval = 0.0

    def enter(self, engine: Any) -> None:
        """Begin, for one more."""
        with self._lock:
            if not self._engines:
                self._interval = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH)
            self._engines.append(engine)
            engine.pause_us = 100

    def leave(self, engine: Any) -> None:
        """Put back what was, after the last."""
        with self._lock:
            self._engines.remove(engine)
            if engine not in self._engines:
                engine.pause_us = 0
            if not self._engines:
                sys.setswitchinterval(self._interval)


_beside = _Beside()


class HostedNode:
    """One vertex of the graph, on the rank that holds it.

    Parameters
    ----------
    runtime
        The program on this rank.
    vertex
        The vertex.
    """

    def __init__(self, runtime: Any, vertex: Vertex) -> None:
        self.runtime = runtime
        self.spec = vertex
        self.vertex = vertex.id
        self.title = vertex.title
        self.scope = BodyScope(self)
        self.loop = Loop(self.title)
        self.agreement = Agreement(self.title)
        self.released = Wait(f"{self.title}: wait_for_stop()")
        self.agreed = False
        self.broken = False  # a member of the role has failed
        self.how = RUNS
        self.attached = False  # the body is the code that called `attach`
        self.polls = 0  # looks at `stopping` since a stop was asked for
        self.idle = False  # it has been said that no round will be begun before asking
        self.resumed = Wait(f"{self.title}: asking its role to go on")
        self.waiting = False  # the body sits in wait_for_stop, for as long as it takes
        self.thread = 0  # identity of the thread that runs the body
        self.bound: dict[object, int] = {}  # functions of `bind` under way: their threads
        self.calling_back = False
        self.body = has_body(vertex.node)
        self.returned = not self.body
        self.constructing = isinstance(vertex.node, ServiceNode)
        self.value: Any = None
        self.object: Any = None
        self.callbacks: list[Callable[[], None]] = []
        self.leaving: list[Callable[[BaseException | None], None]] = []
        self.at_end: list[Callable[[], None]] = []  # once the program's end has begun here
        self._call: Callable[[], Any] = lambda: None
        self.context: Any = None
        self._held: list[tuple[Request, Callable[[], Any]]] = []  # until the body is over
        self._lock = threading.Lock()
        self._pact = threading.Lock()
        serves = isinstance(vertex.node, ServiceNode)
        self.server = Server(runtime.engine, self, vertex.concurrency if serves else 1 << 20)
        self.server.starters[b""] = start_stream
        if not serves:
            self.server.methods = {b"result": self._result, b"done": lambda: self.returned}
            self.server.starters[b"result"] = self._start_result
        self.server.methods[REDUCE.encode()] = partial(reduce_here, self.server)
        self.server.methods[READY.encode()] = lambda: None
        self.server.methods[LEFT.encode()] = self._by_itself
        self.server.starters[LEFT.encode()] = self._start_result
        if not serves:
            self.server.serve()

    # -- running -----------------------------------------------------------------------------

    def run(self) -> None:
        """Construct the node and run its body on this thread; never raises."""
        token = enter(self.scope)
        self.thread = threading.get_ident()
        left_by = None
        try:
            self._run()
        except BaseException as error:
            left_by = error
        finally:
            leave(token)
        self.left_by(left_by)

    def left_by(self, error: BaseException | None) -> None:
        """Note how the body was left."""
        how = RETURNED if error is None else STOPPED
        if error is not None and not (_is_stop(error) and self.runtime.stopping):
            self.fail(error)
            how = FAILED if not isinstance(error, SystemExit) or error.code else RETURNED
        if self.body or how == FAILED:
            self.how = how
        if self.body or error is not None:
            self.leave(error)
        self._left()

    def leave(self, error: BaseException | None = None) -> None:
        """Run what the node wants done when it is over, last first: `error` is why, if one is.

        A body is over when it has returned, a service without one when the program ends.
        """
        while self.leaving:
            try:
                self.leaving.pop()(error)
            except Exception as another:
                self.fail(another)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Build what the node was given, with clients in the places of handles. In its scope."""
        node = self.spec.node
        args, kwargs = bind((node.args, dict(node.kwargs)), self.runtime.resolver(self))
        return args, kwargs

    def build(self) -> None:
        """Construct the object of a service or class node, and start to serve."""
        node = self.spec.node
        args, kwargs = self.arguments()
        if isinstance(node, PyNode):
            self._call = lambda: node.callable(*args, **kwargs)
            return
        self.object = node.callable(*args, **kwargs)
        if isinstance(node, ServiceNode):
            self._serve(node)
            self.server.serve()
        self.constructing = False
        if self.body:
            self._call = self.object.run

    def _run(self) -> None:
        self.build()
        if not self.body:
            return
        function = self._call
        beside = isinstance(self.spec.node, ServiceNode)
        engine = self.runtime.engine
        if beside:
            _beside.enter(engine)
        try:
            result = function()
            if hasattr(result, "__await__") and is_async(self._called()):
                drives = self.thread == engine.home  # and nobody else does
                result = self.loop.run(result, self.scope, engine if drives else None)
            self.value = result
        finally:
            if beside:
                _beside.leave(engine)

    def _called(self) -> Any:
        node = self.spec.node
        return self.object.run if self.object is not None else node.callable

    def _serve(self, node: Any) -> None:
        for name in served_methods(node.callable, self.spec.allow, self.title):
            method = getattr(self.object, name)
            key = name.encode()
            self.server.methods[key] = method
            batched = getattr(method, "__mpiml_batched__", None)
            if batched is not None:
                self.server.wrappers[key] = Batcher(method, *batched)
                self.server.starters[key] = start_batched
            elif is_async(method):
                self.server.starters[key] = start_async
            elif is_stream(method):
                self.server.starters[key] = start_stream

    def _left(self) -> None:
        """Note that the body is over, and answer who waits for its value."""
        self.constructing = False
        with self._lock:
            was = self.returned
            self.returned = True
            held, self._held = self._held, []
        for request, value in held:
            self._answer(request, value)
        if self.agreement.decided.ready and not self.agreed:
            self.release()  # no further round will be begun here
        if not was:
            self.runtime.body_left(self)

    # -- what the client of a body asks --------------------------------------------------------

    def _result(self) -> Any:
        return self.value

    def _by_itself(self) -> bool:
        return self.how == RETURNED and not self.runtime.stopping

    def _start_result(
        self, server: Server, request: Request, method: Any, scope: MethodScope
    ) -> None:
        with self._lock:
            if not self.returned:
                self._held.append((request, method))
                return
        self._answer(request, method)

    def _answer(self, request: Request, value: Callable[[], Any]) -> None:
        if self.server.gone is not None:
            self.server.refuse(request)
            return
        try:
            self.server.answer(request, value())
        except Exception as error:
            self.server.answer_error(request, error)

    # -- the end -------------------------------------------------------------------------------

    def fail(self, error: BaseException | None) -> None:
        """End the program because of `error`; safe from any thread."""
        assert error is not None
        self.runtime.fail(self, error)

    def stop(self, at_once: bool) -> None:
        """Take part in agreeing where the role stops, or stop at once: a member has failed."""
        self.broken = self.broken or at_once
        if at_once:
            self.release()
            return
        count = self.agreement.freeze()
        if self.spec.replicas == 1:
            if count is not None:  # only collectives go on to where the loop asks
                self.agreement.decide(count + 1 if count else 0)
            self.release()
        elif count is not None:
            self.runtime.agreeing.freeze(self.vertex, count)

    def on_target(self, target: int) -> None:
        """Learn after which round the role stops."""
        at_once = self.agreement.decide(target)
        self.idle = False
        self.runtime.engine.fulfil(self.resumed)
        # before the look at the body: it says that it waits, or has returned, and then looks here
        self.runtime.engine.fulfil(self.agreement.decided)
        if at_once or self.waiting or self.returned:
            self.release()

    def rest(self, rounds: int) -> None:
        """Say that the body is idle, unless it has begun more than `rounds` rounds."""
        with self._pact:
            self.resumed = Wait(self.resumed.about)
            self.idle = True  # before the look: who begins a round counts it, then looks here
            if self.agreement.rounds == rounds:
                self.runtime.agreeing.idle(self.vertex, True)
            else:
                self.idle = False

    def resume(self) -> None:
        """Ask to go on, before a round, if it has been said that the body is idle."""
        with self._pact:  # after it has been said
            if not self.idle:
                return
            resumed = self.resumed
            self.runtime.agreeing.idle(self.vertex, False)
        self.runtime.engine.wait(resumed, None, None)

    def release(self) -> None:
        """Let every mpiml wait of the body raise `Stopped` from now on."""
        self.agreed = self.agreement.alert = True
        self.scope.stop()
        engine = self.runtime.engine
        for wait in (self.released, self.agreement.decided, self.resumed):
            engine.fulfil(wait)
        engine.interrupt()

    def team(self) -> Any:
        """Return what `mpiml.collectives` needs of the role. Collective over it, at first."""
        return self.runtime.teams.of(self)

    def agree_stop(self) -> bool:
        """Count a round of the role; see `Context.agree_stop`."""
        stopping = self.agreement.begin_round()
        if self.runtime.engine.home and not self.agreed:
            stopping = self.runtime.teams.heard(self, stopping)
        if not stopping or self.agreed:
            return self.agreed
        self.runtime.engine.wait(self.agreement.decided, None, None)
        self.resume()
        if self.agreement.is_last():
            self.release()
        return self.agreed

    def wait_for_stop(self, timeout: float | None, deadline: float | None) -> bool:
        """Wait for the stop; while the body does, the program may end."""
        scope = current_scope(required=False)
        body = scope is self.scope and self._on_body_thread() and not self.returned
        # a timed wait is a pause in its work: such a body is waited for
        counted = body and timeout is None and self.body and not self.spec.daemon
        if body and timeout is None:
            self.waiting = True
            if self.agreement.decided.ready:  # no further round will be begun here
                self.release()
        if counted:
            self.runtime.ending.body(-1)
        # it raises nothing in a body: it is what waits for the stop. A method gives its turn up
        held = scope if scope is not None and scope.nested else None
        try:
            self.polls += self.agreement.alert
            return bool(self.runtime.engine.wait(self.released, deadline, held))
        finally:
            if body:
                self.waiting = False
            if counted:
                self.runtime.ending.body(+1)

    def _on_body_thread(self) -> bool:
        here = threading.current_thread()
        return here.ident == self.thread or here.name == f"mpiml loop {self.title}"


def _is_stop(error: BaseException) -> bool:
    """Return whether a body was left because it was told to stop, in a group of tasks too."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_stop(one) for one in error.exceptions)
    return isinstance(error, Stopped)
