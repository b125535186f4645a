"""What a thread that waits in the engine is made of: its entry, its naps, its waking."""

import contextlib
import threading
import time
from typing import Any

from mpiml.scope import Scope

__all__ = ["Sleeper", "nap", "release"]

_LONG_US, _SHORT_US, _BUSY_US = 4000, 1000, 20  # naps: silent for a second, else, in a transfer
_CROWDED = 0.4  # as often longer, for each rank that a core has


class Sleeper:
    """A thread asleep in the engine, for the report of who waits for whom."""

    __slots__ = ("deadline", "scope", "since", "thread", "wait")

    def __init__(self, wait: Any, scope: Scope | None, deadline: float | None) -> None:
        self.wait = wait
        self.scope = scope
        self.deadline = deadline
        self.since = time.monotonic()
        self.thread = threading.get_ident()


def nap(
    now: float,
    silent: float,
    busy: bool,
    far: bool,
    deadline: float | None,
    crowd: float = 1.0,
) -> int:
    """Return for how many microseconds to sleep at most before the next look.

    Ranks of other hosts ring no bell. So while some are there, naps grow with the silence: what
    comes is found after at most a quarter more than it has taken to come.

    A look costs some 40 us of a core. Of `crowd` ranks for each core, all asleep, the looks take a
    tenth of the core at most: a bell rings for nearly all that comes.
    """
    limit = _LONG_US if silent > 1.0 else _SHORT_US
    slower = max(1.0, _CROWDED * crowd)
    limit = int(limit * slower)
    if busy:
        limit = int(_BUSY_US * slower)
    elif far:
        limit = min(limit, max(_BUSY_US, int(silent * 0.25e6)))
    return limit if deadline is None else min(limit, int((deadline - now) * 1e6) + 1)


def release(lock: Any) -> None:
    """Wake the thread that sleeps on a lock, which may be awake."""
    with contextlib.suppress(RuntimeError):  # two reasons to wake it; one was enough
        lock.release()
