"""What topologies are checked for, and the numbers that tell how fast they average.

Local: nothing here communicates.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.errors import UsageError
from mpiml.whole import as_whole

__all__ = ["cut_off", "is_mean", "number", "sample", "spectral_gap", "two_sides"]

TOLERANCE = 1e-9  #: by how much a sum of weights may miss 1
_SHOWN = 8  # members that a message names


def number(value: Any, least: int, below: int | None, where: str, what: str) -> int:
    """Return `value` as an int, ``least <= value < below``.

    Raises
    ------
    UsageError
        It is not an integer, or out of its range.
    """
    index = as_whole(value)
    if index is None:
        raise UsageError(f"{where}: expected an integer as {what}, got {value!r}")
    if index < least or (below is not None and index >= below):
        expected = f">= {least}" if below is None else f"{least} to {below - 1}"
        raise UsageError(f"{where}: expected {what} {expected}, got {value!r}")
    return index


def sample(members: Sequence[int]) -> str:
    """Return members in words, the first few of them."""
    shown = ", ".join(map(str, members[:_SHOWN]))
    more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
    return f"member{'s' if len(members) > 1 else ''} {shown}{more}"


def cut_off(sources: Sequence[Iterable[int]]) -> str | None:
    """Tell who never hears of whom, in words; None where all hear of all.

    Parameters
    ----------
    sources : sequence of iterable of int
        For each member those it receives from.
    """
    n = len(sources)
    targets: list[list[int]] = [[] for _ in range(n)]
    for member, those in enumerate(sources):
        for source in those:
            targets[source].append(member)
    deaf = sorted(set(range(n)) - _reached(targets))
    if deaf:
        return f"nothing of member 0 ever reaches {sample(deaf)}"
    mute = sorted(set(range(n)) - _reached(sources))
    return f"nothing of {sample(mute)} ever reaches member 0" if mute else None


def _reached(neighbours: Sequence[Iterable[int]]) -> set[int]:
    """Return the members on a path that starts at member 0."""
    found, open_ends = {0}, [0]
    while open_ends:
        new = set(neighbours[open_ends.pop()]) - found
        found |= new
        open_ends.extend(new)
    return found


def two_sides(neighbours: Sequence[Iterable[int]]) -> tuple[list[int], tuple[int, int] | None]:
    """Put each member on side 0 or 1 so that neighbours are on different ones.

    Parameters
    ----------
    neighbours : sequence of iterable of int
        For each member; a neighbour's list has the member too.

    Returns
    -------
    sides : list of int
        The lowest member of each connected part is on side 0.
    clash : tuple of int, or None
        Two neighbours on the same side, where it cannot be done.
    """
    sides = [-1] * len(neighbours)
    for first in range(len(neighbours)):
        if sides[first] >= 0:
            continue
        sides[first], open_ends = 0, [first]
        while open_ends:
            member = open_ends.pop()
            for other in neighbours[member]:
                if sides[other] < 0:
                    sides[other] = 1 - sides[member]
                    open_ends.append(other)
                elif sides[other] == sides[member]:
                    return sides, (min(member, other), max(member, other))
    return sides, None


def spectral_gap(matrix: NDArray[np.float64]) -> float:
    """Return 1 minus the second largest magnitude of an eigenvalue, (n, n) -> 0 to 1.

    One round of averaging leaves about 1 - gap of the distance from the mean: at 1 nothing,
    at 0 it never gets there. Takes n³ operations.
    """
    if len(matrix) == 1:
        return 1.0
    if np.array_equal(matrix, matrix.T):
        values: NDArray[Any] = np.linalg.eigvalsh(matrix)
    else:
        values = np.linalg.eigvals(matrix)
    second = np.sort(np.abs(values))[-2]
    return float(min(max(1 - second, 0.0), 1.0))


def is_mean(matrix: NDArray[np.float64]) -> bool:
    """Tell whether a matrix puts the mean of all members everywhere."""
    return bool(np.abs(matrix - 1 / len(matrix)).max() <= TOLERANCE)
