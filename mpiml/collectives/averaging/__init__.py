"""Training that meets now and then: elastic averaging, local SGD, DiLoCo.

Names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpiml.later import refuse_attribute

if TYPE_CHECKING:
    from mpiml.collectives.averaging.diloco import DiLoCo
    from mpiml.collectives.averaging.elastic import (
        Elastic,
        elastic_difference,
        elastic_exchange,
    )
    from mpiml.collectives.averaging.elastic_async import AsyncElastic
    from mpiml.collectives.averaging.force import elastic_limit
    from mpiml.collectives.averaging.local import LocalSGD, PostLocalSGD

__all__ = [
    "AsyncElastic",
    "DiLoCo",
    "Elastic",
    "LocalSGD",
    "PostLocalSGD",
    "elastic_difference",
    "elastic_exchange",
    "elastic_limit",
]

_HOME = {
    "AsyncElastic": "elastic_async",
    "DiLoCo": "diloco",
    "Elastic": "elastic",
    "LocalSGD": "local",
    "PostLocalSGD": "local",
    "elastic_difference": "elastic",
    "elastic_exchange": "elastic",
    "elastic_limit": "force",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        refuse_attribute(name, "mpiml.collectives.averaging")
    value = getattr(import_module(f"mpiml.collectives.averaging.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
