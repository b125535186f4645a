"""The parameter server: arrays on server ranks, which workers pull from and push to.

Names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiml.roles.parameter_server.client import ParameterClient
    from mpiml.roles.parameter_server.downpour import Downpour
    from mpiml.roles.parameter_server.keys import Keys
    from mpiml.roles.parameter_server.node import ParameterHandle, ParameterServerNode

__all__ = ["Downpour", "Keys", "ParameterClient", "ParameterHandle", "ParameterServerNode"]

_HOME = {
    "Downpour": "downpour",
    "Keys": "keys",
    "ParameterClient": "client",
    "ParameterHandle": "node",
    "ParameterServerNode": "node",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        from mpiml.later import refuse_attribute

        refuse_attribute(name, "mpiml.roles.parameter_server")
    value = getattr(import_module(f"mpiml.roles.parameter_server.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
