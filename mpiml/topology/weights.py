"""Weights for a graph: what makes its edges average.

Local: nothing here communicates.
"""

from collections.abc import Iterable

from mpiml.errors import UsageError
from mpiml.topology.checks import number
from mpiml.topology.value import Topology

__all__ = ["Edges", "metropolis", "push_sum", "uniform"]

Edges = Iterable[tuple[int, int]]


def metropolis(
    n: int, edges: Edges, name: str = "", *, allow_disconnected: bool = False
) -> Topology:
    """Return an undirected graph with Metropolis-Hastings weights: doubly stochastic, symmetric.

    Local: nothing communicates. An edge between members of degree d and e gets
    1 / (1 + max(d, e)), and a member keeps the rest (Xiao, Boyd and Lall 2006).

    Parameters
    ----------
    n : int
        Members, >= 1.
    edges : iterable of (int, int)
        Pairs of members, in any order. Loops are left out: a member keeps weight anyway.
    name : str
        For messages and the `repr`.
    allow_disconnected : bool
        See `Topology`.

    Raises
    ------
    UsageError
        No such member, or the graph is not connected.
    """
    both = [pair for edge in edges for pair in (tuple(edge), tuple(edge)[::-1])]
    heard = _heard(n, both, name or "metropolis")
    rows = []
    for member, sources in enumerate(heard):
        row = {j: 1 / (1 + max(len(sources), len(heard[j]))) for j in sources}
        rows.append(row | {member: 1 - sum(row.values())})
    return Topology(rows, name, allow_disconnected=allow_disconnected)


def uniform(
    n: int, edges: Edges, name: str = "", *, allow_disconnected: bool = False
) -> Topology:
    """Return a directed regular graph in which all weights are equal: doubly stochastic.

    Local: nothing communicates. Each member sends to d others and hears from d others, and
    gives 1 / (1 + d) to each of them and to itself.

    Parameters
    ----------
    n : int
        Members, >= 1.
    edges : iterable of (int, int)
        From and to. Loops are left out: a member keeps weight anyway.
    name : str
        For messages and the `repr`.
    allow_disconnected : bool
        See `Topology`.

    Raises
    ------
    UsageError
        No such member, the graph is not regular, or not strongly connected.
    """
    where = name or "uniform"
    heard = _heard(n, edges, where)
    sent = [0] * len(heard)
    for sources in heard:
        for source in sources:
            sent[source] += 1
    degree = len(heard[0])
    for member, sources in enumerate(heard):
        if not len(sources) == sent[member] == degree:
            other = f"; member 0 hears from {degree}" if member else ""
            raise UsageError(
                f"{where}: equal weights need a regular graph, in which each member sends to and "
                f"hears from as many; member {member} hears from {len(sources)} and sends to "
                f"{sent[member]}{other}. Use `metropolis` where the graph is undirected, "
                f"`push_sum` where it is directed."
            )
    rows = [dict.fromkeys([*sources, i], 1 / (1 + degree)) for i, sources in enumerate(heard)]
    return Topology(rows, name, allow_disconnected=allow_disconnected)


def push_sum(
    n: int, edges: Edges, name: str = "", *, allow_disconnected: bool = False
) -> Topology:
    """Return any directed graph with weights for push-sum: column-stochastic.

    Local: nothing communicates. A member with d out-neighbours sends 1 / (1 + d) of what it has
    to each and keeps as much, so that nothing is lost; push-sum divides by a weight that went
    the same ways (Kempe, Dobra and Gehrke 2003; Assran et al. 2019, SGP).

    Parameters
    ----------
    n : int
        Members, >= 1.
    edges : iterable of (int, int)
        From and to. Loops are left out: a member keeps weight anyway.
    name : str
        For messages and the `repr`.
    allow_disconnected : bool
        See `Topology`.

    Raises
    ------
    UsageError
        No such member, or the graph is not strongly connected.
    """
    heard = _heard(n, edges, name or "push_sum")
    parts = [1] * len(heard)  # each keeps one
    for sources in heard:
        for source in sources:
            parts[source] += 1
    rows = [{j: 1 / parts[j] for j in [*sources, i]} for i, sources in enumerate(heard)]
    return Topology(rows, name, allow_disconnected=allow_disconnected)


def _heard(n: int, edges: Iterable[tuple[int, ...]], where: str) -> list[list[int]]:
    """Return for each member whom it hears from, ascending, each once, not itself."""
    n = number(n, 1, None, where, "n")
    heard: list[set[int]] = [set() for _ in range(n)]
    for edge in edges:
        if len(edge) != 2:
            raise UsageError(f"{where}: expected edges as pairs of members, got {edge!r}")
        source, target = (number(m, 0, n, f"{where}, edges", "member") for m in edge)
        if source != target:
            heard[target].add(source)
    return [sorted(sources) for sources in heard]
