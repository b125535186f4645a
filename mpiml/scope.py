"""Which node a thread belongs to, and what it is running: a body or a method.

A scope travels in a context variable, so asyncio tasks inherit it and a thread that the
user starts does not, unless it is carried there by ``context().bind``. Where a process holds
a single node, every thread belongs to it.
"""

import contextvars
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Protocol

from mpiml.errors import Stopped, UsageError

__all__ = [
    "BodyScope",
    "Owner",
    "Scope",
    "current_scope",
    "enter",
    "forbid",
    "leave",
    "owners",
    "scope_here",
]


class Owner(Protocol):
    """The node behind a scope, as far as lower floors need to know it."""

    vertex: int
    title: str  # "role/index"


class Scope:
    """What a thread runs for a node. Bodies can be interrupted by a stop, methods cannot.

    Attributes
    ----------
    owner
        The node.
    halt
        True once every mpiml wait of this scope has to raise `Stopped`.
    nested
        True inside a method: its calls never wait for credit.
    """

    __slots__ = ("halt", "nested", "owner")

    def __init__(self, owner: Any, nested: bool = False) -> None:
        self.owner = owner
        self.halt = False
        self.nested = nested

    def suspend(self) -> bool:
        """Give up what the scope holds while it waits; True if `resume` must be called."""
        return False

    def resume(self) -> None:
        """Take back what `suspend` gave up."""

    def regain(self) -> Generator[Any, None, None]:
        """Do what `resume` does, without blocking an event loop."""
        yield from ()


class BodyScope(Scope):
    """The body of a node: a function, `run()`, or a thread bound to one of them."""

    __slots__ = ("awaiting",)

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.awaiting: set[Any] = set()  # asyncio futures that a stop has to end

    def stop(self) -> None:
        """Make every mpiml wait of this body raise `Stopped`, in coroutines too."""
        self.halt = True
        for future in list(self.awaiting):
            with suppress(RuntimeError):  # its loop has been closed: nobody awaits any more
                future.get_loop().call_soon_threadsafe(_end, future)


def _end(future: Any) -> None:
    if not future.done():
        future.set_exception(Stopped("the program is stopping"))


_current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("mpiml", default=None)

#: Scopes of the bodies alive in this process, the latest program last. A thread without a
#: scope of its own belongs to the node there, where that program has one node here.
owners: list[list[Scope]] = []
_forbidden: list[str] = []


def forbid(text: str) -> None:
    """Make every later use of mpiml in this process, a forked child, raise `UsageError`."""
    _forbidden[:] = [text]


def current_scope(required: bool = True) -> Scope | None:
    """Return the scope of this thread.

    Raises
    ------
    UsageError
        If several nodes share the process and the thread belongs to none of them, or no
        program runs here; not raised with ``required=False``. In a forked child, always.
    """
    if _forbidden:
        raise UsageError(_forbidden[0])
    scope = _current.get()
    if scope is not None:
        return scope
    if owners and len(owners[-1]) == 1:
        return owners[-1][0]
    if not required:
        return None
    if not owners:
        raise UsageError(
            "mpiml.context(): expected to be called inside a node of a running program, got a "
            "thread outside of any. Call it in a body or a method."
        )
    names = ", ".join(scope.owner.title for scope in owners[-1][:4])
    raise UsageError(
        f"mpiml: {len(owners[-1])} nodes share this process ({names}, ...) and this thread "
        "belongs to none of them. Start it with a function from mpiml.context().bind(f)."
    )


def scope_here() -> Scope | None:
    """Return the scope that `enter` gave to this thread, if any.

    Raises
    ------
    UsageError
        In a forked child.
    """
    if _forbidden:
        raise UsageError(_forbidden[0])
    return _current.get()


def enter(scope: Scope) -> contextvars.Token[Scope | None]:
    """Make `scope` that of this thread; give the token to `leave`."""
    return _current.set(scope)


def leave(token: contextvars.Token[Scope | None]) -> None:
    """Undo `enter`."""
    _current.reset(token)
