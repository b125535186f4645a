"""What a forked child must not share with its parent, and is left behind as it begins.

A child has its parent's handlers, and the pipe into which Python writes each signal. Until both
are gone, a SIGTERM for the child would be taken for one of the parent's. So signals that mpiml
handles are held back around a fork, until the child has forgotten them.
"""

import os
import signal
import threading
from collections.abc import Callable

__all__ = ["guard_fork"]

_HELD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)

_in_child: list[Callable[[], None]] = []
_masks = threading.local()  # .old: of a thread that is about to fork
_registered = False


def guard_fork(on_child: Callable[[], None]) -> Callable[[], None]:
    """Run `on_child` in every child that this process forks, before its signals come through.

    Local: no MPI. The last one given runs first, since it stands on what was there before it.
    Giving the same function again changes nothing. What it raises is dropped, as Python does
    with all functions of ``os.register_at_fork``, which cannot be withdrawn.

    Returns
    -------
    callable
        Ends it.
    """
    global _registered
    if not _registered:
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_after_fork)
        _registered = True
    if on_child not in _in_child:
        _in_child.append(on_child)

    def remove() -> None:
        if on_child in _in_child:
            _in_child.remove(on_child)

    return remove


def _hold() -> None:
    _masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def _let_go() -> None:
    old = getattr(_masks, "old", None)
    if old is not None:
        _masks.old = None
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _after_fork() -> None:
    for function in reversed(_in_child):
        try:
            function()
        except Exception:
            import traceback

            traceback.print_exc()
    _let_go()
