"""What ranks of other programs are told of the graph, which they cannot build: bytes, no pickle.

The layout is in docs/design/0008-external.md. Nodes are named by ranges, so that the length does not
grow with the number of such ranks times that of their partners.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mpiml.errors import UsageError
from mpiml.external.crowd import Crowd, ranges
from mpiml.external.encoding import DTYPES
from mpiml.external.node import label_of
from mpiml.graph import Vertex
from mpiml.handles import Handle
from mpiml.nodes import ServiceNode, is_stream, served_methods
from mpiml.topics.graph import ROUND_ROBIN, Subscription, Topic, subscriptions
from mpiml.topics.policy import BLOCK, Keep

__all__ = ["Bells", "check_topics", "manifest", "outside_of"]

VERSION = 1
SLOT = 32768
_U32 = struct.Struct("<I")
Bells = Sequence[tuple[str, str, Sequence[tuple[int, int]]]]


def outside_of(vertices: Sequence[Vertex]) -> list[Vertex]:
    """Return the nodes that are ranks of other programs."""
    return [vertex for vertex in vertices if vertex.node.outside]


def check_topics(vertices: Sequence[Vertex]) -> None:
    """Check what ranks of other programs publish, hear and call.

    Raises
    ------
    UsageError
        They hear each other without a Python node in between; what they call is no service.
    """
    for _, subscribed in subscriptions(vertices).values():
        for each in subscribed:
            here = vertices[each.vertex]
            heard = [vertices[p] for p in each.publishers if vertices[p].node.outside]
            if here.node.outside and heard:
                raise UsageError(
                    f"{each.end!r} of {here.title}: hears {heard[0].title}, and both are ranks of "
                    "other programs: expected a Python node in between, which passes arrays on"
                )
    for vertex in outside_of(vertices):
        for handle in vertex.node.calls:  # type: ignore[attr-defined]
            for other in _meant(handle, vertices):
                if not isinstance(other.node, ServiceNode):
                    raise UsageError(
                        f"{vertex.title}: calls: expected services, got {other.title}, "
                        f"{other.node!r}, which has no methods"
                    )


def manifest(
    title: str, vertices: Any, ranks: Sequence[int], crowd: Crowd, bells: Bells = ()
) -> bytes:
    """Return all that guests need to know.

    Parameters
    ----------
    title : str
        Of the program.
    vertices : sequence of Vertex
        All nodes.
    ranks : sequence of int
        For each its rank: of a node in Python among these ranks, of a guest behind them.
    crowd : Crowd
        Who is who.
    bells : sequence of (host, path, sequence of (rank, line))
        Files by which Python ranks are woken.
    """
    known = _Known(vertices, ranks, crowd)
    parts = [struct.pack("<BBHIII", VERSION, 0, 0, len(crowd.guests), len(crowd.pythons), SLOT)]
    parts.append(_ranges(crowd.pythons))
    parts.append(_listed(known.labels(title)))
    parts.append(_listed(known.topics()))
    parts.append(_listed(known.services()))
    parts.append(_listed(known.servers()))
    parts.append(_listed(_bell(*bell) for bell in bells))
    return b"".join(parts)


class _Known:
    """The graph, as far as it concerns guests."""

    def __init__(self, vertices: Any, ranks: Sequence[int], crowd: Crowd) -> None:
        self.vertices = vertices
        self.outside = outside_of(vertices)
        self._ids = {vertex.id for vertex in self.outside}
        self._ranks = ranks
        self._places = [*crowd.pythons, *crowd.guests]

    def labels(self, title: str) -> Iterator[bytes]:
        for vertex in self.outside:
            if vertex.index == 0:
                numbers = struct.pack("<II", vertex.id, vertex.replicas)
                yield _text(vertex.role) + numbers + _text(title)

    def topics(self) -> Iterator[bytes]:
        for publishers, subscribed in subscriptions(self.vertices).values():
            topic = subscribed[0].end.topic
            guests = [p for p in publishers if p in self._ids]
            hear = [s for s in subscribed if s.vertex in self._ids]
            if guests or hear:
                inside = [s for s in subscribed if s.vertex not in self._ids]
                yield (
                    _topic(topic) + _ranges(guests) + self._heard(inside) + self._hearing(hear)
                )

    def _heard(self, subscribed: Sequence[Subscription]) -> bytes:
        """Return the subscriptions of Python nodes to guests."""
        entries = []
        for each in subscribed:
            guests = [p for p in each.publishers if p in self._ids]
            if guests:
                head = struct.pack("<III", each.vertex, self._place(each.vertex), _aux(each))
                entries.append(head + _ranges(guests))
        return _listed(entries)

    def _hearing(self, subscribed: Sequence[Subscription]) -> bytes:
        """Return the subscriptions of guests, those alike together, and whom they hear."""
        entries: list[tuple[int, int, int, tuple[int, ...]]] = []
        for each in sorted(subscribed, key=lambda s: (_aux(s), s.vertex)):
            last = entries[-1] if entries else None
            alike = last is not None and last[2:] == (_aux(each), each.publishers)
            if last is not None and alike and last[1] + 1 == each.vertex:
                entries[-1] = (last[0], each.vertex, *last[2:])
            else:
                entries.append((each.vertex, each.vertex, _aux(each), each.publishers))
        speakers = sorted({p for each in subscribed for p in each.publishers})
        heads = [struct.pack("<III", *entry[:3]) + _ranges(entry[3]) for entry in entries]
        return _listed(heads) + _listed(
            struct.pack("<II", speaker, self._place(speaker)) for speaker in speakers
        )

    def services(self) -> Iterator[bytes]:
        for callers, meant in self._called(False):
            first = meant[0]
            methods = served_methods(first.node.callable, first.allow, first.title)  # type: ignore[arg-type]
            places = [struct.pack("<II", v.id, self._place(v.id)) for v in meant]
            names = [_text(name) + bytes((is_stream(m),)) for name, m in methods.items()]
            yield _text(first.role) + _ranges(callers) + _listed(places) + _listed(names)

    def servers(self) -> Iterator[bytes]:
        for callers, meant in self._called(True):
            yield _text(meant[0].role) + _ranges(callers)

    def _called(self, servers: bool) -> Iterator[tuple[list[int], list[Vertex]]]:
        """Yield what guests call, parameter servers or services, with those that do."""
        found: dict[tuple[int, ...], list[int]] = {}
        for vertex in self.outside:
            roles: dict[int, dict[int, None]] = {}
            for handle in vertex.node.calls:  # type: ignore[attr-defined]
                if (label_of(handle) is not None) == servers:
                    for other in _meant(handle, self.vertices):
                        roles.setdefault(other.role_index, {})[other.id] = None
            for ids in roles.values():
                found.setdefault(tuple(ids), []).append(vertex.id)
        for meant, callers in found.items():
            yield callers, [self.vertices[id] for id in meant]

    def _place(self, vertex: int) -> int:
        return self._places[self._ranks[vertex]]


def _meant(handle: Any, vertices: Any) -> list[Vertex]:
    """Return the nodes that a handle in `calls` means."""
    server = label_of(handle)
    if server is not None:
        return [vertices[id] for id in vertices.ids_of(server[1])]
    ids = vertices.ids_of(handle.role_index)
    if isinstance(handle, Handle):
        return [vertices[ids[handle.index]]]
    return [vertices[ids[i]] for i in handle.indices(len(ids))]


def _aux(each: Subscription) -> int:
    return each.end.topic.number << 16 | each.place


def _topic(topic: Topic) -> bytes:
    policy, n = 0, 1
    if isinstance(topic.policy, Keep):
        policy, n = (1 if topic.policy.on_full == BLOCK else 2), topic.policy.n
    rule = struct.pack("<IBBHI", topic.number, policy, topic.deliver == ROUND_ROBIN, 0, n)
    code, shape = 0, None
    if topic.array is not None:
        code, shape = DTYPES.index(topic.array.dtype), topic.array.shape
    lengths = [] if shape is None else [-1 if n is None else n for n in shape]
    form = struct.pack(
        f"<BB{len(lengths)}q", code, 255 if shape is None else len(lengths), *lengths
    )
    return _text(topic.name) + rule + form


def _bell(host: str, path: str, lines: Sequence[tuple[int, int]]) -> bytes:
    return _text(host) + _text(path) + _listed(struct.pack("<II", *line) for line in lines)


def _text(text: str) -> bytes:
    data = text.encode()[:65535]
    return struct.pack("<H", len(data)) + data


def _ranges(numbers: Iterable[int]) -> bytes:
    return _listed(struct.pack("<II", *pair) for pair in ranges(numbers))


def _listed(entries: Iterable[bytes]) -> bytes:
    found = list(entries)
    return b"".join((_U32.pack(len(found)), *found))
