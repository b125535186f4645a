"""HogWild++: who gives the delta of its cluster to the next one, when, and how much of it.

Each cluster of threads or processes has a model that its members add to without locks, and a
snapshot of it. The clusters stand in a ring. A token goes round, and its holder brings the
model of its own cluster and that of the next together, `mpiml._native.ring_sync`. Pure: what
carries the token and the models asks these objects.

H. Zhang, C.-J. Hsieh, V. Akella, "HogWild++: A New Mechanism for Decentralized Asynchronous
Stochastic Gradient Descent", ICDM 2016, and the authors' code, whose constants these are.
"""

import functools
import math
from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import Any, NamedTuple

from mpiml.errors import UsageError
from mpiml.topology.checks import number

__all__ = ["Due", "RingRule", "Turns", "TurnsDone", "real", "weights"]

_FIRST = 8  # the first wait for the token, in delays


class RingRule:
    """The ring of HogWild++: its weights, the order of turns, the waits between them.

    Local: no MPI, no clock.

    Token k, ``0 <= k < size``, is held by member ``k // clusters`` of cluster ``k % clusters``:
    the members of a cluster take turns, and each turn belongs to the next cluster. Clusters of
    different sizes: the turns of members that a cluster lacks are left out, so that everybody
    still has one of `size` turns; a smaller cluster then has fewer of them and passes on more
    at once.

    Members are numbered cluster by cluster.

    Parameters
    ----------
    clusters : int
        n, 1 or more. One alone has nobody to meet and no turns: `syncs` is False.
    members : int or sequence of int
        How many each cluster has, 1 or more.
    delay : int, optional
        tau0, the own updates of a member from its sync to passing the token on, >= 1. As the
        authors ran it if not given: 64 up to 4 clusters, 16 up to 10, else 4.
    tolerance : float
        Where the delta of a component is no larger than this, it waits for more; 0 or more,
        the authors tell of 1e-2 to 1e-6. It is compared with the delta times the step size.
    decay : float
        What becomes of the step size in n epochs: each has it times ``decay ** (1 / n)``;
        above 0, at most 1. The authors' is 0.8, and 0.85 for covtype and epsilon.

    Attributes
    ----------
    beta : float
        The part of a delta that is passed on, the root of ``beta**n + beta = 1``: a delta
        that has gone round is whole again where it began. The authors stop its bisection at
        1e-3; here it goes on to the last bit.
    lam : float
        The weight of the next model in the mean, ``1 - beta**(n - 1)``. Of one cluster beta
        is 1 and lam 0: it keeps all.

    Raises
    ------
    UsageError
        A number is out of its range, or `members` is not one for each cluster.

    Examples
    --------
    >>> rule = RingRule(2, 4)
    >>> [rule.member(token) for token in range(rule.size)]
    [0, 4, 1, 5, 2, 6, 3, 7]
    """

    def __init__(
        self,
        clusters: int,
        members: int | Sequence[int],
        *,
        delay: int | None = None,
        tolerance: float = 1e-2,
        decay: float = 0.8,
    ) -> None:
        self.clusters = n = number(clusters, 1, None, "RingRule", "clusters")
        self.members = _members(members, n)
        if delay is None:
            delay = 64 if n <= 4 else 16 if n <= 10 else 4
        self.delay = number(delay, 1, None, "RingRule", "delay")
        where = "RingRule: tolerance"
        self.tolerance = real(
            tolerance, where, "0 or more, finite", lambda x: 0 <= x < math.inf
        )
        self.decay = real(decay, "RingRule: decay", "above 0, at most 1", lambda x: 0 < x <= 1)
        self.beta, self.lam = weights(n)
        rounds = range(max(self.members))
        self._slots = [(c, m) for m in rounds for c in range(n) if m < self.members[c]]
        self._firsts = [sum(self.members[:c]) for c in range(n)]
        self._order = [self._firsts[c] + m for c, m in self._slots]
        self._tokens = {member: token for token, member in enumerate(self._order)}

    def __repr__(self) -> str:
        same = len(set(self.members)) == 1
        return f"RingRule({self.clusters}, {self.members[0] if same else self.members})"

    @property
    def size(self) -> int:
        """P, the number of members, of tokens and of turns until all have had one."""
        return len(self._slots)

    @property
    def syncs(self) -> bool:
        """Whether there is anybody to meet: two clusters or more."""
        return self.clusters > 1

    @property
    def rest(self) -> int:
        """Own updates of a member from passing the token to looking for it again, tau0 P."""
        return self.delay * self.size

    @property
    def first_wait(self) -> int:
        """Own updates of a member until it looks for the token for the first time, 8 tau0."""
        return _FIRST * self.delay

    def member(self, token: int) -> int:
        """Return the number of the member that holds the token."""
        return self._order[self._known(token, "member")]

    def cluster(self, token: int) -> int:
        """Return the cluster whose model its holder brings to the next one."""
        return self._slots[self._known(token, "cluster")][0]

    def token(self, member: int) -> int:
        """Return the token that is this member's turn."""
        return self._tokens[number(member, 0, self.size, f"{self!r}.token", "member")]

    def following(self, cluster: int, absent: Container[int] = ()) -> int | None:
        """Return the next cluster of the ring.

        Parameters
        ----------
        cluster : int
            The present one.
        absent : container of int, optional
            Members that have ended or are lost. A cluster that has no others is left out: it
            would pass nothing on. None is returned where no other cluster is left.
        """
        n = self.clusters
        cluster = number(cluster, 0, n, f"{self!r}.following", "cluster")
        for ahead in range(1, n):
            found = (cluster + ahead) % n
            if self._lives(found, absent):
                return found
        return None if n > 1 else cluster

    def living(self, absent: Container[int] = ()) -> int:
        """Return how many clusters have members that are not absent."""
        return sum(self._lives(cluster, absent) for cluster in range(self.clusters))

    def _lives(self, cluster: int, absent: Container[int]) -> bool:
        first = self._firsts[cluster]
        return any(m not in absent for m in range(first, first + self.members[cluster]))

    def after(self, token: int, absent: Container[int] = ()) -> int | None:
        """Return the token that comes next.

        Parameters
        ----------
        token : int
            The present one.
        absent : container of int, optional
            Members that have ended or are lost: their turns are left out. None is returned
            where nobody is left, the holder included.
        """
        token = self._known(token, "after")
        for ahead in range(1, self.size + 1):
            found = (token + ahead) % self.size
            if self._order[found] not in absent:
                return found
        return None

    def step(self, first: float, epoch: int) -> float:
        """Return the step size of an epoch, 0 for the first, from that of the first.

        It is also what deltas are multiplied by.
        """
        epoch = number(epoch, 0, None, f"{self!r}.step", "epoch")
        return float(first * self.decay ** (epoch / self.clusters))

    def _known(self, token: int, what: str) -> int:
        return number(token, 0, self.size, f"{self!r}.{what}", "token")


class Due(Enum):
    """What a member is to do between two updates."""

    NOTHING = "nothing"  #: go on
    LOOK = "look"  #: see whether the token is its own; if so sync, and tell `Turns.synced`
    PASS = "pass"  #: give the token on, as `Turns.passed` says


class TurnsDone(NamedTuple):
    """What one member has done so far."""

    syncs: int  #: turns it had
    late: int  #: updates that it made while it looked for the token


class Turns:
    """When one member of a `RingRule` looks for the token, and when it passes it on.

    Local: no MPI, no clock; counted in the member's own updates. Nothing waits: a member whose
    token has not come goes on with its updates and looks again after each.

    Parameters
    ----------
    rule : RingRule
        The ring.
    member : int
        Whose turns these are, 0 to ``rule.size - 1``.

    Raises
    ------
    UsageError
        There is no such member.

    Examples
    --------
    ::

        turns = Turns(rule, me)
        for row in rows:
            update(row)
            due = turns.count()
            if due is Due.LOOK and token() == turns.token:
                ring_sync(own, snapshot, following, step, rule.beta, rule.lam, rule.tolerance)
                turns.synced()
            elif due is Due.PASS:
                give(turns.passed())
    """

    def __init__(self, rule: RingRule, member: int) -> None:
        self.rule, self.member = rule, number(member, 0, rule.size, "Turns", "member")
        self.token = rule.token(self.member)  #: the one that is its turn
        self._holds = False
        self._left = rule.first_wait  # own updates until something is due
        self._syncs = self._late = 0

    def __repr__(self) -> str:
        return f"Turns({self.rule!r}, {self.member})"

    @property
    def holds(self) -> bool:
        """Whether the member has synced and has the token still."""
        return self._holds

    @property
    def left(self) -> int:
        """Own updates until something is due; 0: something is."""
        return self._left

    @property
    def due(self) -> Due:
        """What is to be done now."""
        if self._left > 0 or not self.rule.syncs:
            return Due.NOTHING
        return Due.PASS if self._holds else Due.LOOK

    def count(self, updates: int = 1) -> Due:
        """Count own updates, and return what is to be done now.

        Raises
        ------
        UsageError
            The number is negative.
        """
        updates = number(updates, 0, None, f"{self!r}.count", "updates")
        if self.due is Due.LOOK:  # it was, and the token had not come
            self._late += updates
        self._left = max(0, self._left - updates)
        return self.due

    def synced(self) -> None:
        """Begin the turn: the token was this member's, and it has synced.

        Raises
        ------
        UsageError
            It was not to look for the token now.
        """
        if self.due is not Due.LOOK:
            why = "it holds the token" if self._holds else f"not for {self._left} updates"
            raise UsageError(
                f"{self!r}.synced: expected a member that is to look for the token, got one "
                f"that is not: {why if self.rule.syncs else 'one cluster alone has no turns'}. "
                f"Sync only when `count` says Due.LOOK and the token is {self.token}."
            )
        self._holds, self._left = True, self.rule.delay
        self._syncs += 1

    def passed(self, absent: Container[int] = ()) -> int | None:
        """End the turn, due or earlier, and return the next token.

        Parameters
        ----------
        absent : container of int, optional
            Members whose turns are left out, see `RingRule.after`; this one too, if it ends.

        Raises
        ------
        UsageError
            The member does not hold the token.
        """
        if not self._holds:
            raise UsageError(
                f"{self!r}.passed: expected a member that holds the token, got one that does "
                f"not. Call `synced` first."
            )
        self._holds, self._left = False, self.rule.rest
        return self.rule.after(self.token, absent)

    def statistics(self) -> TurnsDone:
        """Return how many turns there were, and updates while the token was late."""
        return TurnsDone(self._syncs, self._late)


@functools.cache
def weights(clusters: int) -> tuple[float, float]:
    """Return beta and lambda of a ring of so many clusters; 1 and 0 for one alone."""
    beta = _root(clusters) if clusters > 1 else 1.0
    return beta, 1 - beta ** (clusters - 1)


def _root(n: int) -> float:
    """Return the root of ``x**n + x - 1`` in (0, 1), to the last bit, by bisection."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if middle**n + middle > 1:
            high = middle
        else:
            low = middle
    return low


def real(value: Any, where: str, expected: str, fine: Callable[[float], bool]) -> float:
    """Return a number as a float, if it is `fine`, which NaN must not be.

    Raises
    ------
    UsageError
        It is none, or not as `expected`; begins with `where`.
    """
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not fine(found):
        raise UsageError(f"{where}: expected {expected}, got {value!r}")
    return found


def _members(members: int | Sequence[int], clusters: int) -> tuple[int, ...]:
    """Return the size of each cluster."""
    where, what = "RingRule", "members of a cluster"
    if isinstance(members, Sequence):
        if len(members) != clusters:
            raise UsageError(
                f"{where}: members: expected {clusters} numbers, one for each cluster, got "
                f"{len(members)}"
            )
        return tuple(number(size, 1, None, where, what) for size in members)
    return (number(members, 1, None, where, what),) * clusters
