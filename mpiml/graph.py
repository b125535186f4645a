"""What a program consists of: roles and their members, units, and vertices when expanded."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpiml.errors import UsageError
from mpiml.nodes import Node
from mpiml.settings import FILL, Fill, Placement, Settings

__all__ = ["Member", "Role", "Unit", "Vertex", "arguments", "expand"]


class Member(NamedTuple):
    """One call of `add_node`: a node and how often it stands in its role."""

    node: Node
    settings: Settings
    replicas: int
    """A number, or `FILL`."""


class Role:
    """The nodes that share a label.

    Attributes
    ----------
    label : str
    unit : int
        Position in ``program.units``.
    placement : Placement
        Where its unit must go.
    members : list of Member
        One, or in a group one for each `add_node`; their indices follow each other.
    """

    __slots__ = ("label", "members", "placement", "unit")

    def __init__(self, label: str, unit: int, placement: Placement) -> None:
        self.label = label
        self.unit = unit
        self.placement = placement
        self.members: list[Member] = []

    @property
    def replicas(self) -> int:
        """Number of nodes of this role, or `FILL`."""
        counts = [member.replicas for member in self.members]
        return FILL if FILL in counts else sum(counts)

    def __repr__(self) -> str:
        return f"<role {self.label!r}, replicas {self.replicas!r}>"


class Unit(NamedTuple):
    """What placement sees: vertices that stand on one rank together, some times over."""

    label: str
    replicas: int
    """A number, or `FILL`."""
    placement: Placement
    roles: tuple[int, ...]
    """Positions in ``program.roles``; several for a `Colocation`."""


class Vertex(NamedTuple):
    """One node of the expanded graph."""

    id: int
    """Position in the list that `Program.expand` returns."""
    role_index: int
    role: str
    index: int  # type: ignore[assignment] # hides tuple.index, which nobody needs
    """Which replica of the role."""
    replicas: int
    """How many the role has."""
    unit: tuple[int, int]
    """Unit and replica of the unit: vertices with the same pair share a rank."""
    node: Node
    concurrency: int
    allow: tuple[str, ...] | None
    daemon: bool
    on_failure: str

    @property
    def title(self) -> str:
        """``role/index``, as messages have it."""
        return f"{self.role}/{self.index}"


def arguments(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield what a node was given, with the names that messages use."""
    yield from ((f"argument {i}", value) for i, value in enumerate(node.args))
    yield from ((f"argument {name}=", value) for name, value in node.kwargs.items())


def expand(
    roles: Sequence[Role], units: Sequence[Unit], numbers: Sequence[int], where: str
) -> list[Vertex]:
    """Return the vertices: units in order, their replicas in order, the roles of each in order.

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
    vertices: list[Vertex] = []
    for position, (unit, number) in enumerate(zip(units, numbers, strict=True)):
        if number < 1 or (unit.replicas != FILL and unit.replicas != number):
            raise UsageError(
                f"{where}, {unit.label!r}: expected {unit.replicas!r} replicas, got {number}"
            )
        members = {index: _spread(roles[index], number) for index in unit.roles}
        for replica in range(number):
            for index in unit.roles:
                node, settings, _ = members[index][replica]
                vertex = Vertex(
                    id=len(vertices),
                    role_index=index,
                    role=roles[index].label,
                    index=replica,
                    replicas=number,
                    unit=(position, replica),
                    node=node,
                    concurrency=settings.concurrency,
                    allow=settings.allow,
                    daemon=settings.daemon,
                    on_failure=settings.on_failure,
                )
                vertices.append(vertex)
    return vertices


def _spread(role: Role, number: int) -> list[Member]:
    """Return the member behind each index of a role."""
    return [
        member
        for member in role.members
        for _ in range(number if isinstance(member.replicas, Fill) else member.replicas)
    ]
