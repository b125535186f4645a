"""Which arrays of a result nobody else can reach, so that sending them needs no copy.

Reference counts decide: from the result down, every tuple, list, dict and array on the way
must be held by its holder alone, and an array must own its memory. A view, a memoryview, a
closure, an attribute or a second place in the result is one reference more. When in doubt
the answer is no, and the array is copied.
"""

import sys
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

import numpy as np

__all__ = ["owned_arrays"]


def owned_arrays(root: Any, count: int) -> frozenset[int]:
    """Return the ids of the arrays in `root` that only `root` holds.

    Parameters
    ----------
    root
        The value that a method returned.
    count
        ``sys.getrefcount(root)`` as seen in a function that was called with `root` by
        another function that holds it in one local variable.

    Returns
    -------
    frozenset of int
        Ids of NumPy arrays; valid as long as `root` is.
    """
    found: set[int] = set()
    if count <= _ROOT:
        kind = type(root)
        if kind is np.ndarray:
            _note(root, found)
        elif kind is dict:
            _walk(root.values(), found)
        elif kind is tuple or kind is list:
            _walk(root, found)
    return frozenset(found)


def _walk(children: Any, found: set[int]) -> None:
    for child in children:
        kind = type(child)
        if kind is np.ndarray:
            if getrefcount(child) <= _CHILD:
                _note(child, found)
        elif (kind is dict or kind is tuple or kind is list) and getrefcount(child) <= _CHILD:
            _walk(child.values() if kind is dict else child, found)


def _note(array: "np.ndarray[Any, Any]", found: set[int]) -> None:
    # A weak reference counts nothing, but a cache can make a strong one of it.
    if array.flags.owndata and not getweakrefcount(array):
        found.add(id(array))


def _counts() -> tuple[int, int]:
    """Measure what `getrefcount` says of sole owners; versions of Python differ in it."""
    # From 3.14 on, and without the GIL, a call may borrow a reference without counting it.
    if sys.version_info >= (3, 14) or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return 0, 0

    def callee(value: Any, mode: int) -> int:
        return getrefcount(value)

    def child_count(children: Any) -> int:
        for child in children:
            count = getrefcount(child)
        return count

    result = [object()]
    return callee(result, 2), child_count(result)


_ROOT, _CHILD = _counts()
