"""What the ranks of a program tell each other before it starts: fixed records, a number, a text.

MPI's own trees carry it. Only `exchange_record` leaves something of every rank on every rank.
"""

from array import array
from itertools import accumulate

from mpiml.errors import UsageError
from mpiml.world import library  # first: it settles that importing MPI initialises nothing

from mpi4py import MPI  # isort: skip

__all__ = ["broadcast", "exchange_record", "exchange_text", "library", "lowest", "spread"]

_MOST = (1 << 31) - 1  # bytes; the counts and offsets of Allgatherv are 32-bit numbers


def exchange_record(comm: MPI.Intracomm, record: bytes) -> list[bytes]:
    """Give every rank the fixed-size `record` of each rank. Collective over `comm`."""
    size = len(record)
    everything = bytearray(size * comm.size)
    comm.Allgather([record, MPI.BYTE], [everything, MPI.BYTE])
    return [bytes(everything[i * size : (i + 1) * size]) for i in range(comm.size)]


def exchange_text(comm: MPI.Intracomm, text: bytes) -> list[bytes]:
    """Give every rank the bytes of each rank. Collective over `comm`.

    Raises
    ------
    UsageError
        On every rank, if they are over 2 GiB together.
    """
    lengths = exchange_record(comm, len(text).to_bytes(8, "little"))
    sizes = [int.from_bytes(length, "little") for length in lengths]
    *starts, total = accumulate(sizes, initial=0)
    if total > _MOST:
        raise UsageError(
            f"mpiml: expected at most {_MOST} bytes from all ranks to compare their programs or "
            f"to tell their errors, got {total}, the most of them from rank "
            f"{sizes.index(max(sizes))}. Let nodes load large arguments themselves."
        )
    everything = bytearray(total)
    comm.Allgatherv([text, MPI.BYTE], [everything, sizes, starts, MPI.BYTE])
    return [bytes(everything[s : s + n]) for s, n in zip(starts, sizes, strict=True)]


def lowest(comm: MPI.Intracomm, value: int) -> int:
    """Return the lowest number of all ranks. Collective over `comm`: one reduction."""
    found = array("q", [value])
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MIN)
    return found[0]


def spread(comm: MPI.Intracomm, data: bytes, root: int) -> bytes:
    """Give every rank the bytes of `root`, at most 2 GiB. Collective: two broadcasts."""
    length = broadcast(comm, len(data).to_bytes(8, "little"), 8, root)
    return broadcast(comm, data, int.from_bytes(length, "little"), root)


def broadcast(comm: MPI.Intracomm, data: bytes, length: int, root: int) -> bytes:
    """Give every rank the `length` bytes of `root`. Collective: one broadcast."""
    held = bytearray(data) if comm.rank == root else bytearray(length)
    comm.Bcast([held, MPI.BYTE], root)
    return bytes(held)
