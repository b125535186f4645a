"""What the user has said about a parameter server; the same on all ranks."""

from typing import Any, NamedTuple

from mpiml.consistency import Consistency

__all__ = ["Settings"]


class Settings(NamedTuple):
    """See `mpiml.ParameterServerNode`."""

    init: Any
    optimizer: Any
    consistency: Consistency
    shards: int
    nonfinite: str
    push_filters: tuple[Any, ...]
    pull_filters: tuple[Any, ...]
    encode: Any
    decode: Any
