"""Which members make a cluster of a ring, its step size, and what is wrong with both. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from mpiml.collectives.onesided.ring_rule import RingRule, real
from mpiml.errors import UsageError
from mpiml.topology.checks import number

__all__ = ["StepSize", "clusters_of", "groups_of", "wrong"]


class StepSize:
    """What deltas are multiplied by now, which shrinks with each epoch.

    Parameters
    ----------
    rule : RingRule
        Says how much.
    first : float
        That of the first epoch.

    Attributes
    ----------
    now : float
        The step size.

    Raises
    ------
    UsageError
        `first` is not above 0, or not finite.
    """

    def __init__(self, rule: RingRule, first: Any) -> None:
        self._rule = rule
        self.set(first)

    def set(self, first: Any) -> None:
        """Begin anew with an epoch of this step size."""
        expected = "a number above 0, finite"
        self.now = self._first = real(
            first, "RingModel: step", expected, lambda x: 0 < x < math.inf
        )
        self._epoch = 0

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self._epoch += 1
        self.now = self._rule.step(self._first, self._epoch)


def groups_of(hosts: Sequence[int], cluster_size: int | None) -> list[int]:
    """Return for each member which cluster of its host it is in.

    Parameters
    ----------
    hosts : sequence of int
        The host of each member.
    cluster_size : int or None
        Members of a cluster, in their order in the host; None: all of it.
    """
    seen: dict[int, int] = {}
    groups = []
    for host in hosts:
        place = seen[host] = seen.get(host, -1) + 1
        groups.append(0 if cluster_size is None else place // cluster_size)
    return groups


def clusters_of(hosts: Sequence[int], groups: Sequence[int]) -> list[list[int]]:
    """Return the members of each cluster: those of one host that are in one group."""
    found: dict[tuple[int, int], list[int]] = {}
    for member, place in enumerate(zip(hosts, groups, strict=True)):
        found.setdefault(place, []).append(member)
    return list(found.values())


def wrong(
    cluster_size: Any, step: Any, decay: Any, tolerance: Any, delay: Any
) -> UsageError | None:
    """Return what is wrong with arguments."""
    try:
        if cluster_size is not None:
            number(cluster_size, 1, None, "RingModel", "cluster_size")
        rule = RingRule(1, 1, delay=delay, tolerance=tolerance, decay=decay)
        StepSize(rule, step)
    except UsageError as error:
        return UsageError(str(error).replace("RingRule", "RingModel", 1))
    return None
