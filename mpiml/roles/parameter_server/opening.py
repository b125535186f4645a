"""Which client a node gets of a parameter server: one, however often it asks, a worker or a reader."""

import threading
from collections.abc import Sequence
from typing import Any

from mpiml.roles.parameter_server.client import ParameterClient
from mpiml.roles.parameter_server.holding import Hold, workers_of
from mpiml.scope import current_scope

__all__ = ["client_of", "open_client"]

_making = threading.Lock()


def open_client(shards: Sequence[Any], hold: Hold) -> ParameterClient:
    """Return the client of a node that holds a handle: one, however often it holds it.

    Local: called where the arguments of the node are built.
    """
    scope = current_scope()
    assert scope is not None
    return _client(shards, hold.node, scope.owner, hold.reads)


def client_of(shards: Sequence[Any], server: Any, node: Any) -> ParameterClient:
    """Return the client of a node, which only reads unless the node holds the handle. Local.

    `node` is None for code around the program, which reads.
    """
    if node is None:
        return ParameterClient(shards, _Outside(), None, server.settings)
    workers = workers_of(node.runtime.vertices, server)
    return _client(shards, server, node, node.vertex not in workers)


class _Outside:
    """Stands for a node where there is none."""

    vertex, title = -1, "the code around the program"


def _client(shards: Sequence[Any], server: Any, node: Any, reads: bool) -> ParameterClient:
    worker = None if reads else workers_of(node.runtime.vertices, server)[node.vertex]
    with _making:
        # with the node, and not in a table of all nodes: a client holds its node
        known = node.__dict__.setdefault("parameter_clients", {})
        if (id(server), reads) not in known:
            known[id(server), reads] = ParameterClient(shards, node, worker, server.settings)
        found: ParameterClient = known[id(server), reads]
        return found
