"""Ranks that wait for others to start a program with them: they say so, and end after a limit.

Nobody who waits in MPI's collective knows who is missing, and it cannot be taken back. So a thread
that calls no MPI speaks, on one rank of each host: the first that binds a name of its launcher's.
"""

import os
import sys
import time
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpiml.undertaker import resign

__all__ = ["awaited"]

_PATIENCE = 10.0  # s, until something is said
_AHEAD = 1.0  # s, from the reason of the end to the end of this rank, and to that of others
_FOR_EVER = 1e9
_TIMED_OUT = 143


@contextmanager
def awaited(
    rank: int,
    size: int,
    limit: float | None = None,
    *,
    patience: float = _PATIENCE,
    leave: Callable[[int], None] = resign,
) -> Iterator[None]:
    """Watch over a block in which this rank waits for all others. Local: no MPI.

    Parameters
    ----------
    rank, size
        Of this rank, and of the communicator.
    limit
        Seconds after which this process ends with status 143, and the launcher with it its job.
    patience
        Seconds after which a line says for whom it waits.
    leave
        Ends the process.
    """
    if size == 1:
        yield
        return
    there = allocate_lock()
    there.acquire()
    begun = time.monotonic()

    def came(after: float) -> bool:
        return there.acquire(timeout=max(0.0, begun + after - time.monotonic()))

    def watch() -> None:
        if came(patience if limit is None else min(patience, limit)):
            return
        missing = (
            f"all {size} ranks of the communicator to call mpiml.launch or mpiml.attach "
            "(mpiml_attach in C and Fortran)"
        )
        with _one_of_host() as speaks:
            if limit is None or patience < limit:
                if speaks:
                    _say(f"rank {rank} has been waiting for {patience:g} s for {missing}")
                if came(_FOR_EVER if limit is None else limit):
                    return
            if speaks:
                _say(
                    f"--max-time: rank {rank} has waited in vain for {limit:g} s for {missing}"
                )
                time.sleep(_AHEAD)  # the name stays taken meanwhile
            if speaks or not came((limit or 0.0) + 2 * _AHEAD):
                leave(_TIMED_OUT)

    # not a threading.Timer, whose start and end cost several times as much at each launch
    start_new_thread(watch, ())
    try:
        yield
    finally:
        there.release()


def _say(text: str) -> None:
    sys.stderr.write(f"mpiml: {text}\n")
    sys.stderr.flush()


@contextmanager
def _one_of_host() -> Iterator[bool]:
    """Whether this process is the first of those that its launcher has started on this host."""
    import socket

    name = f"\0mpiml waits {os.getuid()} {os.getppid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
        try:
            mine.bind(name)
        except OSError:
            yield False
        else:
            yield True
