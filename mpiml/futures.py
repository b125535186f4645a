"""Futures: what a call in flight is, and how threads and coroutines wait for it.

`Wait` is the least a thread can wait for: a flag that somebody sets. `Future` is a
`concurrent.futures.Future`, so that the standard library's ``wait``, ``as_completed`` and
``asyncio.wrap_future`` take it, but it creates its lock only when one of them asks: a call
takes a few microseconds and a `threading.Condition` alone would cost two of them.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError, _base
from typing import Any

from mpiml.errors import DeadlineError, Stopped, UsageError
from mpiml.scope import Scope, current_scope

__all__ = ["Future", "Wait", "await_in", "gather", "wait"]

PENDING, CANCELLED, FINISHED = _base.PENDING, _base.CANCELLED_AND_NOTIFIED, _base.FINISHED
_lazy = threading.Lock()


class Wait:
    """Something a thread waits for in the engine: a flag, set once."""

    __slots__ = ("about", "ready")

    def __init__(self, about: str = "") -> None:
        self.ready = False
        self.about = about


class Future(_base.Future):  # type: ignore[type-arg]
    """The result of a call that may still be under way.

    Local: made by ``client.futures.method(x)``, never by hand. It works with
    `concurrent.futures.wait` and `as_completed`, and can be awaited. A timeout while waiting
    for it does not cancel the call.
    """

    # No super().__init__: see the module's first paragraph.
    def __init__(self, engine: Any, target: str, method: str, vertex: int = -1) -> None:
        self.ready = False
        self.id = 0
        self.target_vertex = vertex
        self.engine = engine
        self.target = target
        self.method = method
        self._state = PENDING
        self._decode: Callable[[], Any] | None = None
        self._result: Any = None
        self._exception: BaseException | None = None
        self._seen = False
        self._lock: threading.Condition | None = None
        self._done_callbacks: list[Callable[[Any], Any]] = []

    @property
    def about(self) -> str:
        """What is waited for, for the report of who waits for whom."""
        return f"{self.target}.{self.method}()"

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        with _lazy:
            if self._lock is None:
                self._waiters: list[Any] = []
                self._lock = threading.Condition()
        return self._lock

    def complete(self, decode: Callable[[], Any]) -> None:
        """Finish the call; `decode` returns its value or raises its error, when asked.

        Local: called by the engine, on any thread. Decoding happens where the value is
        wanted, so a large reply does not hold up the thread that drives progress.
        """
        self._decode = decode
        self._state = FINISHED
        self.engine.fulfil(self)
        self._notify()

    def fail(self, error: BaseException) -> None:
        """Finish the call with `error`."""

        def decode() -> Any:
            raise error

        self.complete(decode)

    def _notify(self) -> None:
        lock = self._lock
        if lock is not None:
            with lock:
                for waiter in self._waiters:
                    if self._state is FINISHED:
                        waiter.add_result(self)
                    else:
                        waiter.add_cancelled(self)
                lock.notify_all()
        while self._done_callbacks:
            try:
                callback = self._done_callbacks.pop(0)
            except IndexError:
                break
            self._call_back(callback)

    def _call_back(self, callback: Callable[[Any], Any]) -> None:
        try:
            callback(self)
        except Exception:
            self.engine.log_exception(f"a callback of the future of {self.about} raised")

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Call ``fn(self)`` when the call is done, on the thread that notices; now if it is."""
        if not self.ready:
            self._done_callbacks.append(fn)
            if not self.ready:
                return
            try:  # it ended meanwhile: whoever takes the callback off the list calls it
                self._done_callbacks.remove(fn)
            except ValueError:
                return
        self._call_back(fn)

    def cancel(self) -> bool:
        """Give the result up. The call itself goes on where it runs; its result is dropped."""
        if not self.engine.forget(self):  # one atomic pop decides between reply and cancel
            return self._state is CANCELLED
        self._state = CANCELLED
        self._seen = True
        self.engine.fulfil(self)
        self._notify()
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
            scope = current_scope(required=False)
            proxy = asyncio.get_running_loop().create_future()
            self.add_done_callback(lambda _: _wake(proxy))
            yield from await_in(scope, proxy)
        return self._value()

    def __del__(self) -> None:
        """Report an error that nobody looked at; sends nothing, so it is safe at any time."""
        if not self._seen and self._decode is not None and self._state is FINISHED:
            self.engine.unseen(self)

    def set_running_or_notify_cancel(self) -> bool:
        """Refuse: only mpiml runs calls."""
        raise UsageError("Future: expected mpiml to run the call; it cannot be run by hand")

    def set_result(self, result: Any) -> None:
        """Refuse: only mpiml finishes calls."""
        raise UsageError("Future.set_result: expected mpiml to finish the call")

    def set_exception(self, exception: BaseException | None) -> None:
        """Refuse: only mpiml finishes calls."""
        raise UsageError("Future.set_exception: expected mpiml to finish the call")


def _wake(proxy: Any) -> None:
    def settle() -> None:
        if not proxy.done():
            proxy.set_result(None)

    try:
        proxy.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        pass  # the loop has ended: nobody awaits any more


def await_in(scope: Scope | None, proxy: Any) -> Generator[Any, None, None]:
    """Await `proxy`, an asyncio future, for what `scope` runs: a stop ends it in a body."""
    awaiting = getattr(scope, "awaiting", None)
    held = scope is not None and scope.suspend()
    try:
        if awaiting is not None and scope is not None:
            awaiting.add(proxy)
            if scope.halt:
                raise Stopped("the program is stopping")
        yield from proxy.__await__()
    finally:
        if awaiting is not None:
            awaiting.discard(proxy)
        if held and scope is not None:
            yield from scope.regain()


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
        if return_errors:
            error = future.exception()
            results.append(future.result() if error is None else error)
        else:
            results.append(future.result())
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

    def count(_: Future) -> None:
        if not ticket.ready and sum(f.ready for f in futures) >= num_returns:
            engine.fulfil(ticket)

    for future in futures:
        future.add_done_callback(count)
    if not ticket.ready:
        engine.wait(ticket, deadline, scope)
    done = [f for f in futures if f.ready][: max(num_returns, 0)]
    chosen = set(map(id, done))
    return done, [f for f in futures if id(f) not in chosen]
