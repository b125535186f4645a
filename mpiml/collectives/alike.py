"""What members make together is made of the same parts on all of them, or of none."""

from typing import Any

from mpiml.collectives.regions import first_difference
from mpiml.collectives.team import Team
from mpiml.errors import UsageError

__all__ = ["agree_on"]

_BAD = "!"


def agree_on(
    team: Team,
    title: str,
    text: str,
    caught: UsageError | None,
    what: str,
    cure: str,
    label: Any = None,
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
    label : optional
        What a member that waits is waiting in; `title` by default.

    Raises
    ------
    UsageError
        `caught`, or that of another member; or the first line in which they differ.
    """
    own = f" {text}" if caught is None else f"{_BAD}{caught}"
    texts = [said.decode() for said in team.exchange(own.encode(), label or title)]
    if caught is not None:
        raise caught
    for name, said in zip(team.names, texts, strict=True):
        if said.startswith(_BAD):
            raise UsageError(f"{said[1:]} (on {name})")
    difference = first_difference([said[1:] for said in texts])
    if difference:
        raise UsageError(
            f"{title}: expected the same {what} on all {team.size} members of {team.title}, got "
            f"{difference}. This is member {team.index}. {cure}"
        )
