"""Topics in the graph: who publishes, who subscribes to whom; all known before anything is sent.

``topic.publisher()`` and ``topic.subscriber()`` go into the arguments of nodes, as handles do.
Every rank finds them there and so knows all links, from a publisher to a subscriber, without a
message: a subscription is complete before its node begins.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from mpiml.errors import UsageError
from mpiml.graph import Role, Vertex, arguments
from mpiml.handles import walk
from mpiml.references import Deferred
from mpiml.scope import current_scope
from mpiml.topics.policy import Policy
from mpiml.whole import as_whole

__all__ = [
    "ALL",
    "ROUND_ROBIN",
    "End",
    "Source",
    "Subscription",
    "Topic",
    "chosen",
    "ends_of_role",
    "subscriptions",
]

ALL: Final = "all"  #: every subscriber gets every message
ROUND_ROBIN: Final = "round_robin"  #: each message goes to one of them

Source = str | int | Callable[[int, int], Any] | None


class End:
    """One end of a topic, as an argument of a node. Local; the same on all ranks.

    Attributes
    ----------
    topic : Topic
    publishes : bool
        Whether it is a publisher's.
    source
        Of whom a subscriber wants to hear.
    """

    __slots__ = ("publishes", "source", "topic")

    def __init__(self, topic: "Topic", publishes: bool, source: Source) -> None:
        self.topic = topic
        self.publishes = publishes
        self.source = source

    def __repr__(self) -> str:
        if self.publishes:
            return f"{self.topic!r}.publisher()"
        return f"{self.topic!r}.subscriber({'' if self.source is None else repr(self.source)})"


class Topic:
    """Something that nodes publish and subscribe to. Made by `Program.topic`.

    Attributes
    ----------
    name : str
    number : int
        Which of its program.
    policy : Policy
        What is done where a subscriber is slow.
    deliver : str
        To whom a message goes.
    encode, decode : callable or None
        What publishers send of a value, and what subscribers make of that.
    """

    def __init__(
        self,
        name: str,
        number: int,
        policy: Policy,
        deliver: str,
        encode: Callable[[Any], Any] | None,
        decode: Callable[[Any], Any] | None,
    ) -> None:
        self.name = name
        self.number = number
        self.policy = policy
        self.deliver = deliver
        self.encode = encode
        self.decode = decode
        self.array: Any = None  # what an ExternalNode says that its arrays are

    def publisher(self) -> Any:
        """Return what becomes a `Publisher` inside the node that it is given to. Local."""
        return Deferred(_open, End(self, True, None))

    def subscriber(self, source: Source = None) -> Any:
        """Return what becomes a `Subscriber` inside the node that it is given to. Local.

        Parameters
        ----------
        source : str, int or function, optional
            Whom it hears: the publishers of a role, by label; those with this index in their
            role; or those whose index, or one of whose indices, ``source(index, replicas)``
            returns, called with the subscriber's own. All publishers by default.

        Raises
        ------
        UsageError
            It is something else.
        """
        index = as_whole(source)  # of numpy too
        if index is not None:
            source = index
        elif source is not None and not isinstance(source, str) and not callable(source):
            raise UsageError(
                f"{self!r}.subscriber: source: expected a label, an index, or a function of index "
                f"and replicas, got {source!r}"
            )
        return Deferred(_open, End(self, False, source))

    def __repr__(self) -> str:
        return f"topic {self.name!r}"


def _open(end: End) -> Any:
    """Build the end in the node that holds it."""
    scope = current_scope()
    assert scope is not None
    return scope.owner.runtime.topics.open(scope.owner.vertex, end)


def _ends_in(vertices: Sequence[Vertex]) -> Iterator[tuple[Vertex, int, End]]:
    """Yield the ends in the arguments of all nodes: the node, which of its ends it is, the end."""
    found: dict[int, list[End]] = {}  # by node: the replicas of a role share it
    for vertex in vertices:
        ends = found.get(id(vertex.node))
        if ends is None:
            ends = found[id(vertex.node)] = _ends_of(vertex.node)
        for place, end in enumerate(ends):
            yield vertex, place, end


def ends_of_role(role: Role) -> list[End]:
    """Return the ends in the arguments of a role, each once, in their order."""
    ends = [end for member in role.members for end in _ends_of(member.node)]
    return list(dict.fromkeys(ends))


def _ends_of(node: Any) -> list[End]:
    """Return the ends in the arguments of a node, each once, in their order."""
    found = []
    for root, argument in arguments(node):
        for path, value in walk(argument, root):
            if type(value) is End:
                found.append(value)
            elif type(value) is Topic:
                raise UsageError(
                    f"{node!r}: {path}: expected an end of {value!r}, got the topic itself. Pass "
                    "topic.publisher() or topic.subscriber()."
                )
    return list(dict.fromkeys(found))


class Subscription(NamedTuple):
    """A subscriber, and the publishers it hears."""

    vertex: int
    place: int
    end: End
    publishers: tuple[int, ...]


def subscriptions(
    vertices: Sequence[Vertex], own: Collection[Topic] | None = None
) -> dict[int, tuple[list[int], list[Subscription]]]:
    """Return, by the number of each topic, its publishers and its subscriptions.

    Parameters
    ----------
    vertices : sequence of Vertex
        All nodes of a program.
    own : collection of Topic, optional
        The topics of the program, to check that there are no others.

    Raises
    ------
    UsageError
        A topic has no publisher, or no subscriber, or is of another program; a subscriber hears
        nobody.
    """
    topics: dict[int, Topic] = {}
    publishers: dict[int, dict[int, None]] = {}  # each once, in their order
    hearing: dict[int, list[tuple[Vertex, int, End]]] = {}
    for vertex, place, end in _ends_in(vertices):
        number = end.topic.number
        if own is not None and end.topic not in own:
            raise UsageError(
                f"{vertex.title}: {end!r}: expected a topic of the same program, got "
                "one of another. Make it with the `topic` of the program that the node is added to."
            )
        topics[number] = end.topic
        if not end.publishes:
            hearing.setdefault(number, []).append((vertex, place, end))
        else:
            publishers.setdefault(number, {})[vertex.id] = None
    found = {}
    for number, topic in topics.items():
        for what, there in (("publisher", publishers), ("subscriber", hearing)):
            if number not in there:
                here = publishers.get(number) or [v.id for v, _, _ in hearing[number]]
                other = "subscriber" if what == "publisher" else "publisher"
                raise UsageError(
                    f"{topic!r}: {_named([vertices[i] for i in here])} has its {other}(), and no "
                    f"node its {what}(). Pass topic.{what}() as an argument of the node that needs "
                    "it, or leave the topic out."
                )
        spoken = [vertices[i] for i in publishers[number]]
        found[number] = (
            list(publishers[number]),
            [
                Subscription(vertex.id, place, end, _heard(end, vertex, spoken))
                for vertex, place, end in hearing[number]
            ],
        )
    return found


def _heard(end: End, vertex: Vertex, publishers: Sequence[Vertex]) -> tuple[int, ...]:
    """Return the publishers that a subscriber hears."""
    source: Any = end.source
    who = vertex.title
    if callable(source):
        source = source(vertex.index, vertex.replicas)
    heard = (
        publishers if end.source is None else chosen(source, publishers, f"{end!r} of {who}")
    )
    if not heard:
        there = _named(publishers)
        raise UsageError(
            f"{end!r} of {who}: hears nobody ({source!r}). Publishers are {there}."
        )
    return tuple(p.id for p in heard)


def _named(vertices: Sequence[Vertex]) -> str:
    """Return the names of some nodes; of many only the first."""
    names = [v.title for v in vertices]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def chosen(which: Any, among: Sequence[Vertex], where: str) -> list[Vertex]:
    """Return those of some nodes that a label, an index, or several of these mean.

    Of several indices some may mean nobody: the ends of a line have one neighbour.

    Raises
    ------
    UsageError
        It is something else, or one of several labels means nobody.
    """
    if isinstance(which, str):
        return [v for v in among if v.role == which]
    index = as_whole(which)  # of numpy too
    if index is not None:
        return [v for v in among if v.index == index]
    if isinstance(which, Collection):
        unknown = {one for one in which if isinstance(one, str)} - {v.role for v in among}
        if unknown:
            raise UsageError(f"{where}: {min(unknown)!r} is none of {_named(among)}")
        ids = {v.id for one in which for v in chosen(one, among, where)}
        return [v for v in among if v.id in ids]
    raise UsageError(f"{where}: expected a label, an index, or several, got {which!r}")
