"""Collective operations on arrays; they come with the collectives release."""

from typing import Any

from mpiml.later import refuse_attribute

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    refuse_attribute(name, "mpiml.collectives")
