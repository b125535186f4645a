"""`neighbor_allreduce`, and what averages between hosts share with it."""

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpiml.collectives.alike import refuse
from mpiml.collectives.labels import Label
from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors.combining import weighted_sum
from mpiml.collectives.neighbors.edges import Edges, call_edges, edges_of, topology_at
from mpiml.collectives.neighbors.exchange import Block, Exchange, exchange_of
from mpiml.collectives.neighbors.leaves import Leaves
from mpiml.collectives.team import Team
from mpiml.errors import UsageError

__all__ = ["meeting_of", "mixed", "neighbor_allreduce", "static_edges"]

_WHERE = "neighbor_allreduce"
_PLANS = 256  # topologies whose edges a team keeps
_CALLS = 256  # labels that edges keep


def neighbor_allreduce(
    x: Any,
    topology: Any = None,
    comm: Any = None,
    *,
    step: int | None = None,
    self_weight: float | None = None,
    receive_weights: Mapping[int, float] | None = None,
    send_weights: Mapping[int, float] | None = None,
    out: Any = None,
    name: str | None = None,
) -> Any:
    """Return the weighted mean of this member's arrays and its neighbours'.

    Collective over neighbours: a member waits for those it hears from, and for nobody else;
    it may be two calls ahead of those it sends to. All members make the same calls in the
    same order. The first call of all is collective over the members.

    The result of member i is the sum of ``W[i, j] * x_j``, added in the order of the members
    (Lian et al. 2017, D-PSGD, algorithm 1, line 6). It does not depend on who comes when.

    Parameters
    ----------
    x : array or tree of arrays
        Floating-point or complex numbers, of NumPy, CuPy, torch or JAX; on neighbours the same
        shapes and dtypes. Arithmetic is in the dtype of the array; that of float16 and
        bfloat16 in float32, rounded once.
    topology : mpiml.topology.Topology or Schedule, optional
        Of as many members, row-stochastic. None: the three weights say it all.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    step : int, optional
        Which topology of a schedule; of no effect on a single topology.
    self_weight : float, optional
        In place of ``W[i, i]``.
    receive_weights : dict of int to float, optional
        For each source its weight, in place of ``W[i, j]``.
    send_weights : dict of int to float, optional
        For each target a factor, by which the receiver multiplies its weight. Given without
        `receive_weights`, those are 1: so columns may be what sums to 1 (push-sum).
    out : array or tree of arrays, optional
        Where the result goes: arrays like those of `x`, or `x` itself. New ones by default.
    name : str, optional
        Compared among neighbours, and shown in messages.

    Returns
    -------
    array or tree of arrays
        Like `x`, of the same libraries; `out` where that was given.

    Raises
    ------
    UsageError
        Weights do not average, or are not those of the edges; neighbours differ in topology,
        name, shapes or dtypes, which names both; a neighbour cannot take part.
    """
    team = team_of(comm, _WHERE)
    exchange = exchange_of(team)
    if self_weight is None and receive_weights is None and send_weights is None:
        edges = static_edges(team, topology, step, "row", _WHERE)
    else:
        given = (self_weight, receive_weights, send_weights)
        base = None if topology is None else topology_at(topology, step, team.size, _WHERE)
        edges = call_edges(base, team.index, team.size, *given, _WHERE)
    return mixed(team, exchange, edges, x, out, name, _WHERE)


def static_edges(team: Team, topology: Any, step: int | None, kind: Any, where: str) -> Edges:
    """Return a member's edges in a topology, found once."""
    topology = topology_at(topology, step, team.size, where)
    plans: dict[Any, tuple[Any, Edges]] = team.kept.setdefault("plans of neighbours", {})
    key = (id(topology), kind)
    known = plans.get(key)
    if known is None or known[0] is not topology:
        if len(plans) >= _PLANS:
            plans.clear()
        known = plans[key] = (topology, edges_of(topology, team.index, kind, where))
    return known[1]


def mixed(
    team: Team, exchange: Exchange, edges: Edges, x: Any, out: Any, name: str | None, where: str
) -> Any:
    """Return this member's part of a round of averaging. Collective over neighbours."""
    try:
        leaves, label = _prepared(edges, x, out, name, where)
    except Exception as error:
        refuse(team, where, error, meeting_of(exchange, edges))
        raise
    result = leaves.result()

    def use(snapshot: Any, blocks: Sequence[Block]) -> None:
        _combine(team, edges, leaves, snapshot, blocks, label, result)

    team.run(exchange.trade, label, edges, leaves, label, use)
    return leaves.finish(result)


def _prepared(
    edges: Edges, x: Any, out: Any, name: str | None, where: str
) -> tuple[Leaves, Label]:
    """Return the arrays of a call, and its label, made once for edges and layout."""
    if not (name is None or isinstance(name, str)):
        raise UsageError(f"{where}: name: expected a str, got {name!r}")
    leaves = Leaves(x, out, where)
    key = (leaves.layout, name, where)
    label = edges.calls.get(key)
    if label is None:
        label = Label(where, name=name, leaves=leaves.layout.text, more=edges.text)
        if len(edges.calls) >= _CALLS:
            edges.calls.clear()
        edges.calls[key] = label
    return leaves, label


class _Meeting(NamedTuple):
    """One call of a member, where its targets wait for it."""

    exchange: Exchange
    edges: Edges

    def refuse(self, label: Label) -> None:
        """Tell them that nothing will come."""
        self.exchange.refuse(self.edges, label)


def meeting_of(exchange: Exchange, edges: Edges) -> Callable[[Label], _Meeting]:
    """Return what `mpiml.collectives.alike.refuse` needs, so that targets hear of it. Local."""
    meeting = _Meeting(exchange, edges)
    return lambda _: meeting


def _combine(
    team: Team, edges: Edges, leaves: Leaves, snapshot: Any, blocks: Sequence[Block],
    label: Label, result: Any,
) -> None:  # fmt: skip
    """Write the weighted sum into `result`."""
    receives, own = edges.receives, edges.own
    weights = [receives[source] * factor for source, factor, _ in blocks]
    columns = [leaves.flat(block.memory) for block in blocks]
    if edges.rows:
        total = own + sum(weights)
        if abs(total - 1) > 1e-9:
            factors = {block.source: block.factor for block in blocks}
            raise UsageError(
                f"{label}: expected self_weight and receive_weights, multiplied by the factors "
                f"that came, to sum to 1 within 1e-9, got {total!r} on "
                f"{team.names[team.index]}: factors {factors}"
            )
    if own:
        mine = leaves.own()
        if mine is None:
            mine = leaves.flat(leaves.scratch() if snapshot is None else snapshot)
        place = bisect(edges.sources, team.index)  # they are added in the order of the members
        weights.insert(place, own)
        columns.insert(place, mine)
    for i, target in enumerate(leaves.parts(result)):
        weighted_sum([arrays[i] for arrays in columns], weights, target, leaves.apart)
