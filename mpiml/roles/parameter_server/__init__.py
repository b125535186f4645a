"""The parameter server: arrays on server ranks, which workers pull from and push to.

Names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from mpiml.lazily import lazily

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

__getattr__, __dir__ = lazily(__name__, _HOME)
