"""Names the contract promises and this release does not have: refused by name, never ignored."""

import sys
from typing import NoReturn

from mpiml.errors import UsageError

__all__ = ["LATER", "refuse", "refuse_attribute"]

_SERVICES = "services"
_CLUSTER = "cluster"
_TASKS = "tasks"
_FAULT = "fault"

#: name -> (how a user spells it, the release that brings it)
LATER: dict[str, tuple[str, str]] = {
    "CacherNode": ("mpiml.CacherNode", _SERVICES),
    "ParameterServerNode": ("mpiml.ParameterServerNode", _SERVICES),
    "ReplayNode": ("mpiml.ReplayNode", _SERVICES),
    "Keep": ("mpiml.Keep", _SERVICES),
    "consistency": ("mpiml.consistency", _SERVICES),
    "Program.topic": ("Program.topic()", _SERVICES),
    "ExternalNode": ("mpiml.ExternalNode", _CLUSTER),
    "poll": ("mpiml.poll", _CLUSTER),
    "tasks": ("mpiml.tasks", _TASKS),
    "TaskPoolNode": ("mpiml.TaskPoolNode", _TASKS),
    "checkpoint": ("mpiml.checkpoint", _FAULT),
    "scatter": ("clients.scatter", _SERVICES),
    "least_loaded": ("clients.least_loaded", _SERVICES),
    "reduced": ("clients.reduced", _SERVICES),
    "on_failure": ("add_node(on_failure=)", _FAULT),
    "durable": ("add_node(durable=True)", _FAULT),
    "spares": ("--spares", _FAULT),
    "resume": ("--resume", _FAULT),
}


class _LaterError(UsageError, AttributeError):
    """A name of a later release; an AttributeError too, so that `hasattr` is False."""


class _LaterImportError(UsageError, ImportError):
    """The same under ``from mpiml import name``, where an AttributeError loses its text."""


def refuse(name: str, spelling: str | None = None) -> NoReturn:
    """Raise the error that says which release brings `name`.

    Parameters
    ----------
    name : str
        A key of `LATER`.
    spelling : str, optional
        How the user wrote it, where that is more exact than the table's spelling.

    Raises
    ------
    UsageError
        Always; also an AttributeError, or an ImportError where an import statement asks.
    """
    shown, release = LATER[name]
    message = f"{spelling or shown} comes with the {release} release"
    raise (_LaterImportError if _importing() else _LaterError)(message)


def refuse_attribute(name: str, module: str = "mpiml") -> NoReturn:
    """Raise what a missing attribute of `module` raises, or say which release brings it."""
    if name in LATER:
        refuse(name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _importing() -> bool:
    """Tell whether ``from mpiml import name`` asks, by way of the module's ``__getattr__``.

    The import statement turns an AttributeError into "cannot import name", without our
    text, and lets any other error through.
    """
    frame = sys._getframe(2)  # past _importing and refuse
    for _ in range(3):  # __getattr__, perhaps by way of a helper, then who asks
        if frame.f_code.co_name == "_handle_fromlist":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
