"""What members make or do together, all of them do alike, or none does."""

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeVar

from mpiml.collectives.labels import Label, refused
from mpiml.collectives.regions import first_difference
from mpiml.collectives.team import Team
from mpiml.errors import MpimlError, ServiceGoneError, UsageError

__all__ = ["agree_on", "guarded", "refuse"]

_BAD = "!"
_LEAVES = "\0"  # between arguments and leaves
_MOST = 64 << 20  # bytes of all texts together
_T = TypeVar("_T")
_Meeting = Callable[[Label], Any]


def agree_on(
    team: Team,
    title: str,
    text: str,
    caught: Exception | None,
    what: str,
    cure: str,
    label: Any = None,
    leaves: str = "",
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
        What is compared, a line for each thing: arguments.
    caught : Exception, optional
        Why this member cannot go on.
    what, cure : str
        What was expected to be the same, and what to do.
    label : optional
        What a member that waits is waiting in; `title` by default.
    leaves : str
        What else is compared, a line for each array: `Regions.digest_text`.

    Raises
    ------
    UsageError
        `caught`, or what another member says of its own; or the first line in which they
        differ.
    """
    kind = "" if isinstance(caught, MpimlError) else f"{type(caught).__name__}: "
    said_here = f" {text}{_LEAVES}{leaves}" if caught is None else f"{_BAD}{kind}{caught}"
    own = said_here.encode("utf-8", "backslashreplace")
    digest = own[:1] + blake2b(own, digest_size=16).digest()
    said_all = team.exchange(digest, label or title)
    if caught is None and len(set(said_all)) == 1:
        return
    # The texts of many members together are what messages cannot carry; errors are short.
    shortened = own[: _MOST // team.size]
    texts = [said.decode(errors="replace") for said in team.exchange(shortened, label or title)]
    if caught is not None:
        raise caught
    for name, said in zip(team.names, texts, strict=True):
        if said.startswith(_BAD):
            raise UsageError(f"{said[1:]} (on {name})")
    parts = [said[1:].partition(_LEAVES) for said in texts]
    difference = first_difference([text for text, _, _ in parts], "") or first_difference(
        [leaves for _, _, leaves in parts]
    )
    raise UsageError(
        f"{title}: expected the same {what} on all {team.size} members of {team.title}, got "
        f"{difference or 'others'}. This is member {team.index}. {cure}"
    )


def guarded(team: Team, where: str, work: Callable[[], _T], *meetings: _Meeting) -> _T:
    """Do this member's part of a call; where it cannot, let the others hear of it, and raise.

    Collective over the members where `work` raises; otherwise local.

    Parameters
    ----------
    team : Team
        The members.
    where : str
        The call, for the others' message.
    work : function
        What only this member does before it meets the others. It may call the user's code.
    *meetings : function
        As for `refuse`.
    """
    try:
        return work()
    except Exception as error:
        refuse(team, where, error, *meetings)
        raise


def refuse(team: Team, where: str, error: Exception, *meetings: _Meeting) -> None:
    """Come to operations that this member cannot do: the others hear why, and get an error.

    Collective over the members. Where members do not compare what they do (``check=False``)
    nobody hears of anything.

    Parameters
    ----------
    team : Team
        The members.
    where : str
        The call.
    error : Exception
        Why this member cannot go on. It is the caller's to be raised.
    *meetings : function
        For each operation that the others come to, what gives the channel for a label;
        in their order.
    """
    label = refused(where, error)
    for meeting in meetings:
        # the others' error, which tells of this one; or nobody is there any more
        with suppress(UsageError, ServiceGoneError):
            team.run(meeting(label).refuse, label, label)
