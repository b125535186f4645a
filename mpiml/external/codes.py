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

__all__ = ["ENC_CODE", "ArraysError", "attach_code", "call_code", "pack_code", "unpack_code"]

ENC_CODE: Final = 5  #: how an error is encoded on its way to such a rank
OK, STOPPED, USAGE, NOT_ATTACHED, LEFT, VERSION, MPI_LIBRARY, ATTACH, TOPIC, SERVICE = range(10)
METHOD, DTYPE, SHAPE, REMOTE, FAILED, TIMEOUT, MPI, MEMORY = range(10, 18)
_HEAD = struct.Struct("<iI")
_MOST = 30_000  # bytes of a text, so that a frame holds it
_REFUSED = ((PlacementError, ATTACH), (GraphMismatchError, FAILED), (UsageError, ATTACH))


class ArraysError(UsageError):
    """A value is not what can be sent to a rank of another program."""


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
    if isinstance(error, UnknownMethodError):
        return METHOD
    if isinstance(error, ArraysError):
        return DTYPE
    if isinstance(error, ServiceGoneError):
        return STOPPED if error.__cause__ is None else FAILED
    return REMOTE


def pack_code(code: int, text: str) -> bytes:
    """Return the body of a frame that tells of an error."""
    data = text.encode("utf-8", "backslashreplace")[:_MOST]
    return _HEAD.pack(code, len(data)) + data


def unpack_code(body: bytes | memoryview) -> tuple[int, str]:
    """Return code and text."""
    code, length = _HEAD.unpack_from(body)
    return code, bytes(body[_HEAD.size : _HEAD.size + length]).decode("utf-8", "replace")
