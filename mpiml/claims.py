"""The communicator of a program: the launcher's or the caller's, and one program at a time on it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpiml.config import Config
from mpiml.errors import UsageError
from mpiml.refusal import lonely
from mpiml.started import alone, doubt, refuse_start, refuse_world

__all__ = ["claimed", "default_comm"]

_busy: list[Any] = []  # communicators with a program running on them
_claiming = threading.Lock()


def default_comm() -> Any:
    """Return COMM_WORLD under an MPI launcher or in a running MPI program, else None.

    Collective over COMM_WORLD if it initialises MPI.

    Raises
    ------
    UsageError
        Inside a node of a program that runs on MPI: a launch there says on which ranks. Or the
        launcher is not one for this MPI.
    """
    comm = None
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1:
            comm = MPI.COMM_WORLD
    where = Config.read_foreign()
    if comm is None and where.launcher is None:
        return None
    if _busy:
        raise UsageError(
            "mpiml.launch: a program runs in this process already, so expected a communicator, "
            "got none. Pass comm=mpiml.context().comm for the ranks of this role, or "
            "comm=MPI.COMM_SELF for this rank alone."
        )
    if comm is None:
        from mpiml import world

        if alone(where, world.described()):
            return None
        with lonely(where):
            refuse_start(where, world.described())
        if text := doubt(where, world.described()):
            sys.stderr.write(f"mpiml: {text}\n")
            sys.stderr.flush()
        comm = world.start()
        with lonely(where):
            refuse_world(where, world.described(), comm.size)
    return comm


@contextmanager
def claimed(comm: Any) -> Iterator[None]:
    """Refuse a second program on a communicator at the same time."""
    if comm is None:
        yield
        return
    MPI = sys.modules.get("mpi4py.MPI")  # without it nobody has a communicator
    if MPI is None or not isinstance(comm, MPI.Comm):
        raise UsageError(
            f"mpiml.launch: expected comm= an mpi4py communicator, got {type(comm).__name__}"
        )
    if MPI.Is_finalized():
        raise UsageError(
            "mpiml.launch: MPI has been finalised in this process, got a communicator of it. "
            "Launch before MPI.Finalize()."
        )
    from mpiml.world import called_here

    with called_here(), _alone_on(comm, MPI):
        yield


@contextmanager
def _alone_on(comm: Any, MPI: Any) -> Iterator[None]:
    if comm == MPI.COMM_NULL:
        raise UsageError(
            "mpiml.launch: expected a communicator that this rank is in, got COMM_NULL. Only "
            "the ranks of a communicator call launch."
        )
    if comm.Is_inter():
        raise UsageError(
            "mpiml.launch: expected an intracommunicator, got an intercommunicator. Merge() it."
        )
    if comm.size == 1 and comm == MPI.COMM_WORLD:
        refuse_world(Config.read_foreign(), MPI.Get_library_version(), 1)
    with _claiming:
        if any(comm == other for other in _busy):
            raise UsageError(
                "mpiml.launch: a program runs on this communicator already. Use comm.Dup(), or "
                "context().comm inside a node."
            )
        _busy.append(comm)
    try:
        yield
    finally:
        with _claiming:
            _busy.remove(comm)
