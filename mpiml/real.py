"""Real numbers among arguments: NumPy's are some; True is none, nor text, nor NaN."""

import math
from typing import Any

from mpiml.errors import UsageError

__all__ = ["as_real", "finite_number"]


def as_real(value: Any) -> float | None:
    """Return a number as a float, infinity where it is too large for one; None for what is none.

    Local: no MPI.
    """
    if isinstance(value, bool | str | bytes | bytearray):  # float() takes them
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def finite_number(where: str, value: Any, expected: str, least: float = -math.inf) -> float:
    """Return a finite number as a float.

    Local: no MPI.

    Parameters
    ----------
    where : str
        Opens the message of an error: the call, and the argument.
    value
        What was passed.
    expected : str
        What the message says was expected.
    least : float, optional
        The end of its range, which it may be.

    Raises
    ------
    UsageError
        It is none, or below `least`.
    """
    number = as_real(value)
    if number is None or not least <= number or not math.isfinite(number):
        raise UsageError(f"{where}: expected {expected}, got {value!r}")
    return number
