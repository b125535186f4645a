"""What reaches a rank from outside: signals, the death of its launcher, errors of threads.

A Python signal handler does not run while the main thread is inside an MPI call. The C part of
Python's handler does, and writes the number of the signal into a pipe, which a thread reads.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from mpiml import early
from mpiml.ancestors import Process, launcher_chain, look_up, orphaned
from mpiml.config import Config
from mpiml.errors import Stopped
from mpiml.forking import guard_fork

__all__ = ["LauncherWatch", "Signals", "install_excepthooks", "last_words"]

STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

_POLL = 0.5  # s, between looks at a process where the kernel has no pidfd
_JOIN = 2.0  # s, at most, for callbacks still running when the hooks are removed


# -- signals -----------------------------------------------------------------------------------

_active: "list[Signals]" = []


class Signals:
    """Hands signals on to the runtime while it runs, whatever the main thread does.

    Local: no MPI. A context manager; the handlers and the wake-up descriptor there were are
    put back at the end. Signals that the process ignores (``nohup``, or SIGINT in the
    background of a shell) stay ignored, except SIGQUIT; one that user code takes over with
    ``signal.signal`` is its own from then on.

    Parameters
    ----------
    on_stop
        Called with the number at SIGTERM, SIGUSR1, SIGUSR2 and the first SIGINT.
    on_interrupt_again
        Called at every further SIGINT, also while `on_stop` is still busy.
    on_quit
        Called at SIGQUIT.

    Attributes
    ----------
    installed : bool
        False outside of the main thread, where Python allows no handlers: nothing is done.
    """

    def __init__(
        self,
        on_stop: Callable[[int], None],
        on_interrupt_again: Callable[[], None],
        on_quit: Callable[[], None],
    ) -> None:
        self.installed = False
        self._on_stop = on_stop
        self._on_interrupt_again = on_interrupt_again
        self._on_quit = on_quit
        self._interrupted = False
        self._over = False
        self._late = b""  # signals that came while the hooks were being removed
        self._old: dict[int, Any] = {}
        self._old_fd = -1
        self._read = self._write = -1
        self._calls: list[threading.Thread] = []

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self
        guard_fork(_forked)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._listener = threading.Thread(
            target=self._listen, name="mpiml signals", daemon=True
        )
        self._listener.start()
        self.installed = True
        _active.append(self)
        for number in (*STOPS, signal.SIGQUIT):
            handler = signal.getsignal(number)
            ignored = handler == signal.SIG_IGN and number != signal.SIGQUIT
            if handler is not None and not ignored:  # None: C code has it, not to be put back
                signal.signal(number, self._handle)
                self._old[number] = handler
        for early_one in early.take(self._note):  # came while the program was starting
            self._note(early_one)
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.installed:
            return
        os.write(self._write, b"\0")
        self._listener.join()  # what came before has been handed on
        early.give_back()
        self._restore(self._old_fd)
        os.close(self._write)
        with open(self._read, "rb") as rest:
            late = self._late + rest.read()
        for number in late:  # for the handlers there were before
            if number in self._old and signal.getsignal(number) == self._old[number]:
                os.kill(os.getpid(), number)
        for thread in self._calls:
            thread.join(_JOIN)

    def _restore(self, wakeup: int) -> None:
        self.installed = False
        if self in _active:
            _active.remove(self)
        for number, handler in self._old.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._over = True
        current = signal.set_wakeup_fd(wakeup)
        if current not in (self._write, -1):  # somebody else's by now
            signal.set_wakeup_fd(current)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Run in the main thread, late. The pipe has the number, unless it was displaced."""
        if self._over:  # a handler of the user's has kept this one, and calls it ever after
            self._stand_back(number, frame)
            return
        current = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if current == self._write:
            return
        if current != -1:  # an event loop of asyncio has put its own there, and needs it
            signal.set_wakeup_fd(current)
        self._note(number)

    def _stand_back(self, number: int, frame: FrameType | None) -> None:
        """Do what the handler before would: the pipe's number may be another file's by now."""
        handler = self._old.get(number)
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _note(self, number: int) -> None:
        if self._over:
            return
        with contextlib.suppress(OSError):
            os.write(self._write, bytes((number,)))

    def _listen(self) -> None:
        end = b""
        while not end:
            numbers, end, self._late = os.read(self._read, 512).partition(b"\0")
            for number in numbers:
                self._dispatch(number)

    def _dispatch(self, number: int) -> None:
        if number not in self._old:  # a handler of the user's, whose loop may want to know
            with contextlib.suppress(OSError):
                os.write(self._old_fd, bytes((number,)))
        elif signal.getsignal(number) != self._handle:
            pass  # the user has taken it over
        elif number == signal.SIGINT and self._interrupted:
            _run(self._on_interrupt_again)
        elif number == signal.SIGQUIT:
            self._call(self._on_quit)
        else:
            # on a thread of its own: should it wait, a second SIGINT has to get through
            self._interrupted = self._interrupted or number == signal.SIGINT
            self._call(self._on_stop, number)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(
            target=_run, args=(function, *args), name="mpiml signal", daemon=True
        )
        self._calls.append(thread)
        thread.start()

    def _forget(self) -> None:
        """Leave the handlers to a forked child as they were.

        Its signals must not reach the parent through the shared pipe, and a child told to
        end by SIGTERM, as the workers of a `multiprocessing.Pool` are, has to end.
        """
        self._restore(-1)
        os.close(self._read)
        os.close(self._write)


def _forked() -> None:
    for signals in reversed(_active):
        signals._forget()


def _run(function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        import traceback

        traceback.print_exc()


# -- the launcher ------------------------------------------------------------------------------


class LauncherWatch:
    """Ends a rank whose launcher has died; Open MPI's ranks would go on for ever.

    Local: no MPI. A context manager. One thread sleeps in the kernel until a process from
    the parent up to the launcher ends, or the one that mpiml's own starter has named.

    Parameters
    ----------
    on_death
        Called once, with a line that says who died, on the thread of the watch.
    config
        The environment; has `Config.launcher_pid`.

    Attributes
    ----------
    watched : list of Process
        Empty where no launcher is known: then nothing is watched.
    """

    def __init__(self, on_death: Callable[[str], None], config: Config) -> None:
        self.watched: list[Process] = []
        self._on_death = on_death
        self._config = config
        self._dead: str | None = None
        self._polled: list[Process] = []
        self._fds: dict[int, Process] = {}
        self._read = self._write = -1
        self._thread: threading.Thread | None = None
        self._pid = 0

    def __enter__(self) -> "LauncherWatch":
        self._pid = os.getpid()
        parent = os.getppid()
        self.watched = launcher_chain(parent)
        if not self.watched and self._config.launcher is not None and orphaned(parent):
            # launchers do not let go of their ranks: this one was gone before we looked
            self._dead = "the launcher"
        self._add_starter()
        for process in self.watched:
            self._open(process)
        if self.watched and os.getppid() != parent:
            self._dead = self._dead or f"process {parent}"
        if self.watched or self._dead:
            self._read, self._write = os.pipe()
            self._thread = threading.Thread(
                target=self._watch, name="mpiml launcher watch", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is None or self._pid != os.getpid():
            return  # a forked child must not end the watch of its parent
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN)
        os.close(self._write)
        self._thread = None

    def _add_starter(self) -> None:
        pid = self._config.launcher_pid
        if pid is None or self._config.launcher_host != os.uname().nodename:
            return
        if any(process.pid == pid for process in self.watched):
            return
        process = look_up(pid)
        if process is None:
            self._dead = f"mpiml run (process {pid})"
        else:
            self.watched.append(process)

    def _open(self, process: Process) -> None:
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._dead = _describe(process)
            return
        except (AttributeError, OSError):  # an old kernel, or a sandbox that forbids it
            self._polled.append(process)
            return
        self._fds[fd] = process
        if _gone(process):  # and the number may have gone to another process
            self._dead = _describe(process)

    def _watch(self) -> None:
        try:
            dead = self._dead or self._wait()
        finally:
            for fd in (*self._fds, self._read):
                os.close(fd)
        if dead:
            self._on_death(
                f"mpiml: {dead}, which started this process, has died: this process ends"
            )

    def _wait(self) -> str | None:
        poller = select.poll()
        for fd in (*self._fds, self._read):
            poller.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll(_POLL * 1000 if self._polled else None)]
            if self._read in ready:
                return None
            gone = [self._fds[fd] for fd in ready]
            gone += [process for process in self._polled if _gone(process)]
            if gone:
                return _describe(gone[0])


def _gone(process: Process) -> bool:
    now = look_up(process.pid)
    return now is None or now.start != process.start


def _describe(process: Process) -> str:
    return f"{process.name} (process {process.pid})"


def last_words(text: str) -> None:
    """Write a line to standard error, unless that would wait: who reads there may be gone.

    Local: no MPI.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        fd = sys.__stderr__.fileno()  # type: ignore[union-attr]
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poller.poll(0)):
            os.write(fd, f"{text}\n".encode())


# -- threads and forks -------------------------------------------------------------------------


@contextlib.contextmanager
def install_excepthooks(
    fail: Callable[[BaseException, threading.Thread | None], None],
) -> Iterator[None]:
    """Let an error that ends any thread reach `fail`, while the block lasts.

    Local: no MPI. `Stopped` and ``sys.exit()`` with 0 are returns. The hook there was runs if
    `fail` itself raises, and is put back at the end unless somebody has set another.
    """
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value if args.exc_value is not None else args.exc_type()
        if isinstance(error, Stopped):
            return
        if isinstance(error, SystemExit) and not error.code:
            return
        try:
            fail(error, args.thread)
        except Exception:
            import traceback

            traceback.print_exc()
            previous(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        if threading.excepthook is hook:
            threading.excepthook = previous
