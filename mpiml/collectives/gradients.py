"""What the gradient adapters of the frameworks share: dividing into buckets, and agreeing."""

from collections.abc import Sequence
from typing import Any

from mpiml.collectives.labels import Label
from mpiml.collectives.regions import first_difference
from mpiml.collectives.team import Team
from mpiml.errors import UsageError

__all__ = ["agree_on", "assign", "check_options"]


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


def agree_on(
    team: Team, title: str, text: str, caught: UsageError | None, what: str, cure: str
) -> None:
    """Raise on every member where one cannot go on, or they differ.

    Collective over the members.

    Parameters
    ----------
    team : Team
        The members.
    title : str
        Opens the message.
    text : str
        What is compared, a line for each thing.
    caught : UsageError, optional
        Why this member cannot go on.
    what, cure : str
        What was expected to be the same, and what to do.

    Raises
    ------
    UsageError
        `caught`, or that of another member; or the first line in which they differ.
    """
    label = Label(title)
    team.agree(caught, label)
    texts = [said.decode() for said in team.exchange(text.encode(), label)]
    difference = first_difference(texts)
    if difference:
        raise UsageError(
            f"{title}: expected the same {what} on all {team.size} members of {team.title}, got "
            f"{difference}. This is member {team.index}. {cure}"
        )


def check_options(where: str, op: Any, **sizes: Any) -> None:
    """Refuse arguments that mean nothing.

    Local: no MPI.

    Raises
    ------
    UsageError
        Which one, and what it may be.
    """
    if op not in ("mean", "sum"):
        raise UsageError(f"{where}: op: expected 'mean' or 'sum', got {op!r}")
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{where}: {name}: expected a number of bytes, got {value!r}")
