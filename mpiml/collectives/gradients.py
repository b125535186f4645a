"""What the gradient adapters of the frameworks share: dividing into buckets, and what they refuse."""

from collections.abc import Iterable, Sequence
from typing import Any

from mpiml.collectives.compression.checks import check_array
from mpiml.collectives.compression.codec import reducer_of
from mpiml.collectives.ops import op_name
from mpiml.errors import UsageError

__all__ = ["assign", "check_compress", "check_options"]


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


def check_compress(where: str, compress: Any, named: Iterable[tuple[str, Any]]) -> str:
    """Return what members compare of a codec; refuse what would fail in every reduction.

    Local: no MPI.

    Parameters
    ----------
    where : str
        Opens the message of an error.
    compress : codec, optional
        As for `mpiml.collectives.compression.reducer_of`.
    named : iterable of (str, array)
        What a message calls each gradient, and an array of its dtype, of any library.

    Raises
    ------
    UsageError
        It is nothing that compresses, or does not compress such a dtype.
    """
    if compress is None:
        return "None"
    reducer = reducer_of(compress, where)
    for name, array in named:
        try:
            check_array(array, name)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    return repr(reducer)
