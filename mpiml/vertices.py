"""The nodes of an expanded graph, made when they are looked at.

Every rank knows every node, by its place in the order. A list of them would hold a few hundred
bytes for each rank of the job on each rank of the job; what they follow from is as small as the
program.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload

from mpiml.errors import UsageError
from mpiml.graph import Member, Role, Unit, Vertex
from mpiml.settings import FILL, Fill

__all__ = ["Chosen", "Vertices", "expand"]


class Vertices(Sequence[Vertex]):
    """All nodes: units in order, their replicas in order, the roles of each in order.

    Local: holds what one program holds, however many replicas its roles have.

    Parameters
    ----------
    roles, units : sequence of Role, of Unit
        Of one program.
    numbers : sequence of int
        Replicas of each unit.
    """

    __slots__ = ("_numbers", "_places", "_roles", "_starts", "_stops", "_units")

    def __init__(
        self, roles: Sequence[Role], units: Sequence[Unit], numbers: Sequence[int]
    ) -> None:
        self._roles = roles
        self._units = units
        self._numbers = tuple(numbers)
        widths = [len(unit.roles) * n for unit, n in zip(units, numbers, strict=True)]
        self._starts = list(accumulate(widths, initial=0))  # of each unit, and the end
        self._places: dict[int, tuple[int, int]] = {}  # role -> its unit, its place in that
        self._stops: dict[int, list[int]] = {}  # role -> the index after each of its members
        for unit, number in enumerate(numbers):
            for place, role in enumerate(units[unit].roles):
                self._places[role] = unit, place
                self._stops[role] = list(accumulate(_counts(roles[role].members, number)))

    def ids_of(self, role_index: int) -> range:
        """Return the ids of a role's nodes, in index order. Local."""
        unit, place = self._places[role_index]
        start, stop = self._starts[unit], self._starts[unit + 1]
        return range(start + place, stop, len(self._units[unit].roles))

    def of_role(self, role_index: int) -> "Chosen":
        """Return the nodes of a role, in index order. Local."""
        return Chosen(self, self.ids_of(role_index))

    def owners(self, ranks: Sequence[Sequence[int]]) -> Iterator[int]:
        """Yield the rank of each node, from those of each unit's replicas. Local."""
        for position, unit in enumerate(self._units):
            width = len(unit.roles)
            for rank in ranks[position]:
                for _ in range(width):
                    yield rank

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, place: int) -> Vertex: ...
    @overload
    def __getitem__(self, place: slice) -> list[Vertex]: ...
    def __getitem__(self, place: int | slice) -> Vertex | list[Vertex]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        id = place + len(self) if place < 0 else place
        if not 0 <= id < len(self):
            raise IndexError(f"expected a node below {len(self)}, got {place}")
        unit = bisect_right(self._starts, id) - 1
        replica, position = divmod(id - self._starts[unit], len(self._units[unit].roles))
        return self._vertex(id, unit, replica, self._units[unit].roles[position])

    def __iter__(self) -> Iterator[Vertex]:
        id = 0
        for unit, number in enumerate(self._numbers):
            for replica in range(number):
                for role in self._units[unit].roles:
                    yield self._vertex(id, unit, replica, role)
                    id += 1

    def _vertex(self, id: int, unit: int, replica: int, role_index: int) -> Vertex:
        role = self._roles[role_index]
        member = role.members[bisect_right(self._stops[role_index], replica)]
        node, settings, _ = member
        return Vertex(
            id, role_index, role.label, replica, self._numbers[unit], (unit, replica), node,
            settings.concurrency, settings.allow, settings.daemon, settings.on_failure,
        )  # fmt: skip


class Chosen(Sequence[Vertex]):
    """Some of the nodes of a program, made when they are looked at. Local."""

    __slots__ = ("_all", "_ids")

    def __init__(self, all_: Vertices, ids: range) -> None:
        self._all = all_
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> Vertex: ...
    @overload
    def __getitem__(self, place: slice) -> "Chosen": ...
    def __getitem__(self, place: int | slice) -> "Vertex | Chosen":
        if isinstance(place, slice):
            return Chosen(self._all, self._ids[place])
        return self._all[self._ids[place]]


def expand(
    roles: Sequence[Role], units: Sequence[Unit], numbers: Sequence[int], where: str
) -> Vertices:
    """Return the nodes of a program, once it is known how many replicas each unit has.

    Parameters
    ----------
    roles, units : sequence of Role, of Unit
        Of one program.
    numbers : sequence of int
        Replicas of each unit.
    where : str
        Which program, for the message.

    Raises
    ------
    UsageError
        The numbers do not fit the units.
    """
    if len(units) != len(numbers):
        raise UsageError(f"{where} has {len(units)} units, got replicas for {len(numbers)}")
    for unit, number in zip(units, numbers, strict=True):
        if number < 1 or (unit.replicas != FILL and unit.replicas != number):
            raise UsageError(
                f"{where}, {unit.label!r}: expected {unit.replicas!r} replicas, got {number}"
            )
    return Vertices(roles, units, numbers)


def _counts(members: Sequence[Member], number: int) -> Iterator[int]:
    for member in members:
        yield number if isinstance(member.replicas, Fill) else member.replicas
