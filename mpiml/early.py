"""Signals that come while a program starts: noted, and handed on when its own handlers stand.

From ``python -m mpiml.run`` to the first moment at which a program can end in order there are
seconds: imports, MPI_Init, loading the file. Slurm's warning, or a preemption, may come in them,
and by default the signal would kill the rank without a word. So it is noted, by handlers and a
pipe that stand from the first line on (`listen`), until somebody who can act on it takes over
(`take`), and again when he has gone (`give_back`): a launcher may hand a signal on to a rank that
is ending already. Where nobody takes over in time, the process says so and ends with 143.

Not SIGINT: who presses Ctrl-C while a file is being loaded wants it to end now.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from mpiml.forking import guard_fork

__all__ = ["give_back", "listen", "take"]

STATUS = 143
PATIENCE = 30.0  # s, from the first signal on

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ear: "_Ear | None" = None


class _Ear:
    """The handlers, the pipe, and the thread that reads it."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.taken = threading.Event()
        self.read_up = threading.Event()
        self.send: Callable[[int], None] | None = None
        self._old: dict[int, Any] = {}
        self._read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        signal.set_wakeup_fd(self.write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="mpiml early", daemon=True).start()
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # C code has it, or it is to be ignored
                self._old[number] = handler
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Run in the main thread, late: the pipe has it, unless it was displaced."""
        with contextlib.suppress(OSError):
            os.write(self.write, bytes((number,)))

    def _listen(self) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number == 0:
                    self.read_up.set()
                elif self.taken.is_set():
                    if self.send is not None:
                        self.send(number)
                elif number in self._old and number not in self.numbers:
                    self.numbers.append(number)
                    name = signal.Signals(number).name
                    threading.Thread(target=self._wait, args=(name,), daemon=True).start()

    def _wait(self, name: str) -> None:
        if self.taken.wait(PATIENCE):
            return
        sys.stderr.write(
            f"mpiml: {name} came, and {PATIENCE:g} s later the program had neither started nor "
            "ended: this process ends\n"
        )
        sys.stderr.flush()
        os._exit(STATUS)

    def forget(self) -> None:
        """Leave a forked child without any of it: its signals are not its parent's."""
        current = signal.set_wakeup_fd(-1)
        if current not in (self.write, -1):  # somebody else's, who will forget it too
            signal.set_wakeup_fd(current)
        for number, handler in self._old.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)


def listen() -> None:
    """Note SIGTERM, SIGUSR1 and SIGUSR2 from now on.

    Local: no MPI. Nothing where it is done already, or outside of the main thread. Signals
    that the process ignores stay ignored.
    """
    global _ear
    if _ear is not None or threading.current_thread() is not threading.main_thread():
        return
    _ear = _Ear()
    guard_fork(_forked)


def take(send: Callable[[int], None] | None = None) -> list[int]:
    """Return the signals that have come, each once; from now on they are the caller's.

    Local: no MPI. The caller's own handlers stand already, so none falls between.

    Parameters
    ----------
    send
        Gets every further signal that arrives here; None drops them, for a caller whose
        handlers are called as well.
    """
    ear = _ear
    if ear is None:
        return []
    ear.read_up.clear()
    os.write(ear.write, b"\0")
    ear.read_up.wait(1.0)  # what a thread would say at once; a start must not hang on it
    ear.send = send
    ear.taken.set()
    numbers, ear.numbers = ear.numbers, []
    return numbers


def give_back() -> None:
    """Note signals again. Local: no MPI; the caller is about to put the handlers back."""
    if _ear is not None:
        _ear.taken.clear()


def _forked() -> None:
    global _ear
    ear, _ear = _ear, None
    if ear is not None:
        ear.forget()
