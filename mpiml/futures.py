"""Futures: what a call in flight is, and how threads and coroutines wait for it.

`Future` is a `concurrent.futures.Future`, so that the standard library's ``wait``,
``as_completed`` and ``asyncio.wrap_future`` take it, but it creates its lock only when one of
them asks: a call takes a few microseconds and a `threading.Condition` alone would cost two of
them. The standard library's module loads `logging`, so this one is loaded with the first future.
"""

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError, _base
from functools import partial
from typing import Any

from mpiml import threads
from mpiml.alarms import Alarm
from mpiml.callbacks import await_in, callbacks, wake
from mpiml.contents import value_in
from mpiml.errors import DeadlineError, UsageError
from mpiml.scope import Scope, current_scope
from mpiml.waits import Wait

__all__ = ["Future", "gather", "wait"]

PENDING, CANCELLED, FINISHED = _base.PENDING, _base.CANCELLED_AND_NOTIFIED, _base.FINISHED
_lazy = threading.Lock()


class Future(_base.Future):  # type: ignore[type-arg]
    """The result of a call that may still be under way.

    Local: made by ``client.futures.method(x)``, never by hand. It works with
    `concurrent.futures.wait` and `as_completed`, and can be awaited. A timeout while waiting
    for it does not cancel the call.
    """

    #: When a client made by ``with_options(timeout=)`` gives the result up, on the monotonic clock.
    deadline: float | None = None
    _timer: Alarm | None = None
    _failed = False  # whether `_decode` raises

    # What most futures never change stands on the class: creating one costs little then.
    ready = False
    id = 0
    _state = PENDING
    _decode: Callable[[], Any] | None = None
    _result: Any = None
    _exception: BaseException | None = None
    _seen = False
    _lock: threading.Condition | None = None
    _callbacks: list[Callable[[Any], Any]] | None = None

    # No super().__init__: see the module's first paragraph.
    def __init__(self, engine: Any, target: str, method: str, vertex: int = -1) -> None:
        self.target_vertex = vertex
        self.engine = engine
        self.target = target
        self.method = method

    @property
    def about(self) -> str:
        """What is waited for, for the report of who waits for whom."""
        return f"{self.target}.{self.method}()"

    def __repr__(self) -> str:
        if not self.ready:
            return f"<Future of {self.about}, under way>"
        return f"<Future of {self.about}, {self._state.lower().partition('_')[0]}>"

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        # the standard library asks for it: it is about to wait
        if not self.ready:
            what = f"concurrent.futures on the future of {self.about}"
            home = getattr(self.engine, "home", 0)
            threads.refuse_sleep(home, what, "Use mpiml.wait or mpiml.gather.")
        self._arm()
        with _lazy:
            if self._lock is None:
                self._waiters: list[Any] = []
                self._lock = threading.Condition()
        return self._lock

    def complete(self, decode: Callable[[], Any], failed: bool = False) -> None:
        """Finish the call; `decode` returns its value or raises its error, when asked.

        Local: called by the engine, on any thread. Decoding happens where the value is
        wanted, so a large reply does not hold up the thread that drives progress.

        Parameters
        ----------
        decode
            Makes the value.
        failed
            Whether `decode` raises.
        """
        self._decode = decode
        if failed:
            self._failed = True
        self._settle(FINISHED)

    def arrive(self, frame: Any, buffers: Sequence[Any]) -> None:
        """Finish the call with a reply, which is decoded when it is asked for."""
        self.complete(partial(value_in, frame, buffers))

    def fail(self, error: BaseException) -> None:
        """Finish the call with `error`."""

        def decode() -> Any:
            raise error

        self.complete(decode, True)

    def _settle(self, state: str) -> None:
        # Whoever makes the lock sees the state before or after, never in between: a waiter of
        # the standard library counts the futures that are done, and is then told of the others.
        with _lazy:
            lock = self._lock
            if lock is None:
                self._state = state
        if lock is not None:
            with lock:
                self._state = state
                self.ready = True
                for waiter in self._waiters:
                    (waiter.add_result if state is FINISHED else waiter.add_cancelled)(self)
                lock.notify_all()
        self.engine.fulfil(self)
        if self._timer is not None:
            self._timer.cancel()
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                break
            callback(self)

    def when_done(self, fn: Callable[[Any], Any]) -> None:
        """Call ``fn(self)``, which must not wait, on the thread that notices the end."""
        if not self.ready:
            with _lazy:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(fn)
            if not (self.done() and self._withdraw(fn)):
                return  # whoever takes the callback off the list calls it
        fn(self)

    def _withdraw(self, fn: Callable[[Any], Any]) -> bool:
        try:
            (self._callbacks or []).remove(fn)
        except ValueError:
            return False
        return True

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Call ``fn(self)`` when the call is done: now if it is, else on a thread for callbacks.

        `fn` may wait and make calls of its own, for the node that added it. Once the call is
        done, the program does not end before `fn` has run.
        """
        self._arm()
        context = contextvars.copy_context()
        if self.ready:
            self._call_back(fn)
        else:
            self.when_done(
                lambda _: callbacks.put(lambda: context.run(self._call_back, fn), self.engine)
            )

    def _call_back(self, callback: Callable[[Any], Any]) -> None:
        try:
            callback(self)
        except Exception:
            self.engine.log_exception(f"a callback of the future of {self.about} raised")

    def _arm(self) -> None:
        """See to it that the deadline of the client is kept although nobody waits in mpiml."""
        if self.deadline is not None and self._timer is None and not self.ready:
            left = max(0.0, self.deadline - time.monotonic())
            self._timer = Alarm(left, self._expire, "mpiml-deadline")

    def _expire(self) -> None:
        """End with `DeadlineError`, unless a reply has just come. The call goes on."""
        if self.engine.forget(self):
            self.fail(
                DeadlineError(
                    f"{self.about}: expected a reply within the timeout of the client, got none. "
                    "The call goes on; give it more time with with_options(timeout=)."
                )
            )

    def cancel(self) -> bool:
        """Give the result up. The call itself goes on where it runs; its result is dropped."""
        if not self.engine.forget(self):  # one atomic pop decides between reply and cancel
            return self._state is CANCELLED
        self._seen = True
        self._settle(CANCELLED)
        return True

    def cancelled(self) -> bool:
        """Return whether `cancel` came before the result."""
        return self._state is CANCELLED

    def done(self) -> bool:
        """Return whether the call has ended or was cancelled."""
        return self.ready

    def running(self) -> bool:
        """Return whether the call is still under way."""
        return not self.ready

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it, or raise the error of the call.

        Parameters
        ----------
        timeout
            Seconds to wait; None waits as long as the program runs.

        Raises
        ------
        DeadlineError
            If it takes longer. The call goes on, and `result` may be asked again.
        concurrent.futures.CancelledError
            If the future was cancelled.
        """
        if not self.ready:
            self._await_ready(timeout)
        return self._value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the call and return its error, or None."""
        if not self.ready:
            self._await_ready(timeout)
        try:
            self._value()
        except CancelledError:
            raise
        except BaseException as error:
            return error
        return None

    def _await_ready(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        scope = current_scope(required=False)
        last = self.deadline
        if last is not None and (deadline is None or last <= deadline):
            if not self.engine.wait(self, last, scope):
                self._expire()
                self.engine.wait(self, None, None)  # it is ready, or becomes so right now
            return
        if not self.engine.wait(self, deadline, scope):
            raise DeadlineError(
                f"{self.about}: expected a reply within {timeout:g} s, got none. The call goes "
                "on; ask again, or give it more time with with_options(timeout=)."
            )

    def _value(self) -> Any:
        self._seen = True
        if self._state is CANCELLED:
            raise CancelledError
        decode = self._decode
        if decode is not None:
            try:
                self._result = decode()
            except BaseException as error:
                self._exception = error
            self._decode = None
        if self._exception is not None:
            raise self._exception
        return self._result

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait inside a coroutine; other tasks of the event loop go on."""
        import asyncio

        if not self.ready:
            threads.refuse_await(self.engine, f"the future of {self.about}")
            self._arm()
            scope = current_scope(required=False)
            proxy = asyncio.get_running_loop().create_future()
            self.when_done(lambda _: wake(proxy))
            yield from await_in(scope, proxy)
        return self._value()

    def __del__(self) -> None:
        """Report an error that nobody looked at; sends nothing, so it is safe at any time."""
        if self._failed and not self._seen:
            engine = self.engine
            if getattr(engine, "failed", False):  # one failure, one traceback: count it only
                self._decode = None
            engine.unseen(self)

    def set_running_or_notify_cancel(self) -> bool:
        """Refuse: only mpiml runs calls."""
        raise UsageError("Future: expected mpiml to run the call; it cannot be run by hand")

    def set_result(self, result: Any) -> None:
        """Refuse: only mpiml finishes calls."""
        raise UsageError("Future.set_result: expected mpiml to finish the call")

    def set_exception(self, exception: BaseException | None) -> None:
        """Refuse: only mpiml finishes calls."""
        raise UsageError("Future.set_exception: expected mpiml to finish the call")


def gather(futures: Iterable[Future], return_errors: bool = False) -> list[Any]:
    """Wait for all futures and return their results in the order given.

    Parameters
    ----------
    futures
        Futures, in any number.
    return_errors
        Put an exception in its place instead of raising the first one.
    """
    results: list[Any] = []
    for future in list(futures):
        if not return_errors:
            results.append(future.result())
            continue
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        results.append(future.result() if error is None else error)
    return results


def wait(
    futures: Sequence[Future], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Future], list[Future]]:
    """Wait until `num_returns` of the futures are done; return (done, not done) in order.

    Parameters
    ----------
    futures
        Futures of one program.
    num_returns
        How many to wait for, 1 to ``len(futures)``.
    timeout
        Seconds; afterwards what is done so far is returned, without an error.

    Raises
    ------
    UsageError
        If `num_returns` is out of range.
    """
    futures = list(futures)
    if not 1 <= num_returns <= len(futures):
        raise UsageError(
            f"mpiml.wait: expected num_returns in 1..{len(futures)}, got {num_returns}"
        )
    deadline = None if timeout is None else time.monotonic() + timeout
    scope: Scope | None = current_scope(required=False)
    ticket = Wait(f"{num_returns} of {len(futures)} futures, first {futures[0].about}")
    engine = futures[0].engine

    counter = itertools.count(1)

    def count(_: Future) -> None:
        if next(counter) >= num_returns:
            engine.fulfil(ticket)

    for future in futures:
        future._arm()
        future.when_done(count)
    try:
        engine.wait(ticket, deadline, scope)
    finally:
        for future in futures:
            if not future.ready:
                future._withdraw(count)
    done = [f for f in futures if f.ready][:num_returns]
    chosen = set(map(id, done))
    return done, [f for f in futures if id(f) not in chosen]
