"""Arrays of a team that lie in no bucket: the way they take, and the memory it needs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiml.collectives.hosts.apart import open_apart
from mpiml.collectives.labels import Label
from mpiml.collectives.staged import Staged, staged_arena
from mpiml.collectives.team import Team
from mpiml.config import Config
from mpiml.errors import SharedMemoryError

__all__ = ["Loose", "loose_of"]


class Loose:
    """Reduces arrays wherever they lie. Collective over the members: every method.

    Parameters
    ----------
    team : Team
        The members.
    label : Label
        What it is first needed for.

    Attributes
    ----------
    checks : bool
        Whether members compare what they do, so that one that refuses is heard.

    Notes
    -----
    The rule: on one host through shared memory; else,
    or where a host has no room, by messages. ``MPIML_ALLREDUCE`` overrides it.
    """

    def __init__(self, team: Team, label: Label) -> None:
        self.team = team
        config = Config.read()
        # One member's environment decides for all: they must go one way.
        said = team.exchange(f"{config.allreduce} {config.check:d}".encode(), label)
        asked = {text.split()[0].decode() for text in said}
        self.checks = not any(text.endswith(b"0") for text in said)
        self._staged: Any = None
        self._why = "several hosts"
        if not team.several_hosts:
            self._staged = self._in_memory(asked, label)
        if self._staged is None:
            self._staged = open_apart(team, label, self.checks)
        team.closes(self._staged.close)

    def _in_memory(self, asked: set[str], label: Label) -> Staged | None:
        """Return what reduces through shared memory, unless it is refused."""
        self._why = "one host"
        for way in ("messages", "memory"):
            if way in asked:
                self._why = f"as MPIML_ALLREDUCE={way} says"
                break
        if "messages" in asked:
            return None
        arena = staged_arena(self.team, label)
        if isinstance(arena, SharedMemoryError):
            if "memory" in asked:
                raise arena
            self._why = "shared memory was refused"
            return None
        return Staged(self.team, arena, self.checks)

    def reduce(self, source: Any, out: Any, dtype: str, op: str, label: Label) -> None:
        """Combine an array of all members into `out`, which may be `source`.

        Parameters
        ----------
        source, out : buffer
            C-contiguous memory of `dtype`, of the same length on every member.
        dtype, op : str
            As `mpiml.collectives.ops` names them.
        label : Label
            What is compared.
        """
        self._staged.reduce(source, out, dtype, op, label)

    def gather(
        self, array: "np.ndarray[Any, Any]", lengths: Sequence[int], label: Label
    ) -> "list[np.ndarray[Any, Any]]":
        """Return the bytes that each member brings.

        Parameters
        ----------
        array : numpy.ndarray
            (n,) uint8, what this one brings.
        lengths : sequence of int
            Of each member's array; the same on all of them.
        label : Label
            What is compared.
        """
        return self._staged.gather(array, lengths, label)  # type: ignore[no-any-return]

    def refuse(self, label: Label) -> None:
        """Take part in an operation that this member cannot do, so that all hear of it."""
        self._staged.refuse(label)

    @property
    def way(self) -> str:
        """How arrays are reduced, and why."""
        return f"{self._staged.way}: {self._why}"


def loose_of(team: Team, label: Label) -> Loose:
    """Return what reduces a team's loose arrays; made once. Collective over the team then."""
    if team.loose is None:
        with team.making:  # threads of one member that come at once
            if team.loose is None:
                team.loose = Loose(team, label)
    loose: Loose = team.loose
    return loose
