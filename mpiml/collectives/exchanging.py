"""Compressed operations of a team: among all members of one host, or between hosts.

On one host all members compress. That saves nothing there, for memory is faster than any codec,
and shows what training will be like where it does save: on several hosts, where what goes
between them is compressed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiml.collectives.compression.codec import reducer_of
from mpiml.collectives.compression.hosts import BucketInside, LooseInside, reduce_between
from mpiml.collectives.compression.reducer import Reducer, Refused
from mpiml.collectives.in_host import InHost
from mpiml.collectives.labels import Label
from mpiml.collectives.loose import Loose, loose_of
from mpiml.collectives.ops import dtype_name
from mpiml.collectives.regions import Leaf, Regions
from mpiml.collectives.team import Team
from mpiml.errors import UsageError

__all__ = ["TeamExchange", "reduce_bucket", "reduce_compressed"]


class TeamExchange:
    """The members of a team on one host, for one compressed operation; an `Exchange`.

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
    """Reduce arrays that lie anywhere, with compression. Collective over the members.

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
    reducer = _reducer(compress, where)
    if not team.several_hosts:
        exchange = TeamExchange(team, label)
        reducer.reduce(exchange, sources, results, names, op, where=where)
        return
    inside = _loose_inside(team, sources, label)
    inside.take(sources, results)
    reduce_between(team, reducer, inside, names, op, label, where)


def reduce_bucket(
    channel: InHost,
    compress: Any,
    regions: Regions,
    own: memoryview,
    shared: memoryview | None,
    names: Sequence[str],
    op: str,
    label: Label,
) -> None:
    """Reduce the arrays of a bucket in their place, with compression. Collective.

    When it fails, the arrays hold no defined numbers.

    Parameters
    ----------
    channel : InHost
        The bucket's.
    compress : codec
        What the user gave.
    regions : Regions
        The layout of its memory.
    own, shared : memoryview
        The member's memory, and that of the host's one result, if it has one.
    names : sequence of str
        Under which the codec remembers each array.
    op : str
        "sum" or "mean".
    label : Label
        What is compared.
    """
    where = label.head.partition("(")[0]
    reducer = _reducer(compress, where)
    team, arrays = channel.team, regions.views(own)
    if team.several_hosts:
        sums = arrays if shared is None else regions.views(shared)
        inside = BucketInside(channel, sums, shared is not None)
        reduce_between(team, reducer, inside, names, op, label, where)
        return
    channel.barrier(label)  # where members meet who do not compress: here all compare
    results = arrays
    if shared is not None:  # all members know the one result; one of them writes it
        first = team.index == team.local[0]
        results = regions.views(shared) if first else [np.empty_like(a) for a in arrays]
    exchange = TeamExchange(team, label)
    reducer.reduce(exchange, arrays, results, names, op, where=where)
    if shared is not None:
        channel.barrier(label)


def _reducer(compress: Any, where: str) -> Reducer:
    try:
        return reducer_of(compress, where)
    except UsageError as error:  # the others must hear of it
        return Refused(error)


def _loose_inside(team: Team, arrays: Sequence[Any], label: Label) -> LooseInside:
    """Return what sums such arrays in each host; one is kept. Collective over the team."""
    specs = [Leaf(f"[{i}]", a.shape, dtype_name(a)) for i, a in enumerate(arrays)]
    text = "\n".join(spec.text() for spec in specs)
    known: tuple[str, LooseInside] | None = team.kept.get(LooseInside)
    if known is not None and known[0] == text:
        return known[1]
    if known is None:
        team.closes(lambda: team.kept[LooseInside][1].host.close())
    else:
        known[1].host.close()
    made = LooseInside(team, specs, label)
    team.kept[LooseInside] = text, made
    return made
