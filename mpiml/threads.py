"""What MPI's thread level allows in this process, and the one thread that calls MPI below the full.

With ``MPI_THREAD_MULTIPLE`` any thread may call MPI, and nothing here is ever in the way. Below
it one thread, called *home*, makes every call of ours:

- ``FUNNELED``: the thread that has initialised MPI, which is the only one that may;
- ``SERIALIZED``: the thread that has launched the program, while one runs, since the user's own
  calls are under no lock of ours. Without a program any thread may call collectives, and the
  user sees to it that no two do so at once.

Local: knows no MPI; `mpiml.world` says what it has found.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpiml.errors import UsageError

__all__ = [
    "FUNNELED",
    "HOME",
    "MULTIPLE",
    "SERIALIZED",
    "SINGLE",
    "at_home",
    "check",
    "check_main",
    "funneled",
    "name",
    "need_multiple",
    "noted",
    "refuse_await",
    "refuse_sleep",
    "settle",
]

SINGLE, FUNNELED, SERIALIZED, MULTIPLE = range(4)
_NAMES = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_CURE = (
    "To have it, initialise MPI with MPI_Init_thread(MPI_THREAD_MULTIPLE); mpi4py does so unless "
    "mpi4py.rc or MPI4PY_RC_THREAD_LEVEL says otherwise."
)

_level = MULTIPLE  # until MPI is there nothing is forbidden

#: identity of the thread that calls MPI, once for each program inside another one on it; empty
#: where any thread may
HOME: list[int] = []
_coming = threading.Lock()


def name(level: int) -> str:
    """Return the name of a level: ``"MPI_THREAD_FUNNELED"``."""
    return f"MPI_THREAD_{_NAMES[level] if 0 <= level < len(_NAMES) else level}"


def settle(level: int, main: bool, library: str) -> None:
    """Note the level at which MPI runs, on the thread that is about to use it.

    Parameters
    ----------
    level
        As constants here, whose order is MPI's.
    main
        Whether the calling thread is the one that has initialised MPI.
    library
        The MPI library, for the message.

    Raises
    ------
    UsageError
        If no thread of mpiml may exist beside the user's, or this one may not call MPI.
    """
    global _level
    check_main(level, main)
    if level < FUNNELED:
        raise UsageError(
            f"mpiml: expected MPI_THREAD_FUNNELED or more, got {name(level)} from {library}, under "
            "which a process has one thread; mpiml needs others, which do not call MPI. Initialise "
            "MPI with MPI_Init_thread(MPI_THREAD_FUNNELED), or import mpi4py.MPI, which asks for "
            "the most there is, before the package that calls MPI_Init."
        )
    _level = level
    if level == FUNNELED and not HOME:
        HOME.append(threading.get_ident())


def check_main(level: int, main: bool) -> None:
    """Refuse a thread on which MPI must not be called, not even to tell others so.

    Parameters
    ----------
    level, main
        As of `settle`.

    Raises
    ------
    UsageError
        MPI runs with less than ``SERIALIZED``, and another thread has initialised it.
    """
    if level < SERIALIZED and not main:
        raise UsageError(
            f"mpiml: expected to be called on the thread that has initialised MPI, got "
            f"thread {threading.current_thread().name!r}: under {name(level)} no "
            f"other may call MPI. Call it there. {_CURE}"
        )


def noted() -> int:
    """Return the level at which MPI runs, as it was noted."""
    return _level


def funneled() -> bool:
    """Return whether one thread makes all calls of MPI."""
    return _level < MULTIPLE


@contextmanager
def at_home(level: int) -> Iterator[None]:
    """Make the calling thread the one that calls MPI while a program starts, runs and ends.

    Where that is not always the same one: with ``SERIALIZED``.

    Parameters
    ----------
    level
        As of `settle`, which need not have been called.

    Raises
    ------
    UsageError
        A program of another thread runs. Nothing has called MPI yet, and nothing may.
    """
    if level != SERIALIZED:
        yield
        return
    me = threading.get_ident()
    with _coming:
        if HOME and HOME[-1] != me:
            raise UsageError(
                f"mpiml.launch: expected to be called on thread {_called(HOME[-1])!r}, a program of "
                f"which runs, or once that has ended, got thread {_called(me)!r}: under "
                f"{name(level)} two threads may not call MPI at once. Launch one after the "
                f"other, or both on one thread. {_CURE}"
            )
        HOME.append(me)
    try:
        yield
    finally:
        with _coming:
            HOME.remove(me)


def _called(ident: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return names.get(ident, str(ident))


def check(what: str) -> None:
    """Refuse what calls MPI on a thread that may not.

    Parameters
    ----------
    what
        Opens the message: ``"a collective of role 'solver'"``.

    Raises
    ------
    UsageError
        Where one thread makes all calls of MPI, on any other.
    """
    home = HOME[-1:]
    if home and threading.get_ident() != home[0]:
        raise UsageError(
            f"{what}: expected thread {_called(home[0])!r}, got thread "
            f"{threading.current_thread().name!r}: MPI runs with {name(_level)}, so one thread "
            f"makes all calls of MPI. Call it there, and mpiml.poll() in its loop. {_CURE}"
        )


def need_multiple(what: str, instead: str) -> None:
    """Refuse what needs a thread of its own that calls MPI.

    Parameters
    ----------
    what
        Opens the message.
    instead
        A sentence: what does without.

    Raises
    ------
    UsageError
        Below ``MPI_THREAD_MULTIPLE``.
    """
    if funneled():
        raise UsageError(
            f"{what}: expected MPI_THREAD_MULTIPLE, got {name(_level)}: it needs a thread of its "
            f"own that calls MPI. {instead} {_CURE}"
        )


def refuse_sleep(home: int, what: str, instead: str) -> None:
    """Refuse what would let the one thread that drives sleep where nothing wakes it.

    Parameters
    ----------
    home
        Identity of that thread; 0: any may drive.
    what, instead
        As of `need_multiple`.
    """
    if home and threading.get_ident() == home:
        raise UsageError(
            f"{what}: expected a wait in mpiml, got one outside of it, which would last for ever: "
            f"MPI runs with {name(_level)}, so nobody but the thread that waits takes replies in. "
            f"{instead} {_CURE}"
        )


def refuse_await(engine: Any, what: str) -> None:
    """Refuse to suspend a coroutine on the one thread that drives `engine`, as `refuse_sleep`."""
    instead = "Wait without await there, or use async def nodes, which have a thread."
    refuse_sleep(getattr(engine, "home", 0), f"await on {what}", instead)
