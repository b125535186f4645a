"""Seconds among arguments: timeouts, ages. True is no number of them, and NaN neither."""

from typing import Any, Final

from mpiml.errors import UsageError
from mpiml.real import as_real

__all__ = ["LONGEST", "as_seconds", "timeout_seconds"]

LONGEST: Final = 1e9  #: longer waits have no deadline: the system's clocks end at 2**63 ns


def as_seconds(value: Any) -> float | None:
    """Return a number of seconds >= 0 as a float; None for what is none.

    Local: no MPI.
    """
    seconds = as_real(value)
    return None if seconds is None or seconds < 0 else seconds


def timeout_seconds(where: str, timeout: Any) -> float | None:
    """Return a timeout in seconds; None: no deadline, which infinity means too.

    Local: no MPI.

    Parameters
    ----------
    where : str
        Opens the message of an error: the call.
    timeout
        What was passed.

    Raises
    ------
    UsageError
        It is neither None nor a number >= 0.
    """
    if timeout is None:
        return None
    seconds = as_seconds(timeout)
    if seconds is None:
        raise UsageError(f"{where}: expected timeout >= 0 or None, got {timeout!r}")
    return seconds if seconds <= LONGEST else None
