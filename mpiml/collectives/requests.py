"""Operations that go on while their caller computes: requests, and the thread that does them.

One thread for each member of a team, started with the first request, does the operations in
the order in which they were begun, since the other members do theirs in that order. Its waits
and reductions hold no interpreter lock.
"""

import atexit
import functools
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from mpiml.collectives.over import OVER, end
from mpiml.errors import DeadlineError

__all__ = ["Request", "Worker", "end_with_mpi", "wait_for_all"]


class Request:
    """One operation that was begun.

    Local: `wait` and `test` send nothing.
    """

    __slots__ = ("_done", "_error", "_label", "_work", "made", "result")

    def __init__(self, work: Callable[[], Any], label: Any) -> None:
        self._work: Callable[[], Any] | None = work
        self._label = label
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.made = 0  #: how many things its member had begun to make before
        self.result: Any = None  #: what the operation returned, once it is done

    def test(self) -> bool:
        """Return whether it is done.

        Raises
        ------
        Exception
            What the operation has ended with.
        """
        if not self._done.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until it is done; return what the operation returns.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits for as long as the operation takes.

        Raises
        ------
        DeadlineError
            It is not done in time. It goes on.
        Exception
            What the operation has ended with.
        """
        if not self._done.wait(timeout):
            raise DeadlineError(f"{self._label}: not done within {timeout} s; it goes on")
        self.test()
        return self.result

    def do(self) -> None:
        """Do it, on the thread that calls."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self.result = work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def __repr__(self) -> str:
        return f"<request of {self._label}, {'done' if self._done.is_set() else 'under way'}>"


def wait_for_all(requests: Iterable[Request]) -> None:
    """Wait for all of them, and then raise the first error there was. Local."""
    first: Exception | None = None
    for request in requests:
        try:
            request.wait()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


_LAST = 5.0  # s, that a process which ends waits for requests under way

_workers: "WeakSet[Worker]" = WeakSet()  # those with a thread


@functools.cache
def _at_exit() -> None:
    """Have `_finish` called, once MPI has been started: what is registered last comes first."""
    atexit.register(_finish)


@functools.cache
def end_with_mpi() -> None:
    """Have collectives end when MPI does, if the user's code ends it. Local, once MPI is there.

    The standard has attributes of ``MPI_COMM_SELF`` deleted before anything else in
    ``MPI_Finalize`` (MPI 4.1, 11.2.4). MPICH takes locks no more by then, so a thread that calls
    MPI at that moment, as for a model that is open, may do harm: the docs say to close before.
    """
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _finish())
    MPI.COMM_SELF.Set_attr(key, None)


def _finish() -> None:
    """End the threads before the interpreter does, which would end the process by a signal."""
    threads = [worker.close() for worker in list(_workers)]
    for thread in threads:
        if thread is not None:
            thread.join(_LAST)
    end()
    for thread in threads:
        if thread is not None:
            thread.join(_LAST)


class Worker:
    """Does the operations of one member, one after another.

    Attributes
    ----------
    operations : int
        How many have been begun to be done.
    made : int
        How many things the member has begun to make, on its own thread.
    """

    def __init__(self) -> None:
        _at_exit()
        self.operations = 0
        self.made = 0
        self._doing: Request | None = None
        self._lock = threading.Lock()  # held while an operation is being done
        self._queue: SimpleQueue[Request | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Request | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        last = self._last
        return self._lock.locked() or (last is not None and not last._done.is_set())

    def run(self, work: Callable[..., Any], label: Any, *arguments: Any) -> None:
        """Do an operation now, or after those that were begun before."""
        if OVER:
            raise OVER[0]
        last = self._last
        if last is not None:
            if not last._done.is_set():
                self.submit(lambda: work(*arguments), label).wait()
                return
            self._last = None
        with self._lock:  # not acquire(): a signal's error could come before `try`
            self.operations += 1
            work(*arguments)

    def submit(self, work: Callable[[], Any], label: Any) -> Request:
        """Begin an operation; return its request."""
        if OVER:
            raise OVER[0]
        request = Request(work, label)
        request.made = self.made
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="mpiml collectives", daemon=True
            )
            self._thread.start()
            _workers.add(self)
        self._last = request
        self._queue.put(request)
        return request

    def _serve(self) -> None:
        while (request := self._queue.get()) is not None:
            with self._lock:
                self.operations += 1
                self._doing = request
                request.do()
                self._doing = None
            del request

    def place(self, making: bool) -> tuple[int, int]:
        """Return which operation the calling thread is in, and its number among all calls.

        Members that make the same calls in the same order get the same. The first is 0 where
        the thread is in no operation: it makes something, or (`making` is False) is about to
        begin an operation.
        """
        doing = self._doing
        if doing is not None and threading.current_thread() is self._thread:
            return self.operations, self.operations + doing.made
        if doing is None and self._lock.locked():
            return self.operations, self.operations + self.made
        return 0, self.operations + self._queue.qsize() + self.made + (not making)

    def settle(self) -> None:
        """Wait until what was begun is done, unless it is the thread that does it which asks."""
        last = self._last
        if last is not None and threading.current_thread() is not self._thread:
            last._done.wait()

    def close(self) -> threading.Thread | None:
        """Let the thread end, after what was begun; return it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
        return thread
