"""`mpiml.poll`: progress from the loop of a code that does not wait in mpiml."""

from mpiml import funnel, threads
from mpiml.errors import UsageError
from mpiml.scope import Scope, current_scope, owners, scope_here

__all__ = ["poll"]


def poll() -> bool:
    """Let mpiml do what is due on this rank, now; return whether there was anything to do.

    Local: never waits, and runs no code of yours. One call takes in what other ranks have sent,
    hands it to the threads that serve or wait here, and sends what these have put up. Where MPI
    has less than ``MPI_THREAD_MULTIPLE``, this and waits of the main thread in mpiml are the only
    moments at which that happens: call it in each step of a loop that computes for long. With
    ``MPI_THREAD_MULTIPLE`` a thread of mpiml does the same within about a millisecond, and `poll`
    makes it happen at once. On threads without MPI it returns False.

    It does not raise `Stopped`: ask ``context().stopping`` or ``agree_stop()``.

    Returns
    -------
    bool
        False: there was nothing to do, or another thread is at it.

    Raises
    ------
    UsageError
        Outside of a node of a running program; on another thread than the main one, where only
        that may call MPI.
    """
    engine = (scope_here() or _scope()).owner.runtime.engine
    if engine.home:
        threads.check("mpiml.poll()")
        if len(funnel.DRIVERS) > 1:
            return funnel.drive()
    return engine.poll()  # type: ignore[no-any-return]


def _scope() -> Scope:
    if not owners:
        raise UsageError(
            "mpiml.poll(): expected to be called inside a running program, got code outside of "
            "any. Call it in a node, or in the block of mpiml.attach()."
        )
    scope = current_scope()
    assert scope is not None
    return scope
