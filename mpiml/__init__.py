"""mpiml: distributed machine-learning programs as graphs of role nodes, on MPI.

Names are loaded when they are first used, so that ``import mpiml`` takes little more time than
``import numpy`` and starts no MPI.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiml.batching import batched
    from mpiml.context import Context, context
    from mpiml.digest import stable_hash
    from mpiml.errors import (
        DeadlineError,
        GraphMismatchError,
        MpimlError,
        PlacementError,
        RankFailedError,
        RemoteError,
        ServiceGoneError,
        Stopped,
        UnknownMethodError,
        UsageError,
    )
    from mpiml.external.node import ExternalNode
    from mpiml.external.specs import Array
    from mpiml.futures import Future, gather, wait
    from mpiml.launch import Result, attach, launch
    from mpiml.nodes import Colocation, PyClassNode, PyNode, ServiceNode
    from mpiml.payload import give
    from mpiml.polling import poll
    from mpiml.program import Placement, Program
    from mpiml.readiness import wait_until_ready
    from mpiml.references import Deferred, Handle
    from mpiml.roles.cacher import CacherNode
    from mpiml.settings import FILL
    from mpiml.topics.policy import Keep

__version__ = "0.1.0"

__all__ = [
    "FILL",
    "Array",
    "CacherNode",
    "Colocation",
    "Context",
    "DeadlineError",
    "Deferred",
    "ExternalNode",
    "Future",
    "GraphMismatchError",
    "Handle",
    "Keep",
    "Keys",
    "MpimlError",
    "ParameterServerNode",
    "Placement",
    "PlacementError",
    "Program",
    "PyClassNode",
    "PyNode",
    "RankFailedError",
    "RemoteError",
    "Result",
    "ServiceGoneError",
    "ServiceNode",
    "Stopped",
    "UnknownMethodError",
    "UsageError",
    "attach",
    "batched",
    "context",
    "gather",
    "give",
    "launch",
    "poll",
    "stable_hash",
    "wait",
    "wait_until_ready",
]

_HOME = {
    "FILL": "settings",
    "Array": "external.specs",
    "CacherNode": "roles.cacher",
    "Colocation": "nodes",
    "Context": "context",
    "Deferred": "references",
    "ExternalNode": "external.node",
    "Future": "futures",
    "Handle": "references",
    "Keep": "topics.policy",
    "Keys": "roles.parameter_server.keys",
    "Placement": "program",
    "Program": "program",
    "ParameterServerNode": "roles.parameter_server.node",
    "PyClassNode": "nodes",
    "PyNode": "nodes",
    "Result": "launch",
    "ServiceNode": "nodes",
    "attach": "launch",
    "batched": "batching",
    "context": "context",
    "gather": "futures",
    "give": "payload",
    "launch": "launch",
    "poll": "polling",
    "stable_hash": "digest",
    "wait": "futures",
    "wait_until_ready": "readiness",
}
_ROOMS = (
    "collectives", "consistency", "datasets", "filters", "jax", "optim", "roles", "testing",
    "topology", "torch",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None and name in __all__:
        home = "errors"
    if home is not None:
        value = getattr(import_module(f"mpiml.{home}"), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return import_module(f"mpiml.{name}")
    from mpiml.later import refuse_attribute

    refuse_attribute(name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Importing the submodule `mpiml.launch` leaves ``mpiml.launch`` the function, and so on."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in __all__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
