"""How handles are found in a node's arguments, and replaced by clients inside the node.

A handle given to a node is an edge of the graph. `find` lists the handles in a node's
arguments, `bind` puts what `resolve` returns in their places. Handles are found in lists,
tuples, named tuples, dicts (keys too), dataclass instances, subclasses of these, and in
`Deferred`, at any depth; shared and cyclic containers stay so.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from mpiml.errors import UsageError
from mpiml.references import Deferred, Handle, HandleSequence, Reference

__all__ = ["Deferred", "Handle", "HandleSequence", "Reference", "bind", "find", "walk"]

# Types that hold nothing: most of what a long argument holds, so they are skipped first.
_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_BUILDING: Final = object()


def find(obj: Any, root: str = "") -> Iterator[tuple[str, Reference]]:
    """List the handles in `obj`, with the path to each.

    Parameters
    ----------
    obj : object
        Containers at any depth.
    root : str
        What the paths begin with.

    Yields
    ------
    (path, handle)
        In the order they stand; what one container holds is listed once, however often
        that container occurs.
    """
    for path, value in walk(obj, root):
        if isinstance(value, (Handle, HandleSequence)):
            yield path, value


def walk(obj: Any, root: str = "") -> Iterator[tuple[str, Any]]:
    """List what stands in the containers of `obj`: handles, and objects that hold unknown."""
    seen: set[int] = set()
    stack: list[Iterator[tuple[str, Any]]] = [iter([(root, obj)])]
    while stack:
        for path, value in stack[-1]:
            if isinstance(value, (Handle, HandleSequence)):
                yield path, value
                continue
            parts = _parts(value, path)
            if parts is None:
                yield path, value
            elif id(value) not in seen:
                seen.add(id(value))
                stack.append(parts)
                break
        else:
            stack.pop()


def bind(obj: Any, resolve: Callable[[Reference], Any]) -> Any:
    """Replace each handle in `obj` by ``resolve(handle)`` and build each `Deferred`.

    Containers keep their types (also subclasses, with the attributes these have; a
    dataclass is copied without running its ``__post_init__``); one that holds neither a
    handle nor a `Deferred` is returned as it is, not copied. Shared and cyclic containers
    stay shared and cyclic.

    Parameters
    ----------
    obj : object
        Usually ``(node.args, node.kwargs)``.
    resolve : callable
        Handle or HandleSequence -> what takes its place.

    Raises
    ------
    UsageError
        The arguments of a `Deferred` hold that `Deferred`.
    """
    return _Binder(resolve, _holders(obj)).build(obj)


class _Binder:
    """One call of `bind`: what was built already, by the id of the original."""

    def __init__(self, resolve: Callable[[Reference], Any], holders: set[int]) -> None:
        self.resolve = resolve
        self.holders = holders
        self.built: dict[int, Any] = {}

    def build(self, value: Any) -> Any:
        if isinstance(value, (Handle, HandleSequence)):
            return self.resolve(value)
        key = id(value)
        if key not in self.holders:
            return value
        if key in self.built:
            if self.built[key] is _BUILDING:
                raise UsageError(f"{value!r}: its own arguments hold it, so it cannot be built")
            return self.built[key]
        if isinstance(value, Deferred):
            return self.deferred(value, key)
        if isinstance(value, tuple):
            return self.tuple(value, key)
        from copy import copy

        new = self.built[key] = copy(value)  # before its parts, which may hold it
        if isinstance(value, list):
            new[:] = [self.build(item) for item in value]
        elif isinstance(value, dict):
            new.clear()
            for name, item in value.items():
                new[self.build(name)] = self.build(item)
        else:
            for name, item in _fields(value):
                if id(item) in self.holders or isinstance(item, (Handle, HandleSequence)):
                    object.__setattr__(new, name, self.build(item))  # frozen ones too
        return new

    def deferred(self, value: Deferred, key: int) -> Any:
        self.built[key] = _BUILDING
        args = self.build(value.args)
        kwargs = self.build(value.kwargs)
        self.built[key] = value.cls(*args, **kwargs)
        return self.built[key]

    def tuple(self, value: tuple[Any, ...], key: int) -> Any:
        items = [self.build(item) for item in value]
        if key in self.built:  # a cycle through a list in it has built it meanwhile
            return self.built[key]
        cls = type(value)
        new = tuple(items) if cls is tuple else tuple.__new__(cls, items)
        if extra := getattr(value, "__dict__", None):
            new.__dict__.update(extra)
        self.built[key] = new
        return new


def _holders(obj: Any) -> set[int]:
    """Return the ids of the containers that hold a handle or a `Deferred` at any depth."""
    holders: set[int] = set()
    parents: dict[int, list[int]] = {id(obj): []}
    stack = [obj]
    while stack:
        value = stack.pop()
        if isinstance(value, Deferred):
            holders.add(id(value))
        for _, part in _parts(value, "") or ():
            if isinstance(part, (Handle, HandleSequence)):
                holders.add(id(value))
            elif id(part) in parents:
                parents[id(part)].append(id(value))
            elif _parts(part, "") is not None:
                parents[id(part)] = [id(value)]
                stack.append(part)
    rising = list(holders)
    while rising:
        for parent in parents[rising.pop()]:
            if parent not in holders:
                holders.add(parent)
                rising.append(parent)
    return holders


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]] | None:
    """Return what a container holds, plain values left out; None for what is no container."""
    if isinstance(value, dict):
        return _dict_parts(value, path)
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        if names is not None and len(names) == len(value):
            return ((f"{path}.{k}", v) for k, v in zip(names, value, strict=True))
        return _item_parts(value, path)
    if isinstance(value, list):
        return _item_parts(value, path)
    if isinstance(value, Deferred):
        return _deferred_parts(value, path)
    if hasattr(type(value), "__dataclass_fields__"):
        return ((f"{path}.{name}", item) for name, item in _fields(value))
    return None


def _item_parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    return ((f"{path}[{i}]", item) for i, item in enumerate(value) if type(item) not in _PLAIN)


def _dict_parts(value: dict[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if type(key) not in _PLAIN:
            yield f"{path}.keys()", key
        if type(item) not in _PLAIN:
            name = repr(key) if type(key) in _PLAIN else type(key).__name__
            yield f"{path}[{name}]", item


def _deferred_parts(value: Deferred, path: str) -> Iterator[tuple[str, Any]]:
    yield f"{path}.args", value.args
    yield f"{path}.kwargs", value.kwargs


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the fields of a dataclass instance that are set and not plain."""
    from dataclasses import fields  # loaded already, or there were no dataclass

    for field in fields(value):
        item = getattr(value, field.name, None)
        if type(item) not in _PLAIN:
            yield field.name, item
