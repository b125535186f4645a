"""What must be right in a program: in each `add_node`, before launch, and once it is placed."""

from collections.abc import Sequence
from typing import Any, Protocol

from mpiml import later
from mpiml.errors import PlacementError, UsageError
from mpiml.graph import Role, Unit, arguments
from mpiml.handles import Handle, Reference, find
from mpiml.hiding import hidden
from mpiml.nodes import Colocation, Node, ServiceNode, served_methods
from mpiml.settings import FILL, Settings

__all__ = [
    "check_count",
    "check_graph",
    "check_indices",
    "check_settings",
    "leaves",
    "own_replicas",
]


class _Program(Protocol):
    """The part of `Program` that is checked here."""

    name: str
    roles: list[Role]

    @property
    def units(self) -> list[Unit]: ...

    def references(self, role_index: int) -> list[tuple[str, Reference]]: ...


def leaves(node: Any, label: str, where: str) -> list[tuple[str, Node]]:
    """Return the nodes that `add_node` was given, with the labels they will have.

    Raises
    ------
    UsageError
        It is no node, or one of them was added before; names `where`.
    """
    if not isinstance(node, (Node, Colocation)):
        kind = f"class {node.__qualname__}" if isinstance(node, type) else type(node).__name__
        raise UsageError(
            f"{where}: expected a node, got {kind}. Wrap functions as "
            "mpiml.PyNode(function, *args), classes as mpiml.ServiceNode(cls, *args)."
        )
    found: list[tuple[str, Node]] = []
    _flatten(node, label, found)
    seen: set[int] = set()
    for _, leaf in found:
        if leaf.home is not None or id(leaf) in seen:
            raise UsageError(
                f"{where}: {leaf!r} was added before ({leaf.home or 'in this Colocation'}). "
                f"Make another {leaf.kind}, or ask for several with replicas=."
            )
        seen.add(id(leaf))
    return found


def own_replicas(node: Any, replicas: int | None, group: str | None, where: str) -> int | None:
    """Return how many replicas a node consists of, if it says so itself.

    Raises
    ------
    UsageError
        It does, and `add_node` says too, or it would stand among other nodes; names `where`.
    """
    spread: int | None = getattr(node, "spread", None)
    if isinstance(node, Colocation) and any(leaf.spread for _, leaf in leaves(node, "", where)):
        raise UsageError(
            f"{where}: {node!r}: some of these are several ranks each: add them alone"
        )
    if spread is not None and replicas is not None:
        raise UsageError(
            f"{where}: {node!r} has its number of ranks, {spread}, from its own shards=, got "
            f"replicas={replicas!r} too. Leave that out."
        )
    if spread is not None and group is not None:
        raise UsageError(
            f"{where}: {node!r} is a group of its own: add it outside of {group!r}"
        )
    return spread


def check_settings(
    nodes: Sequence[Node], settings: Settings, durable: object, where: str
) -> None:
    """Check that the settings fit the kind of the nodes they were given for.

    Raises
    ------
    UsageError
        They do not, or come with a later release; names `where`.
    """
    if settings.on_failure in ("ignore", "restart"):
        later.refuse("on_failure", f"{where}: on_failure={settings.on_failure!r}")
    if settings.on_failure != "abort":
        raise UsageError(f"{where}: on_failure= expected 'abort', got {settings.on_failure!r}")
    if durable:
        later.refuse("durable", f"{where}: durable={durable!r}")
    services = [node for node in nodes if isinstance(node, ServiceNode)]
    if not services and (settings.concurrency != 1 or settings.allow is not None):
        what = "concurrency=" if settings.allow is None else "allow="
        raise UsageError(f"{where}: {what} is for services, got {nodes[0]!r}")
    if settings.allow is not None and len(nodes) > 1:
        raise UsageError(f"{where}: allow= is for one service, got a Colocation")
    for service in services:
        if service.spread is not None and (
            settings.concurrency != 1 or settings.allow is not None
        ):
            raise UsageError(
                f"{where}: {service!r}: its methods are its own: expected neither concurrency= nor "
                f"allow=, got concurrency={settings.concurrency}, allow={settings.allow}"
            )
        served_methods(service.cls, settings.allow, where)


def check_count(
    roles: Sequence[Role], group: str | None, count: int, where: str, outside: bool = False
) -> None:
    """Check that one role at most fills the ranks left over, alone under its label.

    Ranks of other programs are as many as attach, and fill nothing: `outside` says so of the new
    role.

    Raises
    ------
    UsageError
        Another one does already; names `where`.
    """
    for role in roles:
        mixed = role.label == group and FILL in (count, role.replicas)
        if mixed:
            raise UsageError(
                f"{where}: replicas=FILL among other nodes of a group. Give the nodes that "
                "fill the ranks a label of their own."
            )
        theirs = outside or any(member.node.outside for member in role.members)
        if count == role.replicas == FILL and not theirs:
            raise UsageError(
                f"{where}: replicas=FILL, but {role.label!r} takes the ranks left over "
                "already. Give one of them a number."
            )


def check_graph(program: _Program) -> None:
    """Check all that must be right before launch.

    Raises
    ------
    UsageError
        The program is empty, a placement names no other label, a node's arguments do not
        fit its function, or a handle is of another program or cannot be found.
    """
    where = f"Program {program.name!r}"
    if not program.roles:
        raise UsageError(
            f"{where} has no nodes. Add one: "
            "program.add_node(mpiml.PyNode(function), label='worker')."
        )
    labels = [unit.label for unit in program.units]
    for unit in program.units:
        other = unit.placement.with_
        if other is not None and (other == unit.label or other not in labels):
            raise UsageError(
                f"{where}, node {unit.label!r}: placement with_={other!r} names no other "
                f"label. There are {', '.join(labels)}."
            )
    for role in program.roles:
        for member in role.members:
            _check_handles(program, member.node, f"{where}, node {role.label!r}")
            member.node.check_arguments()


def check_indices(program: _Program, numbers: Sequence[int]) -> None:
    """Check the handles into a filled role, once it is known how many each unit has.

    Raises
    ------
    PlacementError
        A handle names a replica that the role does not have.
    """
    for position, role in enumerate(program.roles):
        for path, handle in program.references(position):
            number = numbers[program.roles[handle.role_index].unit]
            if isinstance(handle, Handle) and handle.index >= number:
                raise PlacementError(
                    f"Program {program.name!r}, node {role.label!r}: {path} is "
                    f"{handle.role}/{handle.index}, but {handle.role!r} got {number} "
                    "replicas. Start more ranks, or give replicas= a number."
                )


def _flatten(node: Node | Colocation, label: str, found: list[tuple[str, Node]]) -> None:
    if isinstance(node, Node):
        found.append((label, node))
        return
    for position, inner in enumerate(node.nodes):
        _flatten(inner, f"{label}.{position}", found)


def _check_handles(program: _Program, node: Node, where: str) -> None:
    for root, value in [*arguments(node), (node.name, node.callable)]:
        for path, handle in find(value, root):
            if handle.program is not program:
                raise UsageError(
                    f"{where}: {path} is {handle!r}, {_other(program, handle.program.name)} "
                    "Pass handles of the program the node was added to."
                )
        for path, container, handle in hidden(value, root):
            if handle.program is program:
                raise UsageError(
                    f"{where}: {handle!r} stands in {container} ({path}), where it cannot be "
                    "found. Pass it as an argument of the node, alone or in a list, tuple, "
                    f"dict or dataclass: {node.kind}({node.name}, handle)."
                )


def _other(program: _Program, name: str) -> str:
    if name == program.name:
        return f"which is another program, also named {name!r} (was it built twice?)."
    return f"which is of program {name!r}, not of {program.name!r}."
