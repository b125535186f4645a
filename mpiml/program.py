"""`Program`: the graph of nodes that `launch` runs.

Every rank builds the same program. Nodes of one label are a role; what must stand on one
rank is a unit: a node of a plain role, or one replica of a `Colocation` with all its nodes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpiml import checks, graph
from mpiml.errors import UsageError
from mpiml.graph import Member, Role, Unit, Vertex
from mpiml.handles import Handle, HandleSequence, Reference, find
from mpiml.nodes import Colocation, Node
from mpiml.settings import FILL, Placement, Settings, check_label, check_replicas
from mpiml.topics.graph import ALL, ROUND_ROBIN, Topic, subscriptions
from mpiml.topics.policy import LATEST, Policy, as_policy
from mpiml.vertices import Vertices, expand

__all__ = ["FILL", "Member", "Placement", "Program", "Role", "Unit", "Vertex"]


class Program:
    """A graph of nodes, built alike on every rank.

    Parameters
    ----------
    name : str
        Stands in messages.

    Attributes
    ----------
    roles : list of Role
        In the order they were added.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise UsageError(f"Program: expected a name, got {name!r}")
        self.name = name
        self.roles: list[Role] = []
        self._units: list[tuple[str, tuple[int, ...]]] = []
        self._labels: set[str] = set()
        self._topics: dict[str, Topic] = {}
        self._group: str | None = None
        self._launched = False

    @property
    def units(self) -> list[Unit]:
        """What placement has to place, in the order of the roles."""
        return [
            Unit(label, self.roles[roles[0]].replicas, self.roles[roles[0]].placement, roles)
            for label, roles in self._units
        ]

    @property
    def topics(self) -> list[Topic]:
        """The topics, in the order they were made."""
        return list(self._topics.values())

    @contextmanager
    def group(self, label: str) -> Iterator[None]:
        """Let the nodes added inside share `label`: one role, indices counting up.

        Raises
        ------
        UsageError
            The label is taken or no label, or a group is open.
        """
        where = f"Program {self.name!r}, group {label!r}"
        if self._group is not None:
            raise UsageError(f"{where}: the group {self._group!r} is open, groups do not nest")
        self._check_free(check_label(label, where), where)
        self._group = label
        try:
            yield
        finally:
            self._group = None

    def add_node(
        self,
        node: Node | Colocation,
        *,
        label: str | None = None,
        replicas: int | None = None,
        concurrency: int = 1,
        allow: Iterable[str] | None = None,
        placement: Placement | dict[str, Any] | None = None,
        on_failure: str = "abort",
        daemon: bool = False,
        durable: bool = False,
    ) -> Any:
        """Add a node, and return what stands for it in the arguments of other nodes.

        Parameters
        ----------
        node : Node or Colocation
            What to run; a `Colocation`'s nodes become the roles ``label.0``, ``label.1``...
        label : str
            Name of the role; inside `group` the group's.
        replicas : int, optional
            How many of it; `FILL` takes the ranks left over.
        concurrency, allow : int, list of str
            Methods of a service that may run at once; the only methods to serve.
        placement : Placement or dict, optional
            Where the nodes must go.
        on_failure, durable : str, bool
            ``"abort"`` and False: all else comes with a later release.
        daemon : bool
            The program does not wait for this body to return.

        Returns
        -------
        Handle, or HandleSequence where `replicas` is given
            A tuple of these, one for each node, for a `Colocation`.

        Raises
        ------
        UsageError
            A setting is wrong, or the node or the label was added before.
        """
        label = self._label(label)
        where = f"Program {self.name!r}, node {label!r}"
        settings = Settings.of(where, concurrency, allow, on_failure, daemon)
        place = Placement.of(placement, where)
        return self._add(node, label, replicas, settings, place, durable)

    def topic(
        self,
        name: str,
        policy: Policy = LATEST,
        deliver: str = ALL,
        encode: Callable[[Any], Any] | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> Topic:
        """Return something to publish and to subscribe to.

        Pass ``topic.publisher()`` and ``topic.subscriber()`` as arguments of nodes.

        Parameters
        ----------
        name : str
            For messages; each topic has its own.
        policy : str or Keep
            What is done where a subscriber is slow. ``"latest"``: it gets the newest message of
            each publisher only. ``Keep(n)``: it gets all, and publishers wait where it is n behind.
            ``Keep(n, on_full="drop_oldest")``: it gets the newest n of each, lost ones are counted.
        deliver : str
            ``"all"``: every subscriber gets every message. ``"round_robin"``: one of them.
        encode, decode : callable, optional
            What publishers make of a value before it is sent, and what subscribers make of that.

        Raises
        ------
        UsageError
            A setting is wrong, the name is taken, or the program was launched.
        """
        where = f"Program {self.name!r}, topic {name!r}"
        if self._launched:
            raise UsageError(f"{where}: the program was launched. Build another one.")
        if not isinstance(name, str) or not name or name in self._topics:
            raise UsageError(f"{where}: expected a name of its own, got {name!r}")
        if deliver not in (ALL, ROUND_ROBIN):
            raise UsageError(
                f"{where}: deliver: expected {ALL!r} or {ROUND_ROBIN!r}, got {deliver!r}"
            )
        for what, codec in (("encode", encode), ("decode", decode)):
            if codec is not None and not callable(codec):
                raise UsageError(f"{where}: {what}: expected a function, got {codec!r}")
        topic = Topic(
            name, len(self._topics), as_policy(policy, where), deliver, encode, decode
        )
        self._topics[name] = topic
        return topic

    def check(self) -> None:
        """Check all that must be right before launch; nodes cannot be configured afterwards.

        Raises
        ------
        UsageError
            The program is empty, a node's arguments do not fit its function, or a handle
            is of another program or stands where it cannot be found.
        """
        checks.check_graph(self)
        for role in self.roles:
            for member in role.members:
                member.node.state = "launched"
        self._launched = True

    def expand(self, replicas_per_unit: Sequence[int]) -> Vertices:
        """Return all nodes, once it is known how many each unit has.

        Parameters
        ----------
        replicas_per_unit : sequence of int
            One number for each of ``units``; equal to its own, except where that is `FILL`.

        Returns
        -------
        sequence of Vertex
            Units in order, their replicas in order, and the roles of each in order; each made
            when it is looked at.

        Raises
        ------
        PlacementError
            A handle names a replica that a filled role does not have.
        UsageError
            The numbers do not fit the units.
        """
        where = f"Program {self.name!r}"
        vertices = expand(self.roles, self.units, replicas_per_unit, where)
        checks.check_indices(self, replicas_per_unit)
        subscriptions(vertices, self.topics)  # says what is wrong with them
        return vertices

    def references(self, role_index: int) -> list[tuple[str, Reference]]:
        """Return the handles in the arguments of a role: the path to each, and the handle."""
        return [
            pair
            for member in self.roles[role_index].members
            for root, value in graph.arguments(member.node)
            for pair in find(value, root)
        ]

    def to_mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart."""
        from mpiml.drawing import mermaid

        return mermaid(self)

    def __str__(self) -> str:
        from mpiml.drawing import tree

        return tree(self)

    def __repr__(self) -> str:
        return f"<Program {self.name!r}, {len(self.roles)} roles>"

    def _add(
        self,
        node: Node | Colocation,
        label: str,
        replicas: int | None,
        settings: Settings,
        placement: Placement,
        durable: object,
    ) -> Any:
        """Check what is left to check, all of it before the program changes."""
        where = f"Program {self.name!r}, node {label!r}"
        count = 1 if replicas is None else check_replicas(replicas, where)
        nodes = checks.leaves(node, label, where)
        own = checks.own_replicas(node, replicas, self._group, where)
        if own is not None:
            count = replicas = own
        checks.check_settings([leaf for _, leaf in nodes], settings, durable, where)
        outside = all(leaf.outside for _, leaf in nodes)
        checks.check_count(self.roles, self._group, count, where, outside)
        if self._group is None:
            for name in (label, *(name for name, _ in nodes)):
                self._check_free(name, where)
            roles = self._open_unit(label, placement, [name for name, _ in nodes])
        elif isinstance(node, Colocation):
            raise UsageError(f"{where}: a Colocation is a group of its own: add it outside.")
        else:
            roles = self._join_group(label, placement, where)
        handles: list[Reference] = []
        for role_index, (name, leaf) in zip(roles, nodes, strict=True):
            role = self.roles[role_index]
            start = role.replicas  # 0, or in a group the next index
            role.members.append(Member(leaf, settings, count))
            leaf.home = f"Program {self.name!r}, node {name!r}"
            if replicas is None:
                handles.append(Handle(self, name, role_index, start))
            else:
                known = None if count == FILL else count
                handles.append(HandleSequence(self, name, role_index, known, start))
        return _shaped(node, iter(handles))

    def _label(self, label: str | None) -> str:
        where = f"Program {self.name!r}, add_node"
        if self._launched:
            raise UsageError(f"{where}: the program was launched. Build another one.")
        if self._group is None:
            if label is None:
                raise UsageError(
                    f"{where}: label= is missing. Name the role: add_node(node, "
                    "label='worker'), or add inside `with program.group('worker'):`."
                )
            return check_label(label, where)
        if label is not None and label != self._group:
            raise UsageError(
                f"{where}: label={label!r} inside the group {self._group!r}. Leave it out, "
                "or add the node outside the group."
            )
        return self._group

    def _check_free(self, label: str, where: str) -> None:
        if label in self._labels:
            raise UsageError(
                f"{where}: the label {label!r} is taken. Give each role its own, ask for "
                "several with replicas=, or add different nodes in one `program.group(label)`."
            )

    def _open_unit(
        self, label: str, placement: Placement, names: Sequence[str]
    ) -> tuple[int, ...]:
        position = len(self._units)
        first = len(self.roles)
        self.roles.extend(Role(name, position, placement) for name in names)
        self._labels.update(names, [label])
        roles = tuple(range(first, len(self.roles)))
        self._units.append((label, roles))
        return roles

    def _join_group(self, label: str, placement: Placement, where: str) -> tuple[int, ...]:
        for other, roles in self._units:
            if other == label:
                agreed = self.roles[roles[0]].placement
                if placement != agreed:
                    raise UsageError(
                        f"{where}: the nodes of a group are placed alike, expected {agreed!r}, "
                        f"got {placement!r}. Give it a label of its own."
                    )
                return roles
        return self._open_unit(label, placement, [label])


def _shaped(node: Node | Colocation, handles: Iterator[Reference]) -> Any:
    """Return the handles in the shape of what was added."""
    if isinstance(node, Node):
        return node.seen_as(next(handles))
    return tuple(_shaped(inner, handles) for inner in node.nodes)
