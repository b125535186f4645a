"""Who averages with whom when members meet in pairs.

All draws come from the bits of Philox, a generator that counts: its key is the seed, its counter
tells the step and the member. So every member draws the same without a word, at any step, and
with any release of NumPy, which promises the bits though not what it makes of them.

Local: nothing here communicates.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.errors import UsageError
from mpiml.topology.checks import number, two_sides
from mpiml.topology.schedule import Schedule
from mpiml.topology.value import Stochastic, Topology

__all__ = ["ActivePassive", "RandomPairs"]

_PAIRS, _PEERS = 0, 1  # so that the two draw different numbers of one seed
_WORD = 1 << 64


class RandomPairs(Schedule):
    """At each step, members meet in pairs drawn anew, and both take the mean of the two.

    Local: nothing here communicates. All pairings are equally likely. Where n is odd, one member
    drawn with them rests. That the steps connect all members is so with probability 1, and not
    known of any number of steps (randomized gossip: Boyd et al. 2006; NoLoCo, Kolehmainen et al.
    2025).

    Parameters
    ----------
    n : int
        Members, >= 1.
    seed : int
        0 to 2^64 - 1, the same on every member.

    Raises
    ------
    UsageError
        n < 1, or no such seed.

    Attributes
    ----------
    seed : int
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        self._n = number(n, 1, None, "RandomPairs", "n")
        self.seed = number(seed, 0, _WORD, "RandomPairs", "seed")
        self._last: tuple[int, tuple[int | None, ...]] = (-1, ())

    def __reduce__(self) -> tuple[type["RandomPairs"], tuple[int, int]]:
        return RandomPairs, (self.n, self.seed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomPairs):
            return NotImplemented
        return (self.n, self.seed) == (other.n, other.seed)

    def __hash__(self) -> int:
        return hash((self.n, self.seed))

    def __repr__(self) -> str:
        return f"RandomPairs({self.n}, seed={self.seed})"

    @property
    def n(self) -> int:
        """Number of members."""
        return self._n

    def partner(self, member: int, step: int) -> int | None:
        """Return whom a member meets at a step; None where it rests."""
        return self._partners(step)[number(member, 0, self.n, "partner", "member")]

    def pairs(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return the pairs of a step, each and all ascending."""
        partners = enumerate(self._partners(step))
        return tuple((a, b) for a, b in partners if b is not None and a < b)

    def __getitem__(self, step: int) -> Topology:
        rows = [
            {member: 1.0} if other is None else {member: 0.5, other: 0.5}
            for member, other in enumerate(self._partners(step))
        ]
        return Topology(rows, f"{self!r}[{step}]", allow_disconnected=True)

    def require(self, kind: Stochastic, where: str) -> None:
        """Refuse nothing: every step is doubly stochastic."""

    def _partners(self, step: int) -> tuple[int | None, ...]:
        """Return the partner of each member; kept for one step, as all members ask alike."""
        step = number(step, 0, _WORD, "RandomPairs", "step")
        last, found = self._last
        if last != step:
            order = np.argsort(
                _bits(self.seed, _PAIRS, step, 0, self.n), kind="stable"
            ).tolist()
            partners: list[int | None] = [None] * self.n
            for a, b in zip(order[0::2], order[1::2], strict=False):  # of an odd n one is left
                partners[a], partners[b] = b, a
            found = tuple(partners)
            self._last = (step, found)
        return found


class ActivePassive:
    """The two sides of a bipartite graph, of which one asks and the other answers.

    Local: nothing here communicates. In AD-PSGD an active member picks a neighbour at random and
    both take the mean of their models. As an active member only waits for a passive one, and a
    passive one for nobody, no circle of waiting can arise (Lian et al. 2018).

    Parameters
    ----------
    topology : Topology
        Connected and bipartite: `bipartite`, `star`, `grid`, or a `ring` of an even number. Only
        its edges count, in both directions; its weights do not.
    seed : int
        0 to 2^64 - 1.

    Raises
    ------
    UsageError
        It is not connected or not bipartite, or no such seed.

    Attributes
    ----------
    active, passive : tuple of int
        Ascending; member 0 is active.
    topology : Topology
    seed : int
    """

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        if not isinstance(topology, Topology):
            raise UsageError(
                "ActivePassive: expected a Topology that is bipartite, such as "
                f"mpiml.topology.bipartite(n), got {_shown(topology)}"
            )
        topology.require_connected("ActivePassive")
        sides, clash = two_sides(topology.neighbors)
        if clash is not None:
            raise UsageError(
                f"ActivePassive: expected a bipartite graph, got {topology!r}: members "
                f"{clash[0]} and {clash[1]} are neighbours and would be on one side, where each "
                f"could wait for the other. Use bipartite({topology.n})."
            )
        self.topology = topology
        self.seed = number(seed, 0, _WORD, "ActivePassive", "seed")
        self.active = tuple(i for i, side in enumerate(sides) if side == 0)
        self.passive = tuple(i for i, side in enumerate(sides) if side == 1)
        self._sides = sides

    def __reduce__(self) -> tuple[type["ActivePassive"], tuple[Any, ...]]:
        return ActivePassive, (self.topology, self.seed)

    def __repr__(self) -> str:
        sides = f"{len(self.active)} active, {len(self.passive)} passive"
        return f"<ActivePassive of {self.topology.name or 'a topology'}: {sides}>"

    @property
    def n(self) -> int:
        """Number of members."""
        return self.topology.n

    def is_active(self, member: int) -> bool:
        """Tell whether a member asks others; else it answers."""
        return self._sides[number(member, 0, self.n, "is_active", "member")] == 0

    def neighbors(self, member: int) -> tuple[int, ...]:
        """Return the members on the other side that a member may meet, ascending."""
        return self.topology.neighbors[number(member, 0, self.n, "neighbors", "member")]

    def peer(self, member: int, step: int) -> int | None:
        """Return whom an active member asks at its own step, each neighbour equally likely.

        Parameters
        ----------
        member : int
            Active.
        step : int
            >= 0. Members count for themselves; they do not step together.

        Returns
        -------
        int or None
            None where it has no neighbour: it is the only member.

        Raises
        ------
        UsageError
            The member is passive, or there is no such member or step.
        """
        if not self.is_active(member):
            raise UsageError(
                f"peer: member {member} is passive and answers only; active are {self.active}"
            )
        step = number(step, 0, _WORD, "peer", "step")
        others = self.neighbors(member)
        if not others:
            return None
        return others[int(_bits(self.seed, _PEERS, step, member, 1)[0]) % len(others)]


def _bits(seed: int, purpose: int, step: int, member: int, count: int) -> NDArray[np.uint64]:
    """Return `count` numbers of 64 random bits, the same wherever they are drawn."""
    key = np.array([seed, purpose], np.uint64)
    counter = np.array([0, step, member, 0], np.uint64)  # the first counts what is drawn
    bits: NDArray[np.uint64] = np.random.Philox(key=key, counter=counter).random_raw(count)
    return bits


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(found).__name__}"
