"""The ranks that start together where some are of another program: who is who, and what guests hear.

After the handshake these ranks split: Python ranks go on alone, guests wait. All
of them then take part in one verdict: the manifest of the graph, or an error.
"""

import struct
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from mpiml import world  # first: it settles that importing MPI initialises nothing
from mpiml.errors import UsageError
from mpiml.exchanges import broadcast
from mpiml.external.codes import OK, attach_code, shortened
from mpiml.external.crowd import Crowd
from mpiml.external.manifest import check_topics, manifest
from mpiml.external.reception import Reception

from mpi4py import MPI  # isort: skip

__all__ = ["Party", "meet"]

_VERDICT = struct.Struct("<BBHiQ")


class Party:
    """Python ranks and guests of one communicator, on a Python rank.

    Collective over the communicator: construction, `welcome`, `refuse`. As a context manager it
    refuses where its block ends by an error before it has welcomed, and frees what it has made.

    Attributes
    ----------
    crowd : Crowd
        Who is who.
    comm
        The communicator of the Python ranks.
    link
        A duplicate of the whole, for messages with guests.
    bells : sequence of (host, path, ranks)
        Files by which the Python ranks of each host are woken, each by the line that is its
        place. They have names until guests have mapped them.
    """

    def __init__(self, comm: Any, crowd: Crowd) -> None:
        self.crowd = crowd
        self.link: Any = world.own_duplicate(comm, "mpiml guests")
        self.comm: Any = comm.Split(0, comm.rank)
        self.comm.Set_name("mpiml python ranks")
        self.bells: Sequence[tuple[str, str, Sequence[int]]] = ()
        self._told = False
        self._reception: Reception | None = None

    def check(self, vertices: Any) -> None:
        """Check what guests are to do in a program. Local; see `check_topics`."""
        check_topics(vertices)

    def receive(self, runtime: Any) -> Any:
        """Take guests in on this rank; return where nodes are. Local."""
        self._reception = Reception(runtime, self.crowd)
        return self._reception.places

    def open(self, link: Any) -> Any:
        """Return the link of this rank, made to talk to guests too. Local."""
        assert self._reception is not None
        return self._reception.open(link, self.link)

    def welcome(self, runtime: Any) -> None:
        """Let guests begin. Collective.

        Raises
        ------
        UsageError
            On all ranks, guests included: one of those could not do its part.
        """
        data = b""
        if self.comm.rank == 0 and self._reception is not None:
            ranks, pythons = self._reception.ranks, self.crowd.pythons
            bells = [
                (host, path, [(pythons[rank], line) for line, rank in enumerate(held)])
                for host, path, held in self.bells
            ]
            data = manifest(runtime.name, runtime.vertices, ranks, self.crowd, bells)
        self._tell(OK, data)
        failed = bytearray(4)
        self.link.Allreduce(MPI.IN_PLACE, [failed, MPI.INT], MPI.MAX)
        self._unname()
        if rank := int.from_bytes(failed, sys.byteorder):
            raise UsageError(
                f"mpiml: rank {rank - 1} of the job, which runs another program than Python, could "
                "not attach, so no rank begins. What mpiml_attach() said there tells why."
            )

    def refuse(self, error: BaseException) -> None:
        """Let guests know why there will be no program. Collective; a second time nothing."""
        if not self._told:
            text = str(error) or type(error).__name__
            if error.__cause__ is not None:
                text += f"\n{error.__cause__}"
            self._tell(attach_code(error), shortened(text).encode())

    def _unname(self) -> None:
        for _, path, ranks in self.bells:
            if self.comm.rank in ranks:
                world.unname(path)

    def _tell(self, code: int, data: bytes) -> None:
        self._told = True
        root = self.crowd.pythons[0]
        head = broadcast(
            self.link, _VERDICT.pack(1, 0, 0, code, len(data)), _VERDICT.size, root
        )
        length = _VERDICT.unpack(head)[4]
        if length:
            broadcast(self.link, data, length, root)

    def __enter__(self) -> "Party":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unname()
        if MPI.Is_finalized():  # by a body, which is an error that has been told
            return
        if error is not None:
            pythons, there = self.crowd.pythons, getattr(error, "mpiml_rank", None)
            _locate(error, pythons[0], None if there is None else pythons[there])
            self.refuse(error)
        reception = self._reception
        if reception is None or not reception.left_behind:
            self.link.Free()
            self.comm.Free()


def meet(comm: Any, records: Sequence[Any]) -> Party:
    """Return the party of a communicator some of whose ranks are guests. Collective.

    Parameters
    ----------
    comm
        The communicator that the program was given.
    records : sequence of mpiml.handshake.Record
        What each of its ranks said.

    Raises
    ------
    UsageError
        On all ranks, guests included: versions of mpiml or MPI libraries differ.
    """
    _alike("version of mpiml", [record.version for record in records], records)
    _alike("MPI library", [record.library for record in records], records)
    guests = [rank for rank, record in enumerate(records) if record.guest is not None]
    pythons = [rank for rank, record in enumerate(records) if record.guest is None]
    labels = [records[rank].guest for rank in guests]
    return Party(comm, Crowd(tuple(labels), tuple(guests), tuple(pythons)))


def _locate(error: BaseException, first: int, rank: int | None = None) -> BaseException:
    """Note on an error who shows it, by ranks of the whole communicator."""
    error.mpiml_first = first  # type: ignore[attr-defined]
    if rank is not None:
        error.mpiml_rank = rank  # type: ignore[attr-defined]
    return error


def _alike(what: str, found: Sequence[str], records: Sequence[Any]) -> None:
    if len(set(found)) == 1:
        return
    who = []
    for value in dict.fromkeys(found):
        rank = found.index(value)
        label = records[rank].guest
        kind = "Python" if label is None else f"mpiml_attach, {label!r}"
        who.append(f"{value!r} on rank {rank} ({kind})")
    wrong = UsageError(
        f"mpiml: expected one {what} on all ranks, got {' and '.join(who)}. Build libmpiml from the "
        "sources of the installed mpiml, with the compiler wrapper of the MPI that mpi4py uses"
    )
    raise _locate(wrong, next(i for i, record in enumerate(records) if record.guest is None))
