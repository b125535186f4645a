"""What the gradient adapters of the frameworks share: dividing into buckets, and what they refuse."""

from collections.abc import Sequence
from typing import Any

from mpiml.collectives.ops import op_name
from mpiml.errors import UsageError

__all__ = ["assign", "check_options"]


def assign(sizes: Sequence[int], limit: int, first: int) -> list[list[int]]:
    """Divide gradients into buckets, the last one first.

    Local: no MPI.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each gradient, in the order of the model.
    limit : int
        Bytes of a bucket, unless one gradient alone is larger.
    first : int
        The same for the first bucket, which is smaller so that it starts early.

    Returns
    -------
    list of list of int
        Numbers of gradients. Backward comes to the last layers first, so they stand in the
        first bucket.
    """
    buckets: list[list[int]] = []
    used = 0
    for number in reversed(range(len(sizes))):
        size = sizes[number]
        if not buckets or used + size > (first if len(buckets) == 1 else limit):
            buckets.append([])
            used = 0
        buckets[-1].append(number)
        used += size
    return buckets


def check_options(where: str, op: Any, **sizes: Any) -> str:
    """Return the name of an operation; refuse arguments that mean nothing.

    Local: no MPI.

    Raises
    ------
    UsageError
        Which one, and what it may be.
    """
    known = op_name(op, where)
    if known not in ("mean", "sum"):
        raise UsageError(f"{where}: op: expected 'mean' or 'sum', got {op!r}")
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{where}: {name}: expected a number of bytes, got {value!r}")
    return known
