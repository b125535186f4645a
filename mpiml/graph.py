"""What a program consists of: roles and their members, units, and vertices when expanded."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from mpiml.nodes import Node
from mpiml.settings import FILL, Placement, Settings

__all__ = ["Member", "Role", "Unit", "Vertex", "arguments"]


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
