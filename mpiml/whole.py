"""Whole numbers among arguments: NumPy's are some, and True is none."""

import operator
from typing import Any

from mpiml.errors import UsageError

__all__ = ["as_whole", "whole_number"]


def as_whole(value: Any) -> int | None:
    """Return a whole number as an int; None for what is none.

    Local: no MPI.
    """
    if isinstance(value, bool):  # an int to Python, but nobody who passes one means a number
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_number(
    where: str, value: Any, least: int | None = None, most: int | None = None
) -> int:
    """Return a whole number as an int.

    Local: no MPI.

    Parameters
    ----------
    where : str
        Opens the message of an error: the call, and the argument.
    value
        What was passed.
    least, most : int, optional
        Its range, both ends included; `most` only with `least`.

    Raises
    ------
    UsageError
        It is none, or out of its range.
    """
    number = as_whole(value)
    if (
        number is None
        or (least is not None and number < least)
        or (most is not None and number > most)
    ):
        if least is None:
            span = ""
        else:
            span = f" >= {least}" if most is None else f" from {least} to {most}"
        raise UsageError(f"{where}: expected a whole number{span}, got {value!r}")
    return number
