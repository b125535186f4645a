"""What compression needs of a team: sums and gathers of plain arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiml.collectives.compression.codec import reducer_of
from mpiml.collectives.labels import Label
from mpiml.collectives.loose import Loose, loose_of
from mpiml.collectives.ops import dtype_name
from mpiml.collectives.team import Team

__all__ = ["TeamExchange", "reduce_compressed"]


class TeamExchange:
    """The members of a team, for one compressed operation; an `Exchange`.

    Collective over the members: `sum`, `gather`, and construction the first time.
    """

    def __init__(self, team: Team, label: Label) -> None:
        self._loose: Loose = loose_of(team, label)
        self._label = label
        self.index = team.index
        self.size = team.size
        self.names: Sequence[str] = team.names

    def sum(self, array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Sum an array over the members, in place."""
        self._loose.reduce(array, array, dtype_name(array), "sum", self._label)
        return array

    def gather(
        self, array: "np.ndarray[Any, Any]", lengths: Sequence[int]
    ) -> "list[np.ndarray[Any, Any]]":
        """Return the bytes of each member."""
        return self._loose.gather(array, lengths, self._label)


def reduce_compressed(
    team: Team,
    compress: Any,
    sources: Sequence[Any],
    results: Sequence[Any],
    names: Sequence[str],
    op: str,
    label: Label,
) -> None:
    """Reduce arrays with compression. Collective over the members.

    Parameters
    ----------
    team : Team
        The members.
    compress : codec
        What the user gave.
    sources, results : sequences of ndarray
        The arrays, and where the sums go.
    names : sequence of str
        Under which the codec remembers each array.
    op : str
        "sum" or "mean".
    label : Label
        What is compared.
    """
    where = label.head.partition("(")[0]
    reducer = reducer_of(compress, where)
    exchange = TeamExchange(team, label)
    reducer.reduce(exchange, sources, results, names, op, where=where)
