"""Ready-made services as plain classes, and the policies they rest on.

Names are loaded when they are first used: placing a program needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiml.roles.barrier import Barrier
    from mpiml.roles.counter import Counter

__all__ = ["Barrier", "Counter"]

_HOME = {"Barrier": "barrier", "Counter": "counter"}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        from mpiml.later import refuse_attribute

        refuse_attribute(name, "mpiml.roles")
    value = getattr(import_module(f"mpiml.roles.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
