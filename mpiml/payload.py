"""The values of calls as bytes and buffers, and back. Local: nothing here touches MPI.

`pack` makes of a value a body (bytes) and buffers (memory of large arrays and bytes, that
may travel without a copy); `unpack` makes the value of them again. The ways of a value,
cheapest first:

==========  ==================================================================
ENC_NONE    None, or no arguments: no body
ENC_TEXT    a str: UTF-8
ENC_PICKLE  plain values: pickle, protocol 5
ENC_FLAT    small arrays among plain values: pickle of a flat list
ENC_PICKLE  the rest: a pickler with reductions of our own, then cloudpickle
ENC_ARRAYS  arrays and names, for C and Fortran: see `mpiml.external`
==========  ==================================================================

The mode says what the buffers are. BORROW: the sender's memory; it must not change before
the message has left. SNAPSHOT: copies, except inside `give`. RESULT: copies, except inside
`give` and of arrays that only the result holds (see `mpiml.payload_owned`).

Everything arrives writable and owned by the receiver, provided the buffers given to
`unpack` are; arrays wrap them without a copy. Read-only ones are copied.
"""

from collections.abc import Callable, Collection, Sequence
from pickle import dumps, loads
from sys import getrefcount
from typing import Any, NamedTuple

from mpiml.errors import UsageError
from mpiml.libraries import foreign_loaded
from mpiml.payload_errors import dump_error, load_error, refusal
from mpiml.payload_memory import take
from mpiml.payload_pickler import LARGE, Blob, Given, arrays_known, careful

__all__ = [
    "BORROW",
    "ENC_ARRAYS",
    "ENC_FLAT",
    "ENC_NONE",
    "ENC_PICKLE",
    "ENC_TEXT",
    "RESULT",
    "SNAPSHOT",
    "Given",
    "Packed",
    "give",
    "pack",
    "pack_call",
    "pack_error",
    "take",
    "unpack",
    "unpack_call",
    "unpack_error",
]

BORROW = 0
SNAPSHOT = 1
RESULT = 2

ENC_NONE = 0
ENC_PICKLE = 1
ENC_ARRAYS = 2
ENC_TEXT = 3
ENC_FLAT = 4

_ATOMS = frozenset((int, float, str, bool, complex, type(None)))
_FEW = 32  # up to so many items are looked at one by one before pickle is asked
_NOTHING: frozenset[int] = frozenset()

# NumPy's types come with `_meet_arrays`: before it is loaded no value can be one of them.
_WITH_CODE: frozenset[type] = frozenset()
_ARRAYS: frozenset[type] = frozenset((Given, memoryview))
_SPECIAL: frozenset[type] = _ARRAYS | {bytes, bytearray, dict, list}


class Packed(NamedTuple):
    """A value on its way: how the body is encoded, the body, and large memory beside it.

    Each of `buffers` is a contiguous memoryview of format "B"; some are read-only.
    """

    encoding: int
    body: bytes
    buffers: list[memoryview]


# Packed(...) takes twice the time.
_new: Callable[[type[Packed], tuple[int, bytes, list[memoryview]]], Packed] = tuple.__new__


def give(value: Any) -> Any:
    """Mark an argument or result as not changed any more until it has arrived.

    Its memory is then sent as it is, at any depth of the value, where a copy would have been
    made; the receiver gets the value itself.

    Parameters
    ----------
    value
        Usually an array, or a tree of arrays.
    """
    return Given(value)


def pack(value: Any, mode: int = SNAPSHOT, what: str = "the argument") -> Packed:
    """Encode one value.

    For RESULT, call it with the result in exactly one local variable of the caller:
    references are counted, and one more makes it copy.

    Parameters
    ----------
    value
        Anything that pickle or cloudpickle takes, or an array of `mpiml.arrays`.
    mode
        BORROW, SNAPSHOT or RESULT.
    what
        The name of the value in an error message.

    Raises
    ------
    UsageError
        A part of the value cannot be pickled; the message names that part.
    """
    count = getrefcount(value)
    kind = type(value)
    if value is None:
        return _new(Packed, (ENC_NONE, b"", []))
    if kind is str:
        try:
            return _new(Packed, (ENC_TEXT, value.encode(), []))
        except UnicodeEncodeError:  # lone surrogates, which pickle takes
            return _new(Packed, (ENC_PICKLE, dumps(value, 5), []))
    if kind in _ATOMS or (kind is bytes and len(value) < LARGE):
        return _new(Packed, (ENC_PICKLE, dumps(value, 5), []))
    if kind is tuple and len(value) <= _FEW and _ATOMS.issuperset(map(type, value)):
        return _new(Packed, (ENC_PICKLE, dumps(value, 5), []))
    if not _WITH_CODE:
        _meet_arrays()
    packed = _flat_one(value) if kind in _WITH_CODE else _simple(value, kind)
    if packed is not None:
        return packed
    owned = _owned(value, count) if mode == RESULT and _WITH_CODE else _NOTHING
    seen: dict[int, Blob] = {}
    blobs = tuple([_blob(v, seen) for v in value]) if kind is tuple else _blob(value, seen)
    try:
        return _new(Packed, (ENC_PICKLE, *careful(blobs, mode == BORROW, owned)))
    except MemoryError:
        raise
    except Exception as error:  # any: what the user's __reduce__ raises
        raise refusal(value, what, error) from error


def unpack(encoding: int, body: Any, buffers: Sequence[Any] = ()) -> Any:
    """Decode what `pack` encoded.

    Parameters
    ----------
    encoding, body, buffers
        As packed. Arrays wrap the buffers, so these belong to the value from now on;
        read-only ones are copied.
    """
    if encoding == ENC_PICKLE:
        return loads(body, buffers=buffers) if buffers else loads(body)
    if encoding == ENC_NONE:
        return None
    if encoding == ENC_TEXT:
        return str(body, "utf-8")
    if encoding == ENC_FLAT:
        return _unflat(*loads(body))
    return _foreign(encoding, body, buffers)


def pack_call(args: tuple[Any, ...], kwargs: dict[str, Any], mode: int) -> Packed:
    """Encode the arguments of a call, for `unpack_call`.

    Raises
    ------
    UsageError
        An argument cannot be pickled; the message names it, counted from 1, and the part.
    """
    value: Any = args
    items = args
    if kwargs:
        value = [args, kwargs]
        items = (*args, *kwargs.values())
    elif not args:
        return _new(Packed, (ENC_NONE, b"", []))
    if _ATOMS.issuperset(map(type, items)):
        return _new(Packed, (ENC_PICKLE, dumps(value, 5), []))
    if not _WITH_CODE:
        _meet_arrays()
    packed = _flat(items, value, tuple(kwargs)) or _quick(value, items)
    if packed is not None:
        return packed
    seen: dict[int, Blob] = {}
    value = tuple([_blob(item, seen) for item in args])
    if kwargs:
        value = [value, {name: _blob(item, seen) for name, item in kwargs.items()}]
    try:
        return _new(Packed, (ENC_PICKLE, *careful(value, mode == BORROW, _NOTHING)))
    except MemoryError:
        raise
    except Exception as error:  # any: what the user's __reduce__ raises
        raise refusal((args, kwargs), "the arguments", error, call=True) from error


def unpack_call(
    encoding: int, body: Any, buffers: Sequence[Any] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode what `pack_call` encoded: arguments and keywords."""
    if encoding == ENC_PICKLE:
        value = loads(body, buffers=buffers) if buffers else loads(body)
        return (value, {}) if type(value) is tuple else (value[0], value[1])
    if encoding == ENC_NONE:
        return (), {}
    if encoding == ENC_FLAT:
        where, items, names = loads(body)
        items = _unflat(where, items, None)
        split = len(items) - len(names)
        return tuple(items[:split]), dict(zip(names, items[split:], strict=True))
    return _foreign(encoding, body, buffers, True), {}


def pack_error(error: BaseException) -> Packed:
    """Encode an exception with its class, arguments, attributes and notes.

    That it loads again is tried here. Where it does not, a `RemoteError` with the name of
    its class and its text arrives.
    """
    return _new(Packed, (ENC_PICKLE, dump_error(error), []))


def unpack_error(encoding: int, body: Any, buffers: Sequence[Any] = ()) -> BaseException:
    """Decode what `pack_error` encoded; never raises."""
    return load_error(body)


def _meet_arrays(arrived: bool = False) -> None:
    """Learn NumPy's types once it has been loaded, or an array has arrived."""
    global _WITH_CODE, _ARRAYS, _SPECIAL, _owned, _rebuild, _spec_of
    if not (arrived or arrays_known()):
        return
    import numpy as np

    from mpiml.arrays import SCALARS, rebuild, spec_of
    from mpiml.payload_owned import owned_arrays

    _owned, _rebuild, _spec_of = owned_arrays, rebuild, spec_of
    _ARRAYS |= {np.ndarray}
    _SPECIAL |= _ARRAYS
    _WITH_CODE = frozenset((np.ndarray, *SCALARS))  # last: it tells that all is there


def _rebuild_first(*spec: Any) -> Any:
    _meet_arrays(True)
    return _rebuild(*spec)


_rebuild: Callable[..., Any] = _rebuild_first  # the others are asked once arrays are met
_spec_of: Callable[[Any], tuple[Any, ...] | None]
_owned: Callable[[Any, int], frozenset[int]]


def _simple(value: Any, kind: type) -> Packed | None:
    """Encode a value that needs no careful pickler; None if it does."""
    items: Any = ()
    names: tuple[Any, ...] | None = ()
    if kind is tuple:
        items = value
    elif kind is list:
        items, names = value, None
    elif kind is dict:
        items, names = value.values(), tuple(value)
    elif kind in _ARRAYS or kind is bytes or (kind is bytearray and len(value) >= LARGE):
        return None
    if items and len(items) <= _FEW:
        if _ATOMS.issuperset(map(type, items)):
            return _new(Packed, (ENC_PICKLE, dumps(value, 5), []))
        if (packed := _flat(items, value, names)) is not None:
            return packed
    return _quick(value, items)


def _flat_one(value: Any) -> Packed | None:
    """Encode a small array or a NumPy scalar, in a third of the time of the careful pickler."""
    spec = _spec_of(value)
    return None if spec is None else _new(Packed, (ENC_FLAT, dumps((-1, spec, ()), 5), []))


def _flat(items: Collection[Any], value: Any, names: tuple[Any, ...] | None) -> Packed | None:
    """Encode plain items, small arrays and NumPy scalars; None if there is anything else.

    `value` is what to pickle where all is plain. `names`: the keys of a dict or of the last
    items of a call, empty for a tuple, None for a list.
    """
    if len(items) > _FEW:
        return None
    arrays: list[Any] = []
    where: list[int] = []
    parts: list[Any] = []
    for item in items:
        kind = type(item)
        if kind in _WITH_CODE:
            spec = _spec_of(item)
            if spec is None or any(array is item for array in arrays):  # twice: one object
                return None
            arrays.append(item)
            where.append(len(parts))
            parts.append(spec)
        elif kind in _ATOMS or (kind is bytes and len(item) < LARGE):
            parts.append(item)
        else:
            return None
    if not where:
        return _new(Packed, (ENC_PICKLE, dumps(value, 5), []))
    return _new(Packed, (ENC_FLAT, dumps((where, parts, names), 5), []))


def _unflat(where: Any, items: Any, names: tuple[Any, ...] | None) -> Any:
    if where == -1:
        return _rebuild(*items)
    for i in where:
        items[i] = _rebuild(*items[i])
    if names is None:
        return items
    return dict(zip(names, items, strict=True)) if names else tuple(items)


def _quick(value: Any, items: Collection[Any]) -> Packed | None:
    """Let pickle try alone; None if there is anything inside that the careful one does better.

    `items` are the top-level parts of the value, to look at before pickle does the work.
    """
    if _tame(items):
        return _new(Packed, (ENC_PICKLE, dumps(value, 5), []))
    if foreign_loaded():  # torch pickles its tensors without asking
        return None
    if len(items) <= _FEW and not _SPECIAL.isdisjoint(map(type, items)) and _special(items):
        return None
    try:
        body = dumps(value, 5, buffer_callback=_refuse)
    except MemoryError:
        raise
    except Exception:  # any: what the user's __reduce__ raises; the careful pickler tries more
        return None
    # Arrays that are not contiguous ask for no buffer, and NumPy's own pickle turns the byte
    # order of such into the native one. What names a class has STACK_GLOBAL (0x93) in it.
    if b"\x93" in body and b"numpy" in body:
        return None
    return _new(Packed, (ENC_PICKLE, body, []))


def _tame(items: Collection[Any]) -> bool:
    """Tell whether there is nothing but plain values, here and one level down."""
    for item in items:
        kind = type(item)
        if kind not in _ATOMS:
            if kind is not list and kind is not tuple and kind is not dict:
                return False
            inner = item.values() if kind is dict else item
            if len(inner) > _FEW or not _ATOMS.issuperset(map(type, inner)):
                return False
    return 0 < len(items) <= _FEW


def _special(items: Collection[Any]) -> bool:
    """Look for arrays, large bytes and given values, here and one level down."""
    for item in items:
        kind = type(item)
        if kind is bytes or kind is bytearray:
            if len(item) >= LARGE:
                return True
        elif kind is dict or kind is list:
            if len(item) <= _FEW:
                inner = item.values() if kind is dict else item
                if not _ARRAYS.isdisjoint(map(type, inner)):
                    return True
        elif kind in _SPECIAL:
            return True
    return False


def _refuse(buffer: Any) -> bool:
    raise BufferError  # an array: for the careful pickler


def _blob(item: Any, seen: dict[int, Blob]) -> Any:
    """Wrap large bytes, so that they do not go inside the body."""
    large = type(item) in (bytes, bytearray) and len(item) >= LARGE
    return seen.setdefault(id(item), Blob(item)) if large else item


def _foreign(encoding: int, body: Any, buffers: Sequence[Any], call: bool = False) -> Any:
    if encoding == ENC_ARRAYS:
        from mpiml.external.encoding import decode

        return decode(body, buffers, call)
    more = "Do all ranks run the same version of mpiml?"
    raise UsageError(f"a value came in encoding {encoding}; expected 0 to {ENC_FLAT}. {more}")
