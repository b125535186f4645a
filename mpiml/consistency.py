"""When a parameter server applies gradients, and when it answers reads.

Each is a value to give to `mpiml.ParameterServerNode(consistency=)`; ``"bsp"`` and ``"async"``
are short for `BSP()` and `Async()`. What they decide is in `mpiml.roles.parameter_server.order`.

A worker *pushes* gradients and *pulls* parameters. Its *clock* counts the iterations it has
finished: with `SSP` it says so itself, by ``clock()``, else every push is one iteration.
"""

from dataclasses import dataclass
from typing import Any

from mpiml.errors import UsageError
from mpiml.real import finite_number
from mpiml.whole import whole_number

__all__ = [
    "BSP",
    "SSP",
    "Async",
    "Backup",
    "BoundedDelay",
    "Consistency",
    "DropStale",
    "as_consistency",
]


@dataclass(frozen=True)
class Consistency:
    """What all have in common; use one of those derived from it."""


@dataclass(frozen=True)
class Async(Consistency):
    """Every gradient is applied when it arrives; reads never wait (eventual consistency).

    Source: Downpour SGD (Dean et al., NIPS 2012); "eventual" in Li et al., OSDI 2014.

    Parameters
    ----------
    by_staleness : bool
        Divide the learning rate by the staleness of the gradient, the number of updates since the
        pull it was computed from, plus one. (Zhang et al., IJCAI 2016, divide by a staleness that
        is 1 where ours is 0 or 1.) An update function gets the gradient divided instead.
    compensate : float
        λ of delay compensation (Zheng et al., ICML 2017): g + λ g ⊙ g ⊙ (w_now - w_then); 0: none.
    """

    by_staleness: bool = False
    compensate: float = 0.0

    def __post_init__(self) -> None:
        where, expected = "Async: compensate", "a number >= 0"
        value = finite_number(where, self.compensate, expected, 0)
        object.__setattr__(self, "compensate", value)


@dataclass(frozen=True)
class BoundedDelay(Consistency):
    """Iteration t begins once all iterations up to t - tau - 1 are finished, of all workers.

    The gradients of an iteration are applied together, as one step with their mean, in the order
    of the workers, when all have come: the same bits in every run with ``tau=0``.

    Source: Li et al., OSDI 2014, section 3.5 and algorithm 1.

    Parameters
    ----------
    tau : int
        >= 0. 0 is sequential.
    """

    tau: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", whole_number("BoundedDelay: tau", self.tau, 0))


@dataclass(frozen=True, repr=False)
class BSP(BoundedDelay):
    """Bulk synchronous: iteration after iteration, each on the parameters after the one before."""

    tau: int = 0

    def __post_init__(self) -> None:
        if self.tau != 0:
            raise UsageError(
                f"BSP: expected no tau, got {self.tau!r}. Use BoundedDelay({self.tau!r})."
            )

    def __repr__(self) -> str:
        return "BSP()"


@dataclass(frozen=True)
class SSP(Consistency):
    """Stale synchronous parallel: no worker is more than s iterations ahead of the slowest.

    A read of a worker at clock c has all updates up to clock c - s - 1, its own all, and perhaps
    newer ones. Gradients are applied when they arrive.

    Source: Ho et al., NIPS 2013.

    Parameters
    ----------
    s : int
        >= 0. Ho et al. found 5 to 20 best.
    """

    s: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "s", whole_number("SSP: s", self.s, 0))


@dataclass(frozen=True)
class Backup(Consistency):
    """Of N + b workers, each step takes the first N gradients; the others are dropped and counted.

    A gradient counts for a step if it was computed from the parameters of this step.

    Source: Chen et al., 2016 (arXiv 1604.00981); TensorFlow's ``SyncReplicasOptimizer``.

    Parameters
    ----------
    b : int
        >= 0, less than there are workers.
    """

    b: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "b", whole_number("Backup: b", self.b, 0))


@dataclass(frozen=True)
class DropStale(Consistency):
    """As `Async`, but a gradient is dropped, and counted, if it is more than n updates old.

    Source: TensorFlow's ``DropStaleGradientOptimizer``.

    Parameters
    ----------
    n : int
        >= 0.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number("DropStale: n", self.n, 0))


_NAMES = {"bsp": BSP(), "async": Async()}


def as_consistency(value: Any, where: str) -> Consistency:
    """Return a consistency, which may be given by its name.

    Raises
    ------
    UsageError
        It is none.
    """
    if isinstance(value, Async | Backup | BoundedDelay | DropStale | SSP):
        return value
    found = _NAMES.get(value) if isinstance(value, str) else None
    if found is None:
        raise UsageError(
            f"{where}: consistency: expected 'bsp', 'async', or SSP(s), BoundedDelay(tau), "
            f"Backup(b), DropStale(n) or Async(...) of mpiml.consistency, got {value!r}"
        )
    return found
