"""Who holds the handle of a parameter server: known from the graph, on every rank."""

from collections.abc import Iterator, Sequence
from typing import Any

from mpiml.graph import Vertex, arguments
from mpiml.handles import walk

__all__ = ["Hold", "holders_of", "workers_of"]


class Hold:
    """Marks the arguments of a node that holds the handle. Local; the same on all ranks.

    Attributes
    ----------
    node
        The `ParameterServerNode`.
    reads
        Whether it only reads, and so is no worker.
    """

    __slots__ = ("node", "reads")

    def __init__(self, node: Any, reads: bool) -> None:
        self.node = node
        self.reads = reads

    def hold_for(self, runtime: Any, node: Any) -> None:
        """Make the client of a node whose arguments nobody builds: it must leave when it ends."""
        role = next(v.role for v in runtime.vertices if v.node is self.node)
        runtime.clients(role, node)

    def __repr__(self) -> str:
        return f"Hold(reads={self.reads})"  # stands in the digest of the graph


def holders_of(vertices: Sequence[Vertex], node: Any) -> Iterator[tuple[int, bool]]:
    """Yield the vertices that hold a handle of `node`, and whether all of theirs only read."""
    known: dict[int, list[Hold]] = {}  # by node: the replicas of a role share it
    for vertex in vertices:
        holds = known.get(id(vertex.node))
        if holds is None:
            holds = known[id(vertex.node)] = [
                value
                for root, argument in arguments(vertex.node)
                for _, value in walk(argument, root)
                if type(value) is Hold and value.node is node
            ]
        if holds:
            yield vertex.id, all(hold.reads for hold in holds)


def workers_of(vertices: Sequence[Vertex], node: Any) -> dict[int, int]:
    """Return the number of each worker, by its vertex."""
    workers = [vertex for vertex, reads in holders_of(vertices, node) if not reads]
    return {vertex: number for number, vertex in enumerate(workers)}
