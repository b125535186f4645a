"""MPI_Init_thread without Python's lock, which mpi4py's own function keeps while it waits."""

import contextlib
import ctypes

import mpi4py

__all__ = ["initialize"]


def initialize() -> None:
    """Initialise MPI, as ``MPI.Init_thread()`` of mpi4py does, while other threads run.

    Collective over COMM_WORLD. It waits for all ranks, and one that never comes would hold this
    process for ever: the thread that ends a start which was told to stop (`early`) needs the
    lock.

    Raises
    ------
    mpi4py.MPI.Exception
        If MPI says that it failed; most libraries end the process instead.
    """
    from mpi4py import MPI

    init = None
    for where in (None, MPI.__file__):  # what was preloaded comes first, as for profiling
        with contextlib.suppress(OSError, AttributeError):
            init = init or ctypes.CDLL(where).MPI_Init_thread
    if init is None:  # MPI is linked in a way that hides it
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        return
    code = init(None, None, int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise MPI.Exception(code)
    handlers = {
        "exception": MPI.ERRORS_RETURN,
        "abort": MPI.ERRORS_ABORT,
        "fatal": MPI.ERRORS_ARE_FATAL,
    }
    if mpi4py.rc.errors in handlers:  # as mpi4py does after its own call
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(handlers[mpi4py.rc.errors])
