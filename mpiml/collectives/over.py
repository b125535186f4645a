"""Where collectives have ended for a process: it ends itself, or it is the child of a fork."""

import os
from typing import Any
from weakref import WeakSet

from mpiml.errors import MpimlError, ServiceGoneError, UsageError

__all__ = ["GUESTS", "OVER", "THREADED", "end"]

#: what has to tell others, by its `leave_at_end`, that this process will not come again
GUESTS: "WeakSet[Any]" = WeakSet()

#: what has a thread of its own that calls MPI: its `close` ends it, before MPI is finalised
THREADED: "WeakSet[Any]" = WeakSet()

#: the error that every operation and wait raises from then on; empty before
OVER: list[MpimlError] = []


def end() -> None:
    """End all waits of this process, and those of others for it: it ends. Local."""
    if OVER:  # in the child of a fork nothing is the parent's
        return
    for guest in list(GUESTS):
        guest.leave_at_end()
    OVER.append(
        ServiceGoneError(
            "mpiml.collectives: the process ends while an operation is under way. Wait for "
            "every request before the program's end."
        )
    )
    for holder in list(THREADED):
        holder.close()


def _forked() -> None:
    OVER[:] = [
        UsageError(
            "mpiml.collectives: this process is the forked child of a member, and not a member. "
            "Use collectives in the parent only; start workers with the method 'spawn' or "
            "'forkserver'."
        )
    ]


os.register_at_fork(after_in_child=_forked)
