"""Values and code as text that is the same in every process: no addresses, ids or hash order.

What `mpiml.digest` compares between ranks, and the bytes under `stable_hash`.
"""

import functools
import os
import sys
import types
from enum import Enum
from typing import Any, Final

from mpiml.handles import Deferred, Handle, HandleSequence
from mpiml.topics.graph import End

__all__ = ["Describer", "own_path", "sha256"]

try:  # the module behind hashlib: hashlib itself loads OpenSSL, 3 ms on each rank
    from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore] # Python 3.12
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from hashlib import sha256

_LONG: Final = 400  # characters; longer text is cut and hashed
_FUNCTIONS: Final = (
    type,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
)
_STDLIB: Final = os.path.dirname(os.__file__)


class Describer:
    """Describes values; remembers the code it has hashed.

    Parameters
    ----------
    folder : str, optional
        Of the program's file. Classes outside it count by name only; without it, those of
        the standard library and of installed packages do.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._open: set[int] = set()  # what is being described: cycles end there
        self._hashes: dict[int, str] = {}  # of functions and classes, by id
        self._codes: dict[types.CodeType, str] = {}
        self._modules: dict[str, bool] = {}
        self._ends: dict[End, int] = {}  # of topics, in the order in which they were met

    def text(self, value: Any) -> str:
        """Return `value` as text: plain values by value, other objects by type and shape."""
        text = self._text(value)
        if len(text) <= _LONG:
            return text
        return (
            f"{text[: _LONG // 2]}... sha256 {_hex(text.encode('utf-8', 'backslashreplace'))}"
        )

    def callable(self, function: Any) -> str:
        """Return the name of a function or class, and a hash of its code."""
        if isinstance(function, type):
            return f"class {_qualified(function)} {self._class_code(function)}".rstrip()
        if isinstance(function, types.FunctionType):
            return f"function {_qualified(function)} {self._function_code(function)}"
        if isinstance(function, types.MethodType):
            return f"method of {_type(function.__self__)}: {self.callable(function.__func__)}"
        if isinstance(function, functools.partial):
            return (
                f"partial({self._text(function.func)}, {self._text(function.args)}, "
                f"{self._text(function.keywords)})"
            )
        if isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)):
            return f"builtin {_qualified(function)}"
        wrapped = getattr(function, "__wrapped__", None)  # as of functools.cache
        inner = f" of {self._text(wrapped)}" if callable(wrapped) else ""
        return f"{_type(function)} {self._class_code(type(function))}".rstrip() + inner

    def own(self, module: str) -> bool:
        """Tell whether a module is the user's: below the folder, or not an installed one."""
        if module not in self._modules:
            found = sys.modules.get(module)
            path = getattr(found, "__dict__", {}).get("__file__")
            self._modules[module] = own_path(path, self.folder) if path else found is not None
            if module.partition(".")[0] in ("mpiml", "builtins"):
                self._modules[module] = False
        return self._modules[module]

    def _text(self, value: Any) -> str:
        cls = type(value)
        if value is None or cls in (bool, int, float, complex, str, range, type(...)):
            return repr(value)
        if cls in (bytes, bytearray):
            return repr(value) if len(value) <= _LONG else f"{_type(value)} {_hex(value)}"
        if isinstance(value, Enum):
            return f"{_qualified(cls)}.{value.name}"
        for base in (bool, int, float, complex, str, bytes):
            if isinstance(value, base) and not hasattr(value, "dtype"):
                return f"{_type(value)}({base.__repr__(value)})"
        if isinstance(value, os.PathLike):
            return f"{_type(value)}({os.fspath(value)!r})"
        if isinstance(value, (Handle, HandleSequence)):
            return _reference(value)
        if _is_function(value):
            return self.callable(value)
        if id(value) in self._open:
            return "<cycle>"
        self._open.add(id(value))
        try:
            return self._composed(value)
        finally:
            self._open.discard(id(value))

    def _composed(self, value: Any) -> str:
        """Return what is made of other values, or is known by its type only."""
        text = self._text
        if isinstance(value, (list, tuple)):
            return f"{_type(value)}[{', '.join([text(item) for item in value])}]"
        if isinstance(value, (set, frozenset)):
            names = sorted([_qualified(v) if _is_function(v) else text(v) for v in value])
            return f"{_type(value)}{{{', '.join(names)}}}"
        if isinstance(value, dict):  # its order may come from a set
            items = sorted([f"{text(key)}: {text(item)}" for key, item in value.items()])
            return f"{_type(value)}{{{', '.join(items)}}}"
        if isinstance(value, Deferred):
            if value.args and isinstance(value.args[0], End):
                return text(value.args[0])
            return f"Deferred({text(value.cls)}, {text(value.args)}, {text(value.kwargs)})"
        if isinstance(value, End):
            what = (
                "publisher" if value.publishes else f"subscriber, source {text(value.source)}"
            )
            # one that is given twice is one place in its node, two alike are two
            number = self._ends.setdefault(value, len(self._ends))
            return f"{value.topic!r}: {what}, end {number}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if hasattr(type(value), "__dataclass_fields__"):
            names = type(value).__dataclass_fields__
            fields = [f"{name}={text(getattr(value, name, None))}" for name in names]
            return f"{_type(value)}({', '.join(fields)})"
        return self._shaped(value)

    def _shaped(self, value: Any) -> str:
        """Return the type of an object, with shape and dtype where it has them."""
        numpy = sys.modules.get("numpy")
        if (
            numpy is not None
            and isinstance(value, numpy.generic)
            and value.dtype.kind in "biufcSU"
        ):
            return f"{_type(value)}({value.item()!r})"
        try:
            text = f"{_type(value)} {tuple(value.shape)} {value.dtype}"
        except Exception:  # it has none, or a property raises anything
            return _type(value)
        return _type(value) if " at 0x" in text else text

    def _function_code(self, function: types.FunctionType) -> str:
        key = id(function)
        if key in self._hashes or key in self._open:
            return self._hashes.get(key, "<cycle>")
        self._open.add(key)
        try:
            parts = [self._code(function.__code__)]
            for cell in function.__closure__ or ():
                try:
                    parts.append(self._text(cell.cell_contents))
                except ValueError:  # assigned later, or never
                    parts.append("<empty>")
            parts.append(self._text(function.__defaults__))
            parts.append(self._text(function.__kwdefaults__))
        finally:
            self._open.discard(key)
        self._hashes[key] = _joined(parts)
        return self._hashes[key]

    def _class_code(self, cls: type) -> str:
        """Return a hash of the methods and plain attributes of a class and its own bases."""
        key = id(cls)
        if key in self._hashes or key in self._open:
            return self._hashes.get(key, "<cycle>")
        self._open.add(key)
        parts: list[str] = []
        for base in cls.__mro__:
            if base is not cls and base is not object:
                parts.append(_qualified(base))
            if self.own(base.__module__):
                parts.extend(self._attributes(base))
        self._open.discard(key)
        self._hashes[key] = _joined(parts) if parts else ""
        return self._hashes[key]

    def _attributes(self, cls: type) -> list[str]:
        found = []
        for name, value in list(cls.__dict__.items()):
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            if isinstance(value, types.FunctionType):
                found.append(f"{name}: {self._function_code(value)}")
            elif not name.startswith("__") and _is_plain(value):
                found.append(f"{name}={self._text(value)}")
        return sorted(found)

    def _code(self, code: types.CodeType) -> str:
        """Return a hash of what a code object does; not of its file, lines or addresses."""
        if code not in self._codes:
            parts = [
                code.co_name,
                code.co_code.hex(),
                " ".join(code.co_names),
                " ".join(code.co_varnames),
                " ".join(code.co_freevars),
                f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}",
                str(code.co_flags),
                *map(self._constant, code.co_consts),
            ]
            self._codes[code] = _joined(parts)
        return self._codes[code]

    def _constant(self, constant: Any) -> str:
        return (
            self._code(constant)
            if isinstance(constant, types.CodeType)
            else self._text(constant)
        )


def own_path(path: str, folder: str | None) -> bool:
    """Tell whether a source is the user's: below `folder`, and not of an installed package."""
    if "site-packages" in path or "dist-packages" in path or path.startswith(_STDLIB + os.sep):
        return False
    return folder is None or path.startswith(folder.rstrip(os.sep) + os.sep)


def _reference(value: Handle | HandleSequence) -> str:
    if isinstance(value, Handle):
        return f"handle {value.role}/{value.index}"
    return f"handles {value.text()}"


def _is_function(value: Any) -> bool:
    return isinstance(value, _FUNCTIONS)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, complex, str, bytes, tuple)


def _type(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else _qualified(cls)


def _qualified(named: Any) -> str:
    module = getattr(named, "__module__", None) or "?"
    name = getattr(named, "__qualname__", None) or getattr(named, "__name__", "?")
    return f"{module}.{name}"


def _joined(parts: list[str]) -> str:
    return _hex("\0".join(parts).encode("utf-8", "backslashreplace"))


def _hex(data: bytes | bytearray) -> str:
    return str(sha256(data).hexdigest()[:16])
