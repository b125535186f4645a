"""Which members make a cluster of a ring, and what is wrong with the ring's arguments. Pure."""

from collections.abc import Sequence
from typing import Any

from mpiml.collectives.onesided.ring_rule import RingRule
from mpiml.errors import UsageError
from mpiml.topology.checks import number

__all__ = ["check_step", "clusters_of", "groups_of", "wrong"]


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
        check_step(step)
        RingRule(1, 1, delay=delay, tolerance=tolerance, decay=decay)
    except UsageError as error:
        return UsageError(str(error).replace("RingRule", "RingModel", 1))
    return None


def check_step(step: Any) -> None:
    """Raise the error for what is no step size."""
    try:
        fine = 0 < float(step) < float("inf")
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise UsageError(
            f"RingModel: step: expected a number above 0, finite, got {step!r}: deltas that "
            "clusters pass on are multiplied by it"
        )
