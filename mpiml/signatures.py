"""Whether a function takes certain arguments, found out without `inspect` where that is plain.

`inspect` and what it imports take 7 ms, which each rank would pay to check one call.
"""

from collections.abc import Collection
from types import FunctionType
from typing import Any, Final

__all__ = ["accepts"]

_VARARGS: Final = 0x04  # inspect.CO_VARARGS


def accepts(function: Any, args: Collection[Any], names: Collection[str]) -> bool:
    """Return whether `function` takes these arguments for certain.

    Parameters
    ----------
    function : callable
        Decided are plain functions and classes of plain constructors; not what is wrapped or
        says its own signature.
    args : collection
        The positional arguments.
    names : collection of str
        Names of the others.

    Returns
    -------
    bool
        False: `inspect` may still find that it does.
    """
    count = len(args)
    if isinstance(function, type):
        cls: Any = function
        if cls.__new__ is not object.__new__ or type(cls) is not type:
            return False
        if hasattr(cls, "__signature__"):
            return False
        function = cls.__init__  # type: ignore[misc] # that of the class itself
        if function is object.__init__:
            return not count and not names
        count += 1  # self
    if type(function) is not FunctionType or vars(function):  # __wrapped__, __signature__
        return False
    return _fits(function, count, set(names))


def _fits(function: FunctionType, count: int, names: set[str]) -> bool:
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    keyword_only = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    optional = len(function.__defaults__ or ())
    needed = set(positional[count : code.co_argcount - optional])
    needed.update(set(keyword_only).difference(function.__kwdefaults__ or ()))
    free = {*positional[max(count, code.co_posonlyargcount) :], *keyword_only}
    room = count <= code.co_argcount or code.co_flags & _VARARGS
    return bool(room) and needed <= names <= free
