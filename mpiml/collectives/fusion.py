"""Which arrays of a tree travel together: many small ones as one message. Pure."""

from collections.abc import Sequence
from typing import Final

__all__ = ["messages"]

#: bytes; an array of so many or more travels alone, since to copy it would cost more
ALONE: Final = 128 << 10
#: bytes that a message of small arrays has at most
FUSED: Final = 4 << 20


def messages(dtypes: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
    """Group arrays into messages, in an order that depends on these arguments alone.

    Local: no MPI.

    Parameters
    ----------
    dtypes : sequence of str
        Of each array; those of a message have one.
    sizes : sequence of int
        Bytes of each array.

    Returns
    -------
    list of list of int
        Numbers of the arrays of each message.
    """
    groups: list[list[int]] = []
    open_: dict[str, tuple[list[int], int]] = {}
    for number, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
        if size >= ALONE:
            groups.append([number])
            continue
        group, total = open_.get(dtype, ([], 0))
        if not group or total + size > FUSED:
            group, total = [], 0
            groups.append(group)
        group.append(number)
        open_[dtype] = (group, total + size)
    return groups
