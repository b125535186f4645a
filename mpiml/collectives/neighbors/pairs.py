"""Pair gossip: members meet in pairs, and both take the mean of the two.

Who meets whom is drawn from seed and step, alike on all members, so nothing is negotiated
(Boyd, Ghosh, Prabhakar and Shah 2006, "Randomized gossip algorithms"; pairs drawn anew for each
step as in NoLoCo, Kolehmainen et al. 2025).
"""

from typing import Any

from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors.edges import pair_edges
from mpiml.collectives.neighbors.exchange import exchange_of
from mpiml.collectives.neighbors.reducing import mixed
from mpiml.collectives.team import Team
from mpiml.errors import UsageError
from mpiml.topology import RandomPairs

__all__ = ["PairGossip", "gossip"]

_WHERE = "gossip"


def gossip(
    x: Any,
    pairs: RandomPairs,
    step: int,
    comm: Any = None,
    *,
    out: Any = None,
    name: str | None = None,
) -> Any:
    """Return the mean of this member's arrays and those of its partner of a step.

    Collective over the pair: a member waits for its partner, and for nobody else; one that
    rests waits for nobody. All members make the same calls in the same order. The first call
    of all is collective over the members.

    Parameters
    ----------
    x, comm, out, name
        As for `neighbor_allreduce`.
    pairs : mpiml.topology.RandomPairs
        Of as many members; the same on all of them.
    step : int
        The same on all members.

    Returns
    -------
    array or tree of arrays
        ``(x_i + x_j) / 2``, the same bits on both; of a member that rests, a copy of `x`.

    Raises
    ------
    UsageError
        `pairs` is of another number of members; partners differ in step, name, shapes or
        dtypes.
    """
    return _meet(team_of(comm, _WHERE), x, pairs, step, out, name, _WHERE)


class PairGossip:
    """Pair gossip that counts its steps.

    Collective over pairs: `mix`. Construction is collective over the members.

    Parameters
    ----------
    pairs : mpiml.topology.RandomPairs
        Of as many members; the same on all of them.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    name : str, optional
        Compared among partners, and shown in messages.

    Attributes
    ----------
    step : int
        The number of the next one.
    """

    def __init__(self, pairs: RandomPairs, comm: Any = None, name: str | None = None) -> None:
        self._team = team_of(comm, "PairGossip")
        exchange_of(self._team)
        _check(pairs, self._team, "PairGossip")
        self._pairs = pairs
        self._name = name
        self.step = 0

    @property
    def partner(self) -> int | None:
        """Whom this member meets next; None: it rests."""
        return self._pairs.partner(self._team.index, self.step)

    def mix(self, x: Any, out: Any = None) -> Any:
        """Return the mean of this member's arrays and its partner's, as `gossip` does.

        Collective over the pair. The step counts even if it fails.
        """
        step, self.step = self.step, self.step + 1
        return _meet(self._team, x, self._pairs, step, out, self._name, "PairGossip.mix")

    def __repr__(self) -> str:
        return f"<PairGossip by {self._pairs!r}, {self.step} steps>"


def _meet(
    team: Team, x: Any, pairs: Any, step: int, out: Any, name: str | None, where: str
) -> Any:
    exchange = exchange_of(team)
    _check(pairs, team, where)
    edges = pair_edges(pairs.partner(team.index, step), f"{pairs!r}, step={step}")
    return mixed(team, exchange, edges, x, out, name, where)


def _check(pairs: Any, team: Team, where: str) -> None:
    if not isinstance(pairs, RandomPairs) or pairs.n != team.size:
        raise UsageError(
            f"{where}: pairs: expected mpiml.topology.RandomPairs of {team.size} members, as many "
            f"as there are, got {pairs!r}"
        )
