"""Frames: the fixed byte layouts that ranks exchange. Bytes in, bytes out; no MPI, no pickle.

A message is one frame, little endian, without padding::

    offset  size  field
         0     1  version    WIRE_VERSION
         1     1  kind       one of the constants below
         2     1  encoding   how the body is encoded (see `mpiml.payload`)
         3     1  flags      FLAG_*
         4     4  source     vertex that sends (u32), or rank in control frames
         8     4  target     vertex that is meant
        12     4  buffers    number n of out-of-band buffers
        16     8  id         request id; requests, replies and stream items share it
        24     8  body       length of the body in bytes
        32     4  name       length of the method name in bytes
        36     4  aux        kind-specific: credits returned, stream items granted, counts
        40        name, UTF-8, then the body, then n lengths (u64) of the buffers

The buffers themselves follow as messages of their own on another tag, in order, in chunks
of at most `CHUNK` bytes, so that they are received straight into their final memory and no
length is ever passed to MPI as more than an int32. Request ids stand in the header: MPI
promises only 32 767 tags. A C or Fortran rank can speak this with one struct.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from mpiml import _native
from mpiml.errors import MpimlError

__all__ = [
    "AGREE_COUNT",
    "AGREE_REST",
    "AGREE_TARGET",
    "ANNOUNCE",
    "BOARD",
    "CHUNK",
    "CREDIT",
    "ERROR",
    "FLAG_BODY_APART",
    "FLAG_NESTED",
    "FLAG_STREAM",
    "GUEST_GONE",
    "GUEST_LEAVE",
    "HEADER",
    "HEARD",
    "HEAR_ASK",
    "ITEM",
    "MEMBER_ASK",
    "MEMBER_STATE",
    "MORE",
    "QUIT_STREAM",
    "REPLY",
    "REPORT",
    "REQUEST",
    "RETURN",
    "STATUS",
    "STOP",
    "STOP_ASK",
    "STOP_REQUEST",
    "STOP_TOLD",
    "STREAM_END",
    "TOPIC",
    "TOPIC_ACK",
    "TOPIC_ASK",
    "TOPIC_END",
    "TOPIC_OVER",
    "TOPIC_QUIET",
    "WAITS",
    "WAITS_LEAST",
    "WAITS_QUERY",
    "WAITS_TOLD",
    "WIRE_VERSION",
    "Frame",
    "FrameError",
    "chunks",
    "join",
    "split",
]

WIRE_VERSION = 1
HEADER = struct.Struct("<BBBBIIIQQII")
CHUNK = 1 << 29

# Calls. A request is answered by exactly one REPLY or ERROR, a stream by ITEMs and one
# STREAM_END or ERROR. Each of them counts towards "sent = received" at the end.
REQUEST, REPLY, ERROR, ITEM, STREAM_END, MORE, QUIT_STREAM, RETURN = range(1, 9)
TOPIC, TOPIC_END = 9, 10  # bounded by the topic's policy, not by credit
# Control. Never waits for credit.
CREDIT, STATUS, STOP_REQUEST, STOP, AGREE_COUNT, AGREE_TARGET = range(16, 22)
WAITS_QUERY, WAITS, REPORT, BOARD = range(22, 26)  # BOARD is answered by REPLY or ERROR
MEMBER_ASK, MEMBER_STATE, AGREE_REST = range(26, 29)
TOPIC_ACK = 29  # may pass messages, which wait for their buffers
TOPIC_ASK, TOPIC_QUIET = 30, 31
STOP_ASK, STOP_TOLD, TOPIC_OVER = 33, 34, 35
HEAR_ASK, HEARD = 36, 37
WAITS_LEAST, WAITS_TOLD = 38, 39
GUEST_LEAVE, GUEST_GONE = 48, 49  # between Python ranks and those of other programs
ANNOUNCE = 32  # the frame itself is large and comes as the one buffer of this one

FLAG_NESTED = 1  # made inside a method: exempt from credit, so cycles cannot deadlock
FLAG_STREAM = 2  # answer item by item
FLAG_BODY_APART = 4  # the body is the first out-of-band buffer: too large to concatenate

_LENGTH = struct.Struct("<Q")
_split = _native.split_frame


class FrameError(MpimlError):
    """Bytes that are not a frame of this version: another mpiml, or another program's traffic."""


class Frame(NamedTuple):
    """One frame, taken apart."""

    kind: int
    encoding: int
    flags: int
    source: int
    target: int
    id: int
    aux: int
    name: bytes
    body: bytes | bytearray | memoryview
    lengths: tuple[int, ...]


# Frame(...) takes twice the time
_new: Callable[[type[Frame], tuple[Any, ...]], Frame] = tuple.__new__


def join(
    kind: int,
    source: int,
    target: int,
    id: int = 0,
    aux: int = 0,
    *,
    encoding: int = 0,
    flags: int = 0,
    name: bytes = b"",
    body: bytes | bytearray | memoryview = b"",
    lengths: tuple[int, ...] | list[int] = (),
) -> bytes:
    """Build one message; `lengths` are the sizes in bytes of the buffers that follow."""
    header = HEADER.pack(
        WIRE_VERSION, kind, encoding, flags, source, target, len(lengths), id, len(body),
        len(name), aux,
    )  # fmt: skip
    if lengths:
        return b"".join((header, name, body, *map(_LENGTH.pack, lengths)))
    return b"".join((header, name, body))


def split(message: bytes | bytearray | memoryview, size: int | None = None) -> Frame:
    """Take apart the first `size` bytes of `message`; all of them by default.

    Raises
    ------
    FrameError
        If the version is another one, or the lengths do not add up.
    """
    if size is None:
        size = len(message)
    fields = _split(message, size)
    if fields is None:
        raise _wrong(message, size)
    return _new(Frame, fields)


def _wrong(message: bytes | bytearray | memoryview, size: int) -> FrameError:
    if size < HEADER.size or size > len(message):
        return FrameError(f"wire: expected a frame of {HEADER.size} bytes or more, got {size}")
    version, *_, count, _, body, name, _ = HEADER.unpack_from(message)
    return FrameError(
        f"wire: expected a frame of version {WIRE_VERSION} and {40 + name + body + 8 * count} "
        f"bytes, got version {version} and {size} bytes. All ranks must run the same mpiml."
    )


def chunks(length: int) -> list[tuple[int, int]]:
    """Cut `length` bytes into ``(start, stop)`` pieces of at most `CHUNK` bytes; none for 0."""
    return [(i, min(i + CHUNK, length)) for i in range(0, length, CHUNK)]
