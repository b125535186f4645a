"""Graphs of members that are known to average well, and those of networkx.

All are doubly stochastic, and the same as BlueFog's of the like names where it has them. Gaps
and degrees are compared in Ying et al. 2021, *Exponential Graph is Provably Efficient for
Decentralized Deep Training*.

Local: nothing here communicates.
"""

from collections.abc import Hashable, Iterator, Sequence
from math import isqrt, prod
from typing import Any, Literal

from mpiml.errors import UsageError
from mpiml.topology.checks import number
from mpiml.topology.value import Topology
from mpiml.topology.weights import metropolis, push_sum, uniform

__all__ = [
    "Rule",
    "bipartite",
    "complete",
    "exponential",
    "from_networkx",
    "grid",
    "ring",
    "star",
]

Rule = Literal["metropolis", "uniform", "push_sum"]
_RULES = {"metropolis": metropolis, "uniform": uniform, "push_sum": push_sum}


def ring(n: int, *, directed: bool = False) -> Topology:
    """Return a ring: each member hears from the one before it, and from the one after it.

    Local: nothing communicates. Weights are 1/3 (1/2 for n = 2); the gap shrinks as 1 / n².

    Parameters
    ----------
    n : int
        Members, >= 1.
    directed : bool
        Hear from the one before only, with weights 1/2.

    Raises
    ------
    UsageError
        n < 1.
    """
    n = number(n, 1, None, "ring", "n")
    steps = (1,) if directed else (1, n - 1)
    return uniform(n, _circle(n, steps), f"ring({n}{', directed=True' if directed else ''})")


def exponential(n: int, base: int = 2) -> Topology:
    """Return the static exponential graph: member i sends to i + 1, i + base, i + base², ...

    Local: nothing communicates. Of base 2, each has ceil(log2 n) out-neighbours, and the gap is
    2 / (1 + ceil(log2 n)) where n is even, more where it is odd.

    Parameters
    ----------
    n : int
        Members, >= 1.
    base : int
        >= 2.

    Raises
    ------
    UsageError
        n < 1 or base < 2.
    """
    n = number(n, 1, None, "exponential", "n")
    base = number(base, 2, None, "exponential", "base")
    steps = [1]
    while steps[-1] * base < n:
        steps.append(steps[-1] * base)
    name = f"exponential({n})" if base == 2 else f"exponential({n}, base={base})"
    return uniform(n, _circle(n, steps), name)


def grid(n: int, shape: tuple[int, int] | None = None, *, wrap: bool = False) -> Topology:
    """Return a grid of rows and columns, with Metropolis-Hastings weights.

    Local: nothing communicates. Member ``r * columns + c`` stands in row r and column c. The
    gap shrinks as 1 / n.

    Parameters
    ----------
    n : int
        Members, >= 1.
    shape : (int, int), optional
        Rows and columns; by default as near to a square as n lets, which is a line for a prime.
    wrap : bool
        Close the rows and columns to rings (a torus).

    Raises
    ------
    UsageError
        n < 1, or the shape has not n places.
    """
    n = number(n, 1, None, "grid", "n")
    if shape is None:
        rows = next(r for r in range(isqrt(n), 0, -1) if n % r == 0)
        shape = (rows, n // rows)
    if len(shape) != 2 or prod(shape) != n or min(shape) < 1:
        raise UsageError(f"grid: expected a shape of two numbers with product {n}, got {shape}")
    rows, columns = shape
    edges = []
    for member in range(n):
        row, column = divmod(member, columns)
        if wrap or row + 1 < rows:
            edges.append((member, (row + 1) % rows * columns + column))
        if wrap or column + 1 < columns:
            edges.append((member, row * columns + (column + 1) % columns))
    return metropolis(n, edges, f"grid({rows}x{columns}{', wrap=True' if wrap else ''})")


def star(n: int, center: int = 0) -> Topology:
    """Return a star: one member averages with all others, and they with it only.

    Local: nothing communicates. The center gives 1/n to all; the others keep 1 - 1/n.

    Parameters
    ----------
    n : int
        Members, >= 1.
    center : int
        Which member.

    Raises
    ------
    UsageError
        n < 1, or no such member.
    """
    n = number(n, 1, None, "star", "n")
    center = number(center, 0, n, "star", "center")
    return metropolis(n, [(center, member) for member in range(n)], f"star({n})")


def complete(n: int) -> Topology:
    """Return the complete graph: one round gives everybody the mean.

    Local: nothing communicates.

    Parameters
    ----------
    n : int
        Members, >= 1.

    Raises
    ------
    UsageError
        n < 1.
    """
    n = number(n, 1, None, "complete", "n")
    return uniform(n, _circle(n, range(1, n)), f"complete({n})")


def bipartite(n: int) -> Topology:
    """Return the graph of all edges between even and odd members, for `ActivePassive`.

    Local: nothing communicates. Metropolis-Hastings weights.

    Parameters
    ----------
    n : int
        Members, >= 1.

    Raises
    ------
    UsageError
        n < 1.
    """
    n = number(n, 1, None, "bipartite", "n")
    edges = [(even, odd) for even in range(0, n, 2) for odd in range(1, n, 2)]
    return metropolis(n, edges, f"bipartite({n})")


def from_networkx(
    graph: Any,
    weights: Rule | None = None,
    *,
    attribute: str | None = None,
    allow_disconnected: bool = False,
) -> Topology:
    """Return the topology of a graph of networkx; an edge (u, v) means that u sends to v.

    Local: nothing communicates.

    Parameters
    ----------
    graph : networkx.Graph or networkx.DiGraph
        Its nodes are 0 to n - 1, the members.
    weights : {"metropolis", "uniform", "push_sum"}, optional
        The function of this name in `mpiml.topology` gives the weights, and loops are left out.
        By default "metropolis" where the graph is undirected and "uniform" where it is directed.
    attribute : str, optional
        Name of an attribute of the edges that holds their weights, instead; own weights are
        those of loops.
    allow_disconnected : bool
        See `Topology`.

    Raises
    ------
    UsageError
        The nodes are others, an edge lacks the attribute, the weights do not average, or the
        graph is not connected.
    """
    where = "from_networkx"
    lacks = [
        a for a in ("nodes", "edges", "is_directed", "is_multigraph") if not hasattr(graph, a)
    ]
    if lacks or graph.is_multigraph():
        got = f"a {type(graph).__name__}"
        raise UsageError(f"{where}: expected a networkx.Graph or DiGraph, got {got}")
    n = _members(list(graph.nodes), where)
    directed = graph.is_directed()
    if attribute is not None:
        if weights is not None:
            raise UsageError(f"{where}: expected weights= or attribute=, got both")
        return _by_attribute(graph, n, attribute, allow_disconnected)
    rule = weights or ("uniform" if directed else "metropolis")
    if rule not in _RULES:
        raise UsageError(
            f"{where}: expected weights= to be one of {[*_RULES]}, got {weights!r}"
        )
    if rule == "metropolis" and directed:
        raise UsageError(
            f"{where}: expected an undirected graph for weights='metropolis', got a "
            f"{type(graph).__name__}; use 'push_sum', or its to_undirected()"
        )
    edges = list(_directed(graph)) if rule != "metropolis" else list(graph.edges)
    return _RULES[rule](n, edges, f"graph({n})", allow_disconnected=allow_disconnected)


def _members(nodes: Sequence[Hashable], where: str) -> int:
    if not nodes or set(nodes) != set(range(len(nodes))):
        strange = [node for node in nodes if node not in range(len(nodes))]
        raise UsageError(
            f"{where}: expected nodes 0 to n - 1 with n >= 1, got {len(nodes)} nodes"
            f"{f', one of them {strange[0]!r}' if strange else ''}. "
            f"networkx.convert_node_labels_to_integers(graph) names them so."
        )
    return len(nodes)


def _by_attribute(graph: Any, n: int, attribute: str, allow_disconnected: bool) -> Topology:
    rows: list[dict[int, float]] = [{} for _ in range(n)]
    for source, target in _directed(graph):
        data = graph.edges[source, target]
        if attribute not in data:
            raise UsageError(
                f"from_networkx: edge ({source}, {target}) has no attribute {attribute!r}, "
                f"only {sorted(map(str, data))}"
            )
        rows[target][source] = data[attribute]
    return Topology(rows, f"graph({n})", allow_disconnected=allow_disconnected)


def _directed(graph: Any) -> Iterator[tuple[int, int]]:
    """Yield each edge, from and to; of an undirected graph both ways."""
    for source, target in graph.edges:
        yield source, target
        if not graph.is_directed():
            yield target, source


def _circle(n: int, steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the edges that go `steps` members on from each."""
    return [(member, (member + step) % n) for member in range(n) for step in steps]
