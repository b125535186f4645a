"""Packages whose public names are loaded when they are first used: imports stay cheap."""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from sys import modules
from typing import Any

from mpiml.later import refuse_attribute

__all__ = ["lazily"]


def lazily(
    package: str, homes: Mapping[str, str], rooms: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Parameters
    ----------
    package : str
        Its ``__name__``.
    homes : dict of str to str
        By name, the module below the package that has it.
    rooms : collection of str
        Modules below the package that are public themselves.
    """

    def load(name: str) -> Any:
        if name in rooms:
            return import_module(f"{package}.{name}")
        home = homes.get(name)
        if home is None:
            refuse_attribute(name, package)
        value = getattr(import_module(f"{package}.{home}"), name)
        setattr(modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted(modules[package].__all__)

    return load, listed
