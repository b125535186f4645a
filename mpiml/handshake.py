"""The launch handshake: a fixed record from each rank, before anything starts.

Layout of a record, little endian, `SIZE` bytes: version u8, state u8 (0 ready, 1 an error, 2 a
usage error, 3 a rank of another program, called guest), attached u8 (the rank's code is itself a
body), thread level of MPI u8 (as in `mpiml.threads`; a guest: 0), exit status i32, role that is
attached u32, digest 32 bytes, token 8 bytes, then the facts of the host (`mpiml.hosts.Facts`);
version of mpiml 16 bytes, MPI library 40 bytes, label of a guest 44 bytes, each with a zero behind
it. Version and size stand for ever: ranks with two versions of mpiml must be able to tell each
other so.
"""

import os
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpiml.config import Config
from mpiml.digest import digest, first_difference
from mpiml.errors import GraphMismatchError, RemoteError, UsageError
from mpiml.hosts import FACTS_SIZE, Facts, local_facts
from mpiml.latecomers import awaited
from mpiml.payload import pack_error, unpack_error
from mpiml.threads import MULTIPLE, noted
from mpiml.tracebacks import error_text

__all__ = ["Record", "agree", "alone", "exchange"]

VERSION = 1
SIZE = 512
READY, FAULT, USAGE, GUEST = 0, 1, 2, 3
_TAIL = struct.Struct("<16s40s44s")
_HEAD = struct.Struct("<BBBBiI32s8s")
_ERROR = struct.Struct("<BI")  # encoding, bytes of the traceback
_MOST = 1 << 20  # bytes of an error, and of its traceback, that are sent to all ranks
_BETWEEN, _INSIDE = "\x1e", "\x1f"


class Record(NamedTuple):
    """What one rank says of itself.

    Attributes
    ----------
    state, status
        Whether it has a program, and the exit status of its error.
    attached
        Index of the role whose body is the rank's own code, or None.
    digest
        Of the program it built.
    facts
        Its host.
    token
        Random bytes; names what the ranks of a host share.
    version, library
        Of mpiml and of MPI.
    guest
        Label of a rank of another program; None of a rank that runs Python.
    level
        Thread level of MPI.
    """

    state: int
    status: int
    attached: int | None
    digest: bytes
    facts: Facts
    token: bytes
    version: str = ""
    library: str = ""
    guest: str | None = None
    level: int = MULTIPLE

    def pack(self) -> bytes:
        """Return the bytes."""
        role = 0 if self.attached is None else self.attached
        head = _HEAD.pack(
            VERSION, self.state, self.attached is not None, self.level, self.status, role,
            self.digest, self.token,
        )  # fmt: skip
        texts = (self.version[:15], self.library[:39], (self.guest or "")[:43])
        tail = _TAIL.pack(*[text.encode(errors="surrogateescape") for text in texts])
        return head + self.facts.pack() + tail

    @classmethod
    def unpack(
        cls, data: bytes | memoryview, rank: int = 0, seen: dict[Any, Any] | None = None
    ) -> "Record":
        """Take the bytes of one rank apart; what stands in `seen` already is not made again."""
        seen = {} if seen is None else seen
        if data[0] != VERSION:
            raise UsageError(
                f"mpiml: expected handshake version {VERSION} on all ranks, got {data[0]} from "
                f"rank {rank}. Install the same mpiml everywhere."
            )
        _, state, attached, level, status, role, digest_, token = _HEAD.unpack_from(data)
        raw = bytes(data[_HEAD.size : _HEAD.size + FACTS_SIZE])
        facts = seen.get(raw)
        if facts is None:
            facts = seen[raw] = Facts.unpack(raw)
        same = seen.setdefault(digest_, digest_)
        tail = bytes(data[-_TAIL.size :])
        texts = seen.get(tail)
        if texts is None:
            texts = seen[tail] = [_text(field) for field in _TAIL.unpack(tail)]
        guest = texts[2] if state == GUEST else None
        role_ = role if attached else None
        return cls(state, status, role_, same, facts, token, texts[0], texts[1], guest, level)


def alone(attached: int | None) -> Record:
    """Return the record of a process that has nobody to compare with. Local."""
    return Record(
        READY, 0, attached, bytes(32), local_facts(Config.read_foreign()), os.urandom(8)
    )


def exchange(
    comm: Any,
    lines: Sequence[tuple[str, str]],
    error: BaseException | None,
    attached: int | None = None,
    part: Callable[[list[Record]], Any] | None = None,
    limit: float | None = None,
) -> list[Record]:
    """Compare what all ranks built. Collective over `comm`: one allgather if all is well.

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
    part
        Where there are guests, called with all records: parts from them, collectively, and
        returns the communicator of the other ranks, which go on alone.
    limit
        Seconds after which a rank that waits here for others ends the job.

    Returns
    -------
    list of Record
        One for each rank that runs Python.

    Raises
    ------
    GraphMismatchError
        On every rank, if the programs differ.
    BaseException
        `error` on the ranks that have one, on the others the error of the lowest of those,
        with its text as ``__cause__``; its attribute ``mpiml_rank`` says whose it is.
    """
    own = alone(attached)._replace(
        digest=digest(lines), library=_world().library(), version=_version(), level=noted()
    )
    if error is not None:
        usage = isinstance(error, UsageError)
        own = own._replace(state=USAGE if usage else FAULT, status=2 if usage else 1)
    packed = own.pack()
    with awaited(comm.rank, comm.size, limit):
        answers = _world().exchange_record(comm, packed)
    # Ranks of a host tell much the same: kept once, 10,000 ranks are not 10,000 sets of cores.
    seen: dict[Any, Any] = {}
    records = [Record.unpack(data, rank, seen) for rank, data in enumerate(answers)]
    if part is not None and any(record.guest is not None for record in records):
        comm = part(records)
        records = [record for record in records if record.guest is None]
    failed = [rank for rank, record in enumerate(records) if record.state != READY]
    if failed:
        from mpiml.whereabouts import only_there

        error = _failure(comm, error, failed[0], "built")
        files = isinstance(error, (ImportError, OSError, UsageError))
        raise _located(error, only_there(failed, [record.facts for record in records], files))
    if len({record.digest for record in records}) > 1:
        names = [record.facts.name for record in records]
        _compare(comm, lines, [record.digest for record in records], names)
    return records


def agree(comm: Any, error: BaseException | None) -> None:
    """Raise on all ranks what one has raised while it set itself up.

    Collective over `comm`: one reduction of a number if all is well.

    Raises
    ------
    BaseException
        As in `exchange`.
    """
    first = _world().lowest(comm, comm.size if error is None else comm.rank)
    if first < comm.size:
        raise _failure(comm, error, first, "started")


def _compare(
    comm: Any,
    lines: Sequence[tuple[str, str]],
    digests: Sequence[bytes],
    names: Sequence[str],
) -> None:
    """Find the first difference. Collective over `comm`: one rank for each digest tells its lines.

    A module that only some ranks have imported is none: a body may import where it runs, and
    the next program of the same process must not fail for it.
    """
    speakers: dict[bytes, int] = {}
    for rank, found in enumerate(digests):
        speakers.setdefault(found, rank)
    joined = ""
    if comm.rank == speakers[digests[comm.rank]]:
        joined = _BETWEEN.join(f"{name}{_INSIDE}{value}" for name, value in lines)
    answers = _world().exchange_text(comm, joined.encode(errors="backslashreplace"))
    everything = [
        [_pair(line) for line in answers[rank].decode(errors="replace").split(_BETWEEN)]
        for rank in speakers.values()
    ]
    common = set.intersection(*({name for name, _ in ranks} for ranks in everything))
    kept = [
        [line for line in ranks if line[0] in common or not line[0].startswith("file ")]
        for ranks in everything
    ]
    numbers = {found: number for number, found in enumerate(speakers)}
    difference = first_difference([kept[numbers[found]] for found in digests], names)
    if difference:
        cure = "Let nothing in the graph depend on the rank, the time, or the machine."
        if difference.startswith('"file '):
            cure = (
                "Let all hosts see one and the same file, or copy it to each before the start."
            )
        elif difference.startswith('"version '):
            cure = "Install the same version on each host."
        raise GraphMismatchError(
            f"expected all ranks to build the same program, but {difference}. {cure}"
        )


def _version() -> str:
    return str(getattr(sys.modules["mpiml"], "__version__", "?"))


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")  # two stay two


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(_INSIDE)
    return name, value


def _failure(comm: Any, error: BaseException | None, rank: int, doing: str) -> BaseException:
    """Return the error to raise here for the one of `rank`. Collective over `comm`."""
    data = b""
    if error is not None and comm.rank == rank:
        packed = pack_error(error)
        text = error_text(error)
        if len(packed.body) > _MOST:  # it holds an array, say
            packed = pack_error(RemoteError(f"{type(error).__name__}: {str(error)[:1000]}"))
        trace = text.encode(errors="backslashreplace")[-_MOST:]
        data = _ERROR.pack(packed.encoding, len(trace)) + trace + bytes(packed.body)
    data = _world().spread(comm, data, rank)
    if error is None:
        encoding, length = _ERROR.unpack_from(data)
        start = _ERROR.size
        error = unpack_error(encoding, data[start + length :])
        stack = data[start : start + length].decode(errors="replace")
        error.__cause__ = RemoteError(f"while the program was {doing} on rank {rank}:\n{stack}")
    error.mpiml_rank = rank  # type: ignore[attr-defined]
    return error


def _located(error: BaseException, where: str) -> BaseException:
    """Add where it was to an error: to the text of one that is shown without a traceback."""
    if not where:
        return error
    if isinstance(error, UsageError) and len(error.args) == 1:
        text = str(error.args[0])
        end = "" if text.endswith((".", "!", "?", ":")) else "."
        error.args = (f"{text}{end} {where}",)
    else:
        error.add_note(where)
    return error


def _world() -> Any:
    """Import what needs MPI: earlier, mpi4py.MPI would be imported without initialising MPI."""
    from mpiml import exchanges

    return exchanges
