"""Coroutines: bodies, ``run`` and methods that are ``async def``, on one event loop per node."""

import threading
from collections.abc import Callable, Coroutine
from typing import Any

from mpiml.errors import Stopped, UsageError
from mpiml.scope import Scope, enter
from mpiml.server import Request, Server
from mpiml.turns import MethodScope
from mpiml.waits import Wait
from mpiml.wire import FLAG_STREAM

__all__ = ["Loop", "is_async", "start_async"]

_COROUTINE = 0x80  # inspect.CO_COROUTINE, without importing inspect at start-up


def is_async(function: Any) -> bool:
    """Return whether `function` is ``async def``, under bound methods and wrappers too."""
    function = getattr(function, "__wrapped__", function)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return bool(code is not None and code.co_flags & _COROUTINE)


class Loop:
    """The event loop of a node, on a thread of its own, started at its first coroutine."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._lock = threading.Lock()
        self._loop: Any = None
        self._thread: threading.Thread | None = None

    def submit(
        self,
        coroutine: Coroutine[Any, Any, Any],
        scope: Scope,
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Run `coroutine` for `scope`; `done(result, error)` is called on the loop's thread."""
        with self._lock:
            if self._loop is None:
                self._start()
        self._loop.call_soon_threadsafe(self._launch, coroutine, scope, done)

    def _start(self) -> None:
        import asyncio

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._loop,),
            name=f"mpiml loop {self._title}",
            daemon=True,
        )
        self._thread.start()

    def _run(self, loop: Any) -> None:
        import asyncio

        asyncio.set_event_loop(loop)
        loop.run_forever()

    def _launch(self, coroutine: Any, scope: Scope, done: Any) -> None:
        async def guarded() -> None:
            enter(scope)  # the task has a context of its own, so nothing is to be undone
            try:
                result = await coroutine
            except BaseException as error:
                done(None, error)
            else:
                done(result, None)

        def settled(task: Any) -> None:
            _alive.discard(task)
            if task.cancelled():  # before its first step: `guarded` has seen nothing of it
                coroutine.close()
                done(None, asyncio.CancelledError())

        import asyncio

        task = asyncio.get_running_loop().create_task(guarded())
        _alive.add(task)
        task.add_done_callback(settled)

    def run(self, coroutine: Coroutine[Any, Any, Any], scope: Scope, engine: Any = None) -> Any:
        """Run `coroutine` to its end and return its result; for bodies.

        Parameters
        ----------
        coroutine, scope
            What to run, and for whom.
        engine
            Where nobody drives it but the calling thread: what that is to drive meanwhile.
        """
        box: list[Any] = []
        gate = threading.Event()

        over = Wait(f"{self._title}: its coroutine")

        def done(result: Any, error: BaseException | None) -> None:
            box.extend((result, error))
            gate.set()
            if engine is not None:
                engine.fulfil(over)

        self.submit(coroutine, scope, done)
        if engine is not None:
            engine.wait(over, None, None)
        gate.wait()
        result, error = box
        if error is not None:
            raise error
        return result

    def tasks(self) -> list[Any]:
        """Return the coroutines under way, for the report of who waits for whom."""
        if self._loop is None:
            return []
        import asyncio

        return list(asyncio.all_tasks(self._loop))

    @property
    def idle(self) -> bool:
        """Whether nothing is to be run, now or at a time that has been set.

        Only the loops of asyncio itself tell; another, as of uvloop, counts as busy.
        """
        loop = self._loop
        if loop is None:
            return True
        ready, scheduled = getattr(loop, "_ready", None), getattr(loop, "_scheduled", None)
        return ready is not None and scheduled is not None and not (ready or scheduled)

    def stop(self) -> None:
        """End the loop; coroutines that are still under way are cancelled."""
        loop, self._loop = self._loop, None
        if loop is None:
            return

        def cancel() -> None:
            import asyncio

            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.call_soon, loop.stop)

        loop.call_soon_threadsafe(cancel)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
            if not self._thread.is_alive():
                loop.close()


_alive: set[Any] = set()  # asyncio keeps only weak references to tasks


def start_async(server: Server, request: Request, method: Any, scope: MethodScope) -> None:
    """Start an ``async def`` method: it holds its turn, but no thread, until it ends."""
    if request.frame.flags & FLAG_STREAM:
        raise UsageError(
            f"{server.owner.title}.{request.frame.name.decode()}: expected a plain call of a "
            "coroutine, got client.stream. An async def that yields can be streamed."
        )
    args, kwargs = request.arguments()
    coroutine = method(*args, **kwargs)
    if not hasattr(coroutine, "__await__"):  # a wrapper that has run it already
        server.answer(request, coroutine)
        return
    own_scope = MethodScope(server)
    server.detach(+1)

    def done(result: Any, error: BaseException | None) -> None:
        try:
            if error is None:
                server.answer(request, result)
            elif isinstance(error, SystemExit) and not error.code:
                server.answer(request, None)  # a return, as in a body
            elif isinstance(error, Exception):
                server.answer_error(request, error)
            elif isinstance(error, Stopped) or type(error).__name__ == "CancelledError":
                server.refuse(request)
            else:
                server.owner.fail(error)
        finally:
            server.detach(-1)
            own_scope.end()

    server.keep_turn()
    server.owner.loop.submit(coroutine, own_scope, done)
