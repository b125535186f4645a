"""The launch handshake: a fixed record from each rank, before anything starts.

Layout of a record, little endian: version u8, state u8 (0 ready, 1 an error, 2 a usage
error), attached u8 (the rank's code is itself a body), unused u8, exit status i32, role that
is attached u32, digest 32 bytes, then the facts of the host (`mpiml.hosts.Facts`).
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpiml import world
from mpiml.digest import digest, first_difference
from mpiml.errors import GraphMismatchError, RemoteError, UsageError
from mpiml.hosts import FACTS_SIZE, Facts, local_facts
from mpiml.payload import pack_error, unpack_error

__all__ = ["READY", "Record", "exchange"]

VERSION = 1
READY, FAULT, USAGE = 0, 1, 2
_HEAD = struct.Struct("<BBBBiI32s")


class Record(NamedTuple):
    """What one rank says of itself."""

    state: int
    status: int
    attached: int | None
    digest: bytes
    facts: Facts

    def pack(self) -> bytes:
        """Return the bytes."""
        role = 0 if self.attached is None else self.attached
        head = _HEAD.pack(
            VERSION, self.state, self.attached is not None, 0, self.status, role, self.digest
        )
        return head + self.facts.pack()

    @classmethod
    def unpack(cls, data: bytes) -> "Record":
        """Take the bytes of one rank apart."""
        version, state, attached, _, status, role, digest_ = _HEAD.unpack_from(data)
        if version != VERSION:
            raise UsageError(
                f"mpiml: expected handshake version {VERSION} on all ranks, got {version}. "
                "Install the same mpiml everywhere."
            )
        facts = Facts.unpack(data[_HEAD.size : _HEAD.size + FACTS_SIZE])
        return cls(state, status, role if attached else None, digest_, facts)


def exchange(
    comm: Any,
    lines: Sequence[tuple[str, str]],
    error: BaseException | None,
    attached: int | None = None,
) -> list[Record]:
    """Compare what all ranks built. Collective over `comm`.

    Parameters
    ----------
    comm
        The communicator of the program.
    lines
        What `mpiml.digest.describe` returned on this rank.
    error
        What was raised here instead of a program.
    attached
        Index of the role whose body is the calling code, if any.

    Returns
    -------
    list of Record
        One for each rank.

    Raises
    ------
    GraphMismatchError
        On every rank, if the digests differ.
    BaseException
        `error` on the ranks that have one, on the others the error of the lowest of those,
        with its text as ``__cause__``; its attribute ``mpiml_rank`` says whose it is.
    """
    state, status = READY, 0
    if error is not None:
        state = USAGE if isinstance(error, UsageError) else FAULT
        status = 2 if state == USAGE else 1
    own = Record(state, status, attached, digest(lines), local_facts())
    records = [Record.unpack(data) for data in world.exchange_record(comm, own.pack())]
    failed = [rank for rank, record in enumerate(records) if record.state != READY]
    if failed:
        raise _failure(comm, error, failed[0])
    if len({record.digest for record in records}) > 1:
        text = "\x1e".join(f"{name}\x1f{value}" for name, value in lines)
        everything = [
            [_pair(line) for line in data.decode().split("\x1e")]
            for data in world.exchange_text(comm, text.encode())
        ]
        raise GraphMismatchError(first_difference(everything))
    return records


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition("\x1f")
    return name, value


def _failure(comm: Any, error: BaseException | None, rank: int) -> BaseException:
    import traceback

    text = b""
    if error is not None and comm.rank == rank:
        packed = pack_error(error)
        trace = "".join(traceback.format_exception(error)).encode()
        text = struct.pack("<BI", packed.encoding, len(trace)) + trace + bytes(packed.body)
    data = world.exchange_text(comm, text)[rank]
    if error is None:
        encoding, length = struct.unpack_from("<BI", data)
        error = unpack_error(encoding, data[5 + length :])
        trace = data[5 : 5 + length].decode(errors="replace")
        error.__cause__ = RemoteError(f"while the program was built on rank {rank}:\n{trace}")
    error.mpiml_rank = rank  # type: ignore[attr-defined]
    return error
