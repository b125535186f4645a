"""Turns: at most ``concurrency`` methods of a service run, and one that waits does not count."""

from collections.abc import Callable, Generator
from typing import Any

from mpiml.callbacks import wake
from mpiml.scope import Scope
from mpiml.waits import Wait

__all__ = ["MethodScope", "Turn"]


class MethodScope(Scope):
    """A running method; gives its turn away while it waits.

    Several tasks of one coroutine may wait at once: the turn is given away by the first, and
    taken back when none of them waits any more. `lock` of the server protects the fields.
    """

    __slots__ = ("_server", "_ticket", "ended", "holds", "waits")

    def __init__(self, server: Any) -> None:
        super().__init__(server.owner, nested=True)
        self._server = server
        self._ticket: Turn | None = None
        self.waits = 0
        self.holds = True
        self.ended = False

    def suspend(self) -> bool:
        """Let the next call in."""
        server = self._server
        with server.lock:
            if self.ended:
                return False
            self.waits += 1
            if self.holds:
                self.holds = False
                server.give_back()
            else:
                self._withdraw()
        return True

    def _withdraw(self) -> None:
        """Let go on without a turn who waits for one: its method waits once more."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._server.resuming.remove(ticket)
            self._server.engine.fulfil(ticket)
            ticket.call_back()

    def _ask(self) -> "Turn | None":
        server = self._server
        with server.lock:
            self.waits -= 1
            if self.waits or self.holds or self.ended:
                return None
            if server.take_turn():
                self.holds = True
                return None
            self._ticket = ticket = Turn(self)
            server.resuming.append(ticket)
            return ticket

    def granted(self) -> None:
        """Note that the server has given a turn; under its lock."""
        self._ticket = None
        self.holds = True

    def resume(self) -> None:
        """Wait for a turn, before calls that have not started."""
        ticket = self._ask()
        if ticket is not None:
            self._server.engine.wait(ticket, None, None)

    def regain(self) -> Generator[Any, None, None]:
        """Wait for a turn in a coroutine."""
        ticket = self._ask()
        if ticket is None:
            return
        import asyncio

        proxy = asyncio.get_running_loop().create_future()
        ticket.call_back = lambda: wake(proxy)
        if not ticket.ready:
            yield from proxy.__await__()

    def end(self) -> None:
        """Give the turn back for good: tasks or threads that are left wait without one."""
        server = self._server
        with server.lock:
            self.ended = True
            self._withdraw()
            if self.holds:
                self.holds = False
                server.give_back()


class Turn(Wait):
    """A method that has waited and wants its turn back."""

    __slots__ = ("call_back", "scope")

    def __init__(self, scope: MethodScope) -> None:
        super().__init__(f"{scope.owner.title}: a turn to go on")
        self.scope = scope
        self.call_back: Callable[[], None] = _nothing


def _nothing() -> None:
    pass
