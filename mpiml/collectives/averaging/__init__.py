"""Training that meets now and then: elastic averaging, local SGD, DiLoCo.

Names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from mpiml.lazily import lazily

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

__getattr__, __dir__ = lazily(__name__, _HOME)
