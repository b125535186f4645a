"""How the end of a call reaches code that does not wait in mpiml: callbacks and event loops."""

import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from mpiml.errors import Stopped
from mpiml.scope import Scope

__all__ = ["Callbacks", "await_in", "callbacks", "wake"]


class Callbacks:
    """A thread for the callbacks of users: they may wait, which the thread that drives cannot."""

    def __init__(self) -> None:
        self.name = "callbacks of mpiml"  # of the thread
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = threading.Lock()
        self._open: dict[object, Any] = {}

    def put(self, action: Callable[[], None], program: Any = None) -> None:
        """Run `action` soon, in the order given. Safe in ``__del__``: takes no lock.

        Parameters
        ----------
        action
            What to run.
        program
            The engine of the program that must not end before; see `under_way`.
        """
        if program is not None:
            action = self._counted(action, program)
        self._queue.put(action)
        if self._started.acquire(False):  # once
            threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def _counted(self, action: Callable[[], None], program: Any) -> Callable[[], None]:
        key = object()
        self._open[key] = program

        def run() -> None:
            try:
                action()
            finally:
                del self._open[key]

        return run

    def under_way(self, program: Any) -> int:
        """Return how many callbacks of a program wait or run."""
        return sum(owner is program for owner in list(self._open.values()))

    def _run(self) -> None:
        while True:
            # an action's objects must not live on until the next one comes
            with suppress(BaseException):  # Stopped: the node of the callback ends
                self._queue.get()()


#: The thread of this process.
callbacks = Callbacks()


def wake(proxy: Any) -> None:
    """Finish `proxy`, an asyncio future, from any thread."""

    def settle() -> None:
        if not proxy.done():
            proxy.set_result(None)

    with suppress(RuntimeError):  # the loop has ended: nobody awaits any more
        proxy.get_loop().call_soon_threadsafe(settle)


def await_in(scope: Scope | None, proxy: Any) -> Generator[Any, None, None]:
    """Await `proxy`, an asyncio future, for what `scope` runs: a stop ends it in a body."""
    awaiting = getattr(scope, "awaiting", None)
    held = scope is not None and scope.suspend()
    try:
        if awaiting is not None and scope is not None:
            awaiting.add(proxy)
            if scope.halt:
                raise Stopped("the program is stopping")
        yield from proxy.__await__()
    finally:
        if awaiting is not None:
            awaiting.discard(proxy)
        if held and scope is not None:
            yield from scope.regain()
