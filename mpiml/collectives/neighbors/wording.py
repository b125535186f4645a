"""What is said of neighbours that do not do the same. Pure."""

import re

from mpiml.collectives.labels import REFUSED, Label
from mpiml.collectives.regions import first_difference
from mpiml.collectives.team import Team
from mpiml.errors import UsageError

__all__ = ["mismatch", "refusal"]


def refusal(team: Team, source: int, text: str) -> UsageError:
    """Return the error of who waits for a member that cannot take part. Local."""
    head, place, _ = [*text.split("\n", 2), "", ""][:3]
    call, _, why = head.removesuffix("()").partition(REFUSED)
    at = f" at {place}" if place else ""
    return UsageError(
        f"{team.title}: {team.names[source]} could not take part in {call}{at}: "
        f"{why} This is {team.names[team.index]}."
    )


def mismatch(
    team: Team, source: int, call: int, text: str, label: Label, own_call: int
) -> UsageError:
    """Return the error of a member that hears from another that this one does something else.

    Local.

    Parameters
    ----------
    team : Team
        The members.
    source : int
        The other one.
    call : int
        The number of its call.
    text : str
        That of its label.
    label : Label
        Of this member's call, and
    own_call : int
        Its number.
    """
    names = team.names
    here, there = names[team.index], names[source]
    own, theirs = label.text().split("\n", 2), [*text.split("\n", 2), "", ""][:3]
    if call != own_call:
        what = f"{own[0]} as call {own_call} on {here} and {theirs[0]} as {call} on {there}"
    elif own[0] != theirs[0]:
        what = f"{own[0]} at {own[1]} on {here}, and {theirs[0]} at {theirs[1]} on {there}"
    else:
        difference = first_difference([own[2], theirs[2]]) or "other arrays"
        difference = re.sub(
            r"\(member ([01])\)", lambda m: f"({(here, there)[int(m[1])]})", difference
        )
        what = f"{own[0]} with other arrays: {difference}"
    return UsageError(
        f"{team.title}: expected the same call on neighbours, got {what}. Make the same "
        "calls in the same order, with the same shapes and dtypes, on every member."
    )
