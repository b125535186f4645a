"""Handles where they cannot be replaced: closures, partials, sets, plain objects.

`mpiml.handles.bind` looks into containers only. A handle elsewhere would stay a handle
inside the node and fail at its first use, so `Program.check` asks `hidden` before launch.
"""

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from mpiml.handles import Handle, HandleSequence, Reference, find, walk

__all__ = ["Hidden", "hidden"]

_DEPTH: Final = 2  # a decorated function is a closure in a closure; deeper ones fail at use


class Hidden(NamedTuple):
    """A handle that `bind` would miss."""

    path: str
    """Where it stands, as in ``argument 0, closure variable 'counter'``."""
    container: str
    """What hides it, as in ``the closure of work``."""
    handle: Reference


def hidden(obj: Any, root: str = "") -> list[Hidden]:
    """List the handles in `obj` that stand where they cannot be found.

    Parameters
    ----------
    obj : object
        A function, an argument, or a container of arguments.
    root : str
        What the paths begin with.
    """
    return list(_hidden(obj, root, _DEPTH, set()))


def _hidden(obj: Any, root: str, depth: int, seen: set[int]) -> Iterator[Hidden]:
    for path, value in walk(obj, root):
        if id(value) in seen:
            continue
        seen.add(id(value))
        for where, container, part in _inside(value, path):
            for deeper, handle in find(part, where):
                yield Hidden(deeper, container, handle)
            if depth > 1:
                yield from _hidden(part, where, depth - 1, seen)


def _inside(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield what `value`, no container, is known to hold: path, kind of hiding place, part."""
    if isinstance(value, types.FunctionType):
        yield from _inside_function(value, path)
    elif isinstance(value, types.MethodType):
        yield (
            f"{path}.__self__",
            f"the object of the bound method {_name(value)}",
            value.__self__,
        )
        yield from _inside_function(value.__func__, path)
    elif isinstance(value, functools.partial):
        kind = f"a functools.partial of {_name(value.func)}"
        yield f"{path}.func", kind, value.func
        yield f"{path}.args", kind, value.args
        yield f"{path}.keywords", kind, value.keywords
    elif isinstance(value, (set, frozenset, deque)):
        kind = f"a {type(value).__name__}"
        for member in value:  # any order: a handle is named, not numbered
            yield f"{path} member", kind, member
    elif _is_object_array(value):
        kind = f"a {type(value).__name__} of objects"
        yield from ((f"{path}[{i}]", kind, item) for i, item in enumerate(value.ravel()))
    elif isinstance(value, type):
        yield from _inside_class(value, path)
    elif not isinstance(value, types.ModuleType):
        yield from _inside_object(value, path)


def _inside_function(function: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    if not isinstance(function, types.FunctionType):
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            content = cell.cell_contents
        except ValueError:  # assigned later, or never
            continue
        yield f"{path} closure variable {name!r}", f"the closure of {_name(function)}", content
    kind = f"a default argument of {_name(function)}"
    for i, default in enumerate(function.__defaults__ or ()):
        yield f"{path} default {i}", kind, default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"{path} default {name!r}", kind, default


def _inside_class(cls: type, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield what methods close over: a class made inside `build` sees its variables."""
    for base in cls.__mro__:
        for name, part in list(base.__dict__.items()):
            if isinstance(part, types.FunctionType):
                yield from _inside_function(part, f"{path}.{name}")
            elif isinstance(part, (Handle, HandleSequence)):
                yield f"{path}.{name}", f"an attribute of the class {base.__qualname__}", part


def _inside_object(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    cls = type(value)
    if cls.__module__.partition(".")[0] in ("mpiml", "builtins"):
        return  # a program or node given as an argument holds its own handles
    kind = f"an attribute of a plain object ({cls.__qualname__})"
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f"{path}.{name}", kind, part) for name, part in list(attributes.items()))
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"{path}.{name}", kind, getattr(value, name, None)


def _is_object_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype == object


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
