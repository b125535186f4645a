"""Topologies that change from step to step.

Where one step need not connect all members, a step can do with one message per member. What
counts is that the steps together connect them.

Local: nothing here communicates; every member has the same schedule and counts the same steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpiml.errors import UsageError
from mpiml.topology.checks import cut_off, is_mean, number, spectral_gap
from mpiml.topology.value import Stochastic, Topology
from mpiml.topology.weights import uniform

__all__ = ["Cycle", "Schedule", "as_schedule", "one_peer_exponential"]


_SMALL = 64  # members up to which a schedule's text tells whether it is exact: that takes n**3


class Schedule(ABC):
    """A topology for each step, from 0 on: ``schedule[step]`` or ``schedule(step)``.

    Local: nothing here communicates. To make your own, derive from this and define `n`,
    ``__getitem__`` and `require`; a list that starts again is a `Cycle`.
    """

    __iter__: ClassVar[None] = None  # it has no end

    @property
    @abstractmethod
    def n(self) -> int:
        """Number of members."""

    @abstractmethod
    def __getitem__(self, step: int) -> Topology: ...

    def __call__(self, step: int) -> Topology:
        """Return the topology of a step, as ``schedule[step]`` does."""
        return self[step]

    @abstractmethod
    def require(self, kind: Stochastic, where: str) -> None:
        """Refuse weights that do not sum to 1 as an algorithm needs; see `Topology.require`."""


class Cycle(Schedule):
    """Topologies in turn, starting again after the last. Immutable by custom.

    Local: nothing here communicates.

    Parameters
    ----------
    topologies : sequence of Topology
        At least one, all of the same members. Each may be disconnected.
    name : str
        For messages and the `repr`.

    Raises
    ------
    UsageError
        There is none, they have different members, they are not connected together, or some
        are row-stochastic only and others column-stochastic only.

    Attributes
    ----------
    topologies : tuple of Topology
    name : str
    """

    def __init__(self, topologies: Sequence[Topology], name: str = "") -> None:
        where = f"schedule {name}" if name else "schedule"
        self.topologies, self.name = tuple(topologies), name
        strange = [t for t in self.topologies if not isinstance(t, Topology)]
        if not self.topologies or strange:
            got = f"a {type(strange[0]).__name__}" if strange else "none"
            raise UsageError(
                f"{where}: expected one Topology or more, got {got}. Of a matrix of weights: "
                "mpiml.topology.from_matrix(W)."
            )
        sizes = [t.n for t in self.topologies]
        if len(set(sizes)) > 1:
            raise UsageError(f"{where}: expected one number of members, got steps of {sizes}")
        if not (self._all("row") or self._all("column")):
            raise UsageError(
                f"{where}: expected all steps to be row-stochastic, or all column-stochastic; "
                f"got both: {list(self.topologies)}"
            )
        heard: list[set[int]] = [set() for _ in range(self.n)]
        for topology in self.topologies:
            for member, sources in enumerate(heard):
                sources.update(topology.receives(member))
        apart = cut_off(heard)
        if apart is not None:
            raise UsageError(
                f"{where}: expected its {self.period} steps to connect all members together; "
                f"{apart}. Add edges, or a step."
            )

    def __getitem__(self, step: int) -> Topology:
        return self.topologies[number(step, 0, None, "schedule", "step") % self.period]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cycle):
            return NotImplemented
        return self.topologies == other.topologies

    def __hash__(self) -> int:
        return hash(self.topologies)

    def __reduce__(self) -> tuple[type["Cycle"], tuple[tuple[Topology, ...], str]]:
        return Cycle, (self.topologies, self.name)  # see Topology

    def __repr__(self) -> str:
        exact = ", then the mean" if self.n <= _SMALL and self.exact else ""
        return f"<{self.name or 'schedule'}: n={self.n}, {self.period} steps{exact}>"

    @property
    def n(self) -> int:
        """Number of members."""
        return self.topologies[0].n

    @property
    def period(self) -> int:
        """Number of steps after which it starts again."""
        return len(self.topologies)

    def product(self) -> NDArray[np.float64]:
        """Return what a period does, (n, n): the product of the matrices, the first rightmost."""
        product = np.eye(self.n)
        for topology in self.topologies:
            product = topology.matrix() @ product
        return product

    @cached_property
    def exact(self) -> bool:
        """Whether everybody has the mean after one period, within 1e-9."""
        return is_mean(self.product())

    @cached_property
    def spectral_gap(self) -> float:
        """Of a period: 1 minus the second largest magnitude of an eigenvalue of its product."""
        return spectral_gap(self.product())

    def require(self, kind: Stochastic, where: str) -> None:
        """Refuse weights that do not sum to 1 as an algorithm needs; see `Topology.require`."""
        for step, topology in enumerate(self.topologies):
            topology.require(kind, f"{where}, step {step}" if self.period > 1 else where)

    def _all(self, kind: str) -> bool:
        return all(getattr(topology, f"{kind}_stochastic") for topology in self.topologies)


def one_peer_exponential(n: int) -> Cycle:
    """Return the dynamic exponential graph: at step t, i sends to i + 2^(t mod ceil(log2 n)).

    Local: nothing communicates. One message per member and step, weights 1/2. Where n is a power
    of 2, log2 n steps give exactly the mean, from any step on; where it is not, they do not, and
    repeated they converge to it (Assran et al. 2019; Ying et al. 2021).

    Parameters
    ----------
    n : int
        Members, >= 1.

    Raises
    ------
    UsageError
        n < 1.
    """
    n = number(n, 1, None, "one_peer_exponential", "n")
    name = f"one_peer_exponential({n})"
    steps = []
    for power in range(max((n - 1).bit_length(), 1)):
        edges = [(member, (member + 2**power) % n) for member in range(n)]
        steps.append(uniform(n, edges, f"{name}[{power}]", allow_disconnected=True))
    return Cycle(steps, name)


def as_schedule(
    topology: Topology | Schedule | Sequence[Topology], where: str = "schedule"
) -> Schedule:
    """Return a schedule of what a user may give: a topology for good, several in turn, or it.

    Local: nothing communicates.

    Parameters
    ----------
    topology : Topology, Schedule or sequence of Topology
    where : str
        Who asks, for the message.

    Raises
    ------
    UsageError
        It is something else, or does not connect all members.
    """
    if isinstance(topology, Schedule):
        return topology
    if isinstance(topology, Topology):
        topology.require_connected(where)
        return Cycle([topology], topology.name)
    if not isinstance(topology, Sequence):
        raise UsageError(
            f"{where}: expected a Topology, a Schedule or a list of topologies, got a "
            f"{type(topology).__name__}. Of a matrix of weights: mpiml.topology.from_matrix(W)."
        )
    return Cycle(topology)
