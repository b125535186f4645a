"""What ranks of other programs are told of errors: codes of ``mpiml.h``, and a text."""

import struct
from typing import Final

from mpiml.errors import (
    GraphMismatchError,
    PlacementError,
    ServiceGoneError,
    UnknownMethodError,
    UsageError,
)

__all__ = [
    "ENC_CODE", "TEXT", "ArraysError", "PathError", "ShapeError", "attach_code", "call_code",
    "pack_code", "shortened", "unpack_code",
]  # fmt: skip

ENC_CODE: Final = 5  #: how an error is encoded on its way to such a rank
OK, STOPPED, USAGE, NOT_ATTACHED, LEFT, VERSION, MPI_LIBRARY, ATTACH, TOPIC, SERVICE = range(10)
METHOD, DTYPE, SHAPE, REMOTE, FAILED, TIMEOUT, MPI, MEMORY = range(10, 18)
_HEAD = struct.Struct("<iI")
#: bytes of a text for a guest: a frame holds it, and `mpiml_error` with a few words before it
TEXT: Final = 7000
_REFUSED = ((PlacementError, ATTACH), (GraphMismatchError, FAILED), (UsageError, ATTACH))


class ArraysError(UsageError):
    """A value is not what can be sent to a rank of another program, or what one may send."""


class ShapeError(ArraysError):
    """An array that such a rank has sent has another shape than what it is for."""


class PathError(UsageError):
    """Such a rank has named an array of a tree that is not there."""


def attach_code(error: BaseException) -> int:
    """Return the code for an error that has kept a program from starting."""
    remote = error.__cause__ is not None  # raised by the user's file, somewhere
    if not remote:
        for kind, code in _REFUSED:
            if isinstance(error, kind):
                return code
    return FAILED


def call_code(error: BaseException) -> int:
    """Return the code for an error that a call has ended with."""
    if isinstance(error, (UnknownMethodError, PathError)):
        return METHOD
    if isinstance(error, ShapeError):
        return SHAPE
    if isinstance(error, ArraysError):
        return DTYPE
    if isinstance(error, ServiceGoneError):
        return STOPPED if error.__cause__ is None else FAILED
    return REMOTE


def shortened(text: str) -> str:
    """Return a text of at most `TEXT` bytes of UTF-8, without its middle where it is longer.

    The reason of a failure is its last line; where it was, and whose call, its first.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > TEXT:
        head, gap = TEXT // 4, b"\n...\n"
        data = data[:head] + gap + data[head + len(gap) - TEXT :]
    return data.decode("utf-8", "ignore")  # where a character was cut


def pack_code(code: int, text: str) -> bytes:
    """Return the body of a frame that tells of an error."""
    data = shortened(text).encode()
    return _HEAD.pack(code, len(data)) + data


def unpack_code(body: bytes | memoryview) -> tuple[int, str]:
    """Return code and text."""
    code, length = _HEAD.unpack_from(body)
    return code, bytes(body[_HEAD.size : _HEAD.size + length]).decode("utf-8", "replace")
