"""Waits of servers, until something has changed for a worker; and of workers, for each other."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final

from mpiml.alarms import Alarm
from mpiml.errors import ServiceGoneError
from mpiml.scope import current_scope
from mpiml.waits import Wait

__all__ = ["OneAtATime", "Waiters"]

_PATIENCE: Final = 2.0  # s after the program's end has begun; its bodies may go on for a while


class Waiters:
    """The methods that wait. Local; used while a method holds its turn.

    Parameters
    ----------
    engine
        The rank's engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._waits: list[tuple[Hashable, Wait]] = []
        self._over = False
        self._alarm: Alarm | None = None

    def __len__(self) -> int:
        return len(self._waits)

    def until(
        self, ready: Callable[[], bool], about: Callable[[], str], name: Hashable
    ) -> None:
        """Wait until `ready` is true, which is looked at after each `wake` of this name.

        Other methods run meanwhile.

        Raises
        ------
        ServiceGoneError
            The program has ended, and it is not.
        """
        while not ready():
            wait = Wait(about())
            self._waits.append((name, wait))
            try:
                # after it is in the list: `_end`, on another thread, sets it and then looks there
                deadline = time.monotonic() + _PATIENCE if self._over else None
                if not self._engine.wait(wait, deadline, current_scope(required=False)):
                    raise ServiceGoneError(
                        f"{wait.about}: expected it to end, got a program that has"
                    )
            finally:
                self._waits.remove((name, wait))

    def wake(self, *names: Hashable) -> None:
        """Let the methods of these names look again."""
        for name, wait in self._waits:
            if name in names:
                self._engine.fulfil(wait)

    def end(self) -> None:
        """Let no wait be long from a while on: the end of the program has begun.

        Callbacks may pull still.
        """
        self._alarm = Alarm(_PATIENCE, self._end, "mpiml-servers")

    def close(self) -> None:
        """Let go of the program: nobody waits any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _end(self) -> None:
        self._over = True
        for _, wait in list(self._waits):
            self._engine.fulfil(wait)


class OneAtATime:
    """A lock, in the order of those who come, that waits as all of mpiml waits.

    A service that holds a plain lock while it waits for a reply would never get its turn back
    from a call that waits for this lock.

    Parameters
    ----------
    engine
        The rank's engine.
    about : str
        What is waited for, for the report of who waits for whom.
    """

    def __init__(self, engine: Any, about: str) -> None:
        self._engine, self._about = engine, about
        self._lock = threading.Lock()
        self._held = False
        self._queue: deque[Wait] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._held:
                self._held = True
                return
            wait = Wait(self._about)
            self._queue.append(wait)
        try:
            self._engine.wait(wait, None, current_scope(required=False))
        except BaseException:
            with self._lock:
                queued = wait in self._queue
                if queued:
                    self._queue.remove(wait)
            if not queued:  # it has been handed over just now
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if not self._queue:
                self._held = False
                return
            wait = self._queue.popleft()
        self._engine.fulfil(wait)
