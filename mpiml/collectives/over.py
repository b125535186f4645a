"""Where collectives have ended for a process: it ends itself, or it is the child of a fork."""

import os
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from mpiml.errors import MpimlError, ServiceGoneError, UsageError

__all__ = ["GUESTS", "LAST", "OVER", "THREADED", "end"]

#: what has to tell others, by its `leave_at_end`, that this process will not come again
GUESTS: "WeakSet[Any]" = WeakSet()

#: what has a thread of its own that calls MPI: its `close` ends it, before MPI is finalised
THREADED: "WeakSet[Any]" = WeakSet()

#: what is to be done after that, as long as MPI is there: each waits for nobody for long
LAST: "list[Callable[[], None]]" = []

#: the error that every operation and wait raises from then on; empty before
OVER: list[MpimlError] = []


def end() -> None:
    """End all waits of this process, and those of others for it: it ends, or MPI here. Local."""
    if OVER:  # done; or it is the child of a fork, in which nothing is the parent's
        return
    for guest in list(GUESTS):
        _do(guest.leave_at_end)
    OVER.append(
        ServiceGoneError(
            "mpiml.collectives: the process, or MPI in it, has ended while an operation was under "
            "way. Wait for every request before."
        )
    )
    for holder in list(THREADED):
        _do(holder.close)
    for function in LAST:
        _do(function)


def _do(function: Callable[[], None]) -> None:
    """Do one thing of the end, and the others even if it fails."""
    try:
        function()
    except Exception as error:
        sys.stderr.write(f"mpiml: at the end of the process: {type(error).__name__}: {error}\n")


def _forked() -> None:
    OVER[:] = [
        UsageError(
            "mpiml.collectives: this process is the forked child of a member, and not a member. "
            "Use collectives in the parent only; start workers with the method 'spawn' or "
            "'forkserver'."
        )
    ]


os.register_at_fork(after_in_child=_forked)
