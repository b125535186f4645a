"""MPI_Finalize in the midst of a program: noticed before it does anything, and told as an error.

The standard has attributes of ``MPI_COMM_SELF`` deleted first of all, while MPI still works
(MPI 4.1, 11.2.4). One of ours tells the other ranks then, and takes back what MPI would wait for.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpiml.errors import UsageError

__all__ = ["guarded"]

_programs: list[Callable[[], None]] = []  # what ends each of those that run


@contextmanager
def guarded(runtime: Any, tell: Callable[[Any, BaseException], None]) -> Iterator[None]:
    """While the block runs, let MPI_Finalize end the program on all ranks, with an error.

    Local. What uses the program here afterwards raises the same error.

    Parameters
    ----------
    runtime
        The program on this rank.
    tell
        Called with `runtime` and the error, when nothing else calls MPI for the program any more:
        lets the other ranks know.
    """
    _watch()

    def end() -> None:
        engine, nodes = runtime.engine, runtime.nodes
        who = nodes[0].title if nodes else "this rank"
        error = UsageError(
            f"{who} (rank {engine.rank}): MPI was finalised while the program {runtime.name!r} "
            "runs. Call MPI.Finalize() after launch() has returned, or after the block of attach()."
        )
        engine.ended_by = error
        engine.close(lambda: tell(runtime, error))

    _programs.append(end)
    try:
        yield
    finally:
        _programs.remove(end)


@functools.cache
def _watch() -> None:
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _finalised())
    MPI.COMM_SELF.Set_attr(key, None)


def _finalised() -> None:
    for end in reversed(_programs.copy()):
        end()
