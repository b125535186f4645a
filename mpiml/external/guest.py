"""What stands in a Python rank for a node that is a rank of another program."""

from functools import partial
from typing import Any

from mpiml.control import STUCK, Note
from mpiml.external.codes import shortened
from mpiml.external.encoding import Named
from mpiml.external.node import label_of
from mpiml.graph import Vertex
from mpiml.hosting import FAILED, RETURNED, STOPPED, HostedNode
from mpiml.wire import STOP

__all__ = ["GuestNode"]

_HOW = (RETURNED, STOPPED, FAILED)
_VERSION = "@version"


class GuestNode(HostedNode):
    """A guest, as the program sees it, on the rank that keeps it. Local.

    It is a body that nothing is run for: it has returned when the guest has left. It passes a
    stop on to the guest, answers those who wait for its end, and is the worker of parameter
    servers on its behalf.

    Parameters
    ----------
    runtime
        The program on this rank.
    vertex : Vertex
        The node.
    rank : int
        The guest's, behind those of Python ranks.
    """

    outside = True

    def __init__(self, runtime: Any, vertex: Vertex, rank: int) -> None:
        super().__init__(runtime, vertex)
        self.rank = rank

    def open_servers(self) -> None:
        """Be a worker of the parameter servers that the guest was given. Sends nothing."""
        for handle in self.spec.node.calls:  # type: ignore[attr-defined]
            found = label_of(handle)
            if found is not None:
                client = self.runtime.clients(found[0], self)
                for name, method in (("pull", _pull), ("push", _push)):
                    self.server.methods[f"{name}:{found[0]}".encode()] = partial(method, client)

    def stop(self, at_once: bool) -> None:
        """Tell the guest of the stop: its next call sees it."""
        note = self.runtime.ending.note or Note(STUCK, 1, self.vertex, 0, "mpiml itself failed")
        told = Note(note.reason, note.status, note.vertex, note.rank, shortened(note.text))
        engine = self.runtime.engine
        engine.transmit(self.rank, STOP, engine.rank, self.vertex, body=told.pack())

    def went(self, how: int) -> None:
        """Note that the guest has left: by itself, stopped, or failed. Waits for nothing."""
        if not self.returned:
            self.how = _HOW[min(how, 2)]
            self.leave(None)
            self._left()


def _pull(client: Any, names: dict[str, Any]) -> Named:
    """Return arrays of a tree of parameters by their paths, and their version."""
    import numpy as np

    arrays, version = client.pull_paths(list(names))
    found = Named(zip(names, arrays, strict=True))
    found[_VERSION] = np.int64(version)
    return found


def _push(client: Any, named: dict[str, Any]) -> bool:
    """Push gradients by their paths; return whether they are used."""
    version = int(named.pop(_VERSION))
    return bool(client.push_paths(named, version))
