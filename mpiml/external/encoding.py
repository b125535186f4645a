"""Arrays and names as bytes, for ranks of C and Fortran programs: no pickle in it.

A body is u8 version, u8 form, u16 count, u32 0, then the entries: u8 dtype, u8 number of
dimensions, u8 order (``C`` or ``F``), u8 apart, u32 length of the name, u64 shape, the name, zeros
to a multiple of 8; then the elements likewise, unless they stand apart, in a buffer of their own.
Little endian. docs/design/0008-external.md says what the numbers mean.
"""

import struct
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

import numpy as np

from mpiml.arrays import as_buffer, order_of, to_host
from mpiml.errors import UsageError
from mpiml.external.codes import ArraysError
from mpiml.libraries import family
from mpiml.payload_memory import INLINE, copied

__all__ = ["DTYPES", "Named", "as_array", "decode", "encode"]

VERSION, NOTHING, ONE, MANY, NAMED = 1, 0, 1, 2, 3
ENC_NONE, ENC_ARRAYS = 0, 2  # as `mpiml.payload` has them
MOST_ARRAYS, MOST_DIMS, MOST_NAME = 32, 8, 255
_HEAD = struct.Struct("<BBHI")
_ENTRY = struct.Struct("<BBBBI")
_SHAPES = [struct.Struct(f"<{ndim}Q") for ndim in range(MOST_DIMS + 1)]
_NUMBERS = (bool, int, float, complex, np.generic)

#: what NumPy calls the dtype of each code but 0, which is a name without an array
DTYPES: Final = (
    "", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_DTYPES = [None, *[np.dtype(name) for name in DTYPES[1:]]]
_CODES = {
    dtype: code for code, dtype in enumerate(_DTYPES)
}  # native only: others are not equal


class Named(dict[str, Any]):
    """Arrays by name, to be sent as such; a value of None is a name alone."""


def as_array(value: Any, what: str) -> Any:
    """Return a number or an array as a NumPy array of a dtype that is sent, in native order.

    Raises
    ------
    ArraysError
        It is neither, or of another dtype; the message begins with `what`.
    """
    array = value
    if type(value) is not np.ndarray:
        if family(type(value)) is not None:
            exported = to_host(value)
            array = value if exported is None else exported[0]
        elif isinstance(value, np.ma.MaskedArray):
            raise ArraysError(
                f"{what}: expected an array, or a number, got a masked array, and a mask is not "
                "sent to a rank of another program. Fill it: x.filled(0)"
            )
        elif isinstance(value, np.ndarray):
            array = value.view(np.ndarray)  # a subclass may have methods of its own
        elif isinstance(value, _NUMBERS):
            array = _number(value, what)
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not isinstance(array, np.ndarray) or array.dtype not in _CODES:
        got = type(value).__name__
        if isinstance(array, np.ndarray):
            got = f"an array of {array.dtype}"
        raise ArraysError(
            f"{what}: expected an array of {', '.join(DTYPES[1:])}, or a number, since a rank of "
            f"another program takes it; got {got}"
        )
    if array.ndim > MOST_DIMS:
        raise ArraysError(
            f"{what}: expected at most {MOST_DIMS} dimensions, got {array.ndim}, for a rank of "
            "another program"
        )
    return array


def _number(value: Any, what: str) -> Any:
    """Return a number as an array; one of Python has the same dtype whatever its value."""
    if not isinstance(value, int) or isinstance(value, bool):
        return np.asarray(value)
    try:
        return np.asarray(value, np.int64)
    except OverflowError:
        raise ArraysError(
            f"{what}: expected a number from -2**63 to 2**63 - 1, as int64 for a rank of another "
            f"program, got one of {value.bit_length()} bits. What is an np.uint64 is sent as such"
        ) from None


def encode(
    value: Any, what: str, copy: bool = True, owned: Collection[int] = ()
) -> tuple[int, bytes, list[memoryview]]:
    """Encode arrays for a rank of another program.

    Parameters
    ----------
    value : None, array, number, tuple of these, or Named
        What to encode.
    what : str
        Begins the text of an error.
    copy : bool
        Whether large elements are copied, so that the arrays may be changed at once.
    owned : collection of int
        Ids of arrays that nobody can change: they are not copied.

    Returns
    -------
    encoding, body, buffers
        As `mpiml.payload.Packed` has them.

    Raises
    ------
    ArraysError
        It is something else.
    """
    if value is None:
        return ENC_NONE, b"", []
    form, names, items = ONE, [""], [value]
    if isinstance(value, tuple):
        form, names, items = MANY, [""] * len(value), list(value)
    elif isinstance(value, Named):
        form, names, items = NAMED, list(value), list(value.values())
    if len(items) > MOST_ARRAYS or any(len(name.encode()) > MOST_NAME for name in names):
        raise ArraysError(
            f"{what}: expected at most {MOST_ARRAYS} arrays, with names of at most {MOST_NAME} "
            f"bytes, got {len(items)} arrays"
        )
    parts = [_HEAD.pack(VERSION, form, len(items), 0)]
    buffers: list[memoryview] = []
    room = INLINE
    for number, (name, item) in enumerate(zip(names, items, strict=True)):
        if item is None and form == NAMED:
            parts += _entry(0, "C", 0, (), name)
            continue
        if type(item) is not np.ndarray or item.dtype not in _CODES or item.ndim > MOST_DIMS:
            where = what if form == ONE else f"{what}, {name or f'item {number}'}"
            item = as_array(item, where)
        room -= _add(item, name, room, copy and id(item) not in owned, parts, buffers)
    return ENC_ARRAYS, b"".join(parts), buffers


def _add(
    array: Any, name: str, room: int, copy: bool, parts: list[bytes], buffers: list[memoryview]
) -> int:
    """Append one array; return how many bytes of it stand in the body."""
    order = order_of(array)
    nbytes = array.nbytes
    apart = nbytes > room
    parts += _entry(_CODES[array.dtype], order or "C", int(apart), array.shape, name)
    if not apart:
        data = array.tobytes("A" if order else "C")
        parts += [data, bytes(-nbytes % 8)]
        return int(nbytes)
    view = as_buffer(array)
    buffers.append(copied(view) if copy and order else view)  # else it is a copy already
    return 0


def _entry(code: int, order: str, apart: int, shape: Sequence[int], name: str) -> list[bytes]:
    data = name.encode()
    head = _ENTRY.pack(code, len(shape), ord(order), apart, len(data))
    return [head, _SHAPES[len(shape)].pack(*shape), data, bytes(-len(data) % 8)]


def decode(body: Any, buffers: Sequence[Any], call: bool = False) -> Any:
    """Decode what `encode`, or a rank of another program, has encoded.

    Parameters
    ----------
    body, buffers
        As encoded.
    call : bool
        Return a tuple in any case: the arguments of a call.

    Returns
    -------
    None, array, tuple of arrays, or dict
        Arrays wrap the buffers, where these are writable, and are the receiver's own.

    Raises
    ------
    UsageError
        The bytes are none of this version, or their lengths do not add up.
    """
    try:
        version, form, count, _ = _HEAD.unpack_from(body)
        if version != VERSION or form > NAMED:
            raise UsageError(
                f"external: expected arrays of version {VERSION}, got version {version}, form "
                f"{form}. Use libmpiml and mpiml of one version."
            )
        names, values = _entries(body, count, iter(buffers))
    except (struct.error, StopIteration, IndexError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"external: the bytes of an array do not add up: {error}") from error
    if form == MANY:
        return tuple(values)
    found: Any = dict(zip(names, values, strict=True)) if form == NAMED else None
    found = values[0] if form == ONE else found
    return (found,) if call else found


def _entries(body: Any, count: int, buffers: Any) -> tuple[list[str], list[Any]]:
    at = _HEAD.size
    names: list[str] = []
    values: list[Any] = []
    for _ in range(count):
        code, ndim, order, apart, length = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        shape = _SHAPES[ndim].unpack_from(body, at)
        at += 8 * ndim
        names.append(bytes(body[at : at + length]).decode() if length else "")
        at += length + -length % 8
        if not code:
            values.append(None)
            continue
        dtype: Any = _DTYPES[code]
        if apart:
            data: Any = next(buffers)
            if memoryview(data).readonly:
                data = copied(data)
        else:
            nbytes = dtype.itemsize
            for extent in shape:
                nbytes *= extent
            data = bytearray(body[at : at + nbytes])
            at += nbytes + -nbytes % 8
        memory: Literal["C", "F"] = "F" if order == ord("F") else "C"
        values.append(np.ndarray(shape, dtype, data, order=memory))
    return names, values
