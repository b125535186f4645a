"""The worker of a member where one thread makes all calls of MPI: it is done by that thread."""

from collections.abc import Callable
from typing import Any

from mpiml import threads
from mpiml.collectives.over import OVER
from mpiml.collectives.requests import Request, Worker

__all__ = ["FunneledWorker"]


class FunneledWorker(Worker):
    """Does operations on the one thread that may call MPI, those of requests at once.

    So a request is done when it is returned: nothing goes on while its caller computes.

    Parameters
    ----------
    title : str
        How messages call the team.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self._what = f"a collective of {title}"

    def run(self, work: Callable[..., Any], label: Any, *arguments: Any) -> None:
        """Do an operation now.

        Raises
        ------
        UsageError
            On another thread.
        """
        threads.check(self._what)
        super().run(work, label, *arguments)

    def submit(self, work: Callable[[], Any], label: Any) -> Request:
        """Do an operation now; return its request, which is done."""
        threads.check(self._what)
        if OVER:
            raise OVER[0]
        request = Request(work, label)
        request.made = self.made
        with self._lock:
            self.operations += 1
            request.do()
        return request

    def settle(self) -> None:
        """Wait for nothing: everything that was begun is done."""
        threads.check(self._what)
