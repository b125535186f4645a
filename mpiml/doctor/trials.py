"""What the doctor tries with the ranks of the job that it was started in. Each is collective.

A trial returns a `Check` on rank 0 and None on the others. It has a time limit of its own, kept
by `mpiml.doctor.job`: a rank that hangs in MPI cannot look at the clock.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpiml.doctor.check import Check
from mpiml.doctor.copying import CURE, allow_reading, read_of
from mpiml.doctor.probe import STEPS
from mpiml.doctor.ranks import CURES, worked

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Place", "any_source", "between", "hosts_agree", "single_copy", "trials"]

ROUNDS = 20
PATIENCE = 10.0  # s, until a message counts as lost
TAG = 7


class Place:
    """Where the ranks of the job are.

    Parameters
    ----------
    hosts
        Number of the host of each rank.
    names
        Its name.
    kind
        The MPI: ``"openmpi"``, ``"mpich"``, ``"intel"`` or None.
    """

    def __init__(self, hosts: Sequence[int], names: Sequence[str], kind: str | None) -> None:
        self.hosts, self.names, self.kind = list(hosts), list(names), kind

    @property
    def several(self) -> bool:
        """Whether there are several hosts."""
        return len(set(self.hosts)) > 1

    def pair(self) -> tuple[int, int]:
        """Return rank 0 and a rank as far from it as there is, or 0 twice."""
        far = [rank for rank, host in enumerate(self.hosts) if host != self.hosts[0]]
        return 0, (far or [min(1, len(self.hosts) - 1)])[0]


def hosts_agree(comm: "MPI.Intracomm", place: Place) -> Check | None:
    """Compare MPI's idea of who shares memory with the names of the hosts. Collective."""
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    assert isinstance(local, MPI.Intracomm)
    first = local.bcast(comm.rank)
    local.Free()
    found = comm.gather(first)
    if found is None:
        return None
    apart = len(set(zip(found, place.hosts, strict=True)))
    mpi, named = len(set(found)), len(set(place.hosts))
    if mpi == named == apart:
        each = "1 host" if named == 1 else f"{named} hosts"
        return Check("hosts", "ok", f"{len(found)} ranks on {each}, to MPI as well")
    return Check(
        "hosts", "warn",
        f"{named} by name and boot, {mpi} by MPI_COMM_TYPE_SHARED",
        "Containers of one host: give its ranks one IPC namespace and /dev/shm (--ipc=host); "
        "host names must differ between hosts.",
    )  # fmt: skip


def any_source(comm: "MPI.Intracomm", place: Place) -> Check | None:
    """Let all ranks write to each other and receive from any source, as programs do. Collective.

    By UCX, MPICH 5.0 loses some of these messages where a host has several ranks and others are
    elsewhere. Where one is lost, the communicator is of no more use, nor MPI_Finalize.
    """
    from mpi4py import MPI

    missing, buffer = ROUNDS * (comm.size - 1), bytearray(64)
    receive = comm.Irecv([buffer, MPI.BYTE], MPI.ANY_SOURCE, TAG)
    out, sent, limit = bytes(8), [], time.monotonic() + PATIENCE
    begun = 0
    while missing and time.monotonic() < limit:
        if begun < ROUNDS:
            begun += 1
            others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
            sent += [comm.Isend([out, MPI.BYTE], other, TAG) for other in others]
        if receive.Test():
            missing -= 1
            limit = time.monotonic() + PATIENCE
            if missing:
                receive = comm.Irecv([buffer, MPI.BYTE], MPI.ANY_SOURCE, TAG)
        else:
            time.sleep(0)
    if not missing:
        MPI.Request.Waitall(sent)
    lost = comm.gather(missing)
    if lost is None:
        return None
    if not any(lost):
        every = comm.size * (comm.size - 1) * ROUNDS
        return Check("any source", "ok", f"all of {every} messages came")
    ranks = ", ".join(str(rank) for rank, count in enumerate(lost) if count)
    return Check(
        "any source", "fail",
        f"{sum(lost)} messages never came to ranks {ranks}, which receive from any source",
        _lossy(place),
    )  # fmt: skip


def _lossy(place: Place) -> str:
    if place.kind == "mpich":
        return (
            "Set MPIR_CVAR_CH4_NETMOD=ofi in the environment of the ranks (`mpiexec -genv "
            "MPIR_CVAR_CH4_NETMOD ofi`) and run the doctor again: UCX loses messages between "
            "hosts that have several ranks."
        )
    return "Use another way between hosts (UCX_TLS=tcp, or --mca pml ob1), or another MPI."


def between(name: str) -> Callable[["MPI.Intracomm", Place], Check | None]:
    """Return the trial of a step of `mpiml.doctor.probe`, between two ranks, far ones if any."""

    def run(comm: "MPI.Intracomm", place: Place) -> Check | None:
        from mpi4py import MPI

        pair = place.pair()
        mine: Any = comm.Split(0 if comm.rank in pair else MPI.UNDEFINED, comm.rank)
        title, state, cure = CURES[name]
        check = None
        if mine != MPI.COMM_NULL:
            mine.Set_errhandler(MPI.ERRORS_RETURN)
            try:
                check = worked(name, STEPS[name](mine))
            except Exception as error:  # whatever it is, it is the finding
                text = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
                check = Check(
                    title, state, f"between ranks {pair[0]} and {pair[1]}: {text}", cure
                )
            mine.Free()
        return check if comm.rank == 0 else None

    return run


def single_copy(comm: "MPI.Intracomm", place: Place) -> Check | None:
    """Read a neighbour's memory as MPI does for long messages in a host. Collective."""
    local = comm.Split(place.hosts[comm.rank], comm.rank)
    word = ctypes.create_string_buffer(f"rank {comm.rank}".encode(), 32)
    allow_reading()
    told = local.allgather((os.getpid(), ctypes.addressof(word), word.value))
    pid, address, expected = told[(local.rank + 1) % local.size]
    why = "" if local.size == 1 else read_of(pid, address, expected)
    local.Barrier()
    local.Free()
    del word
    found = comm.gather(why)
    if found is None:
        return None
    bad = [rank for rank, text in enumerate(found) if text]
    if not bad:
        return Check("single copy", "ok", "ranks of a host can read each other's memory")
    return Check(
        "single copy", "warn",
        f"{found[bad[0]]} (rank {bad[0]} on {place.names[bad[0]]}"
        f"{f', and {len(bad) - 1} more' if len(bad) > 1 else ''})",
        CURE,
    )  # fmt: skip


def trials(place: Place) -> list[tuple[str, Callable[["MPI.Intracomm", Place], Any]]]:
    """Return the trials in their order, each with a name for one that does not end. Local."""
    found: list[tuple[str, Callable[[MPI.Intracomm, Place], Any]]] = [
        ("hosts", hosts_agree),
        ("single copy", single_copy),
    ]
    if len(place.hosts) > 1:
        found += [(name, between(name)) for name in ("threads", "dup", "matched_probe")]
        if not place.several:
            found.append(("shared", between("shared")))
        found.append(("windows", between("windows")))
        # last: what it loses spoils everything after it
        found.append(("any source", any_source))
    return found
