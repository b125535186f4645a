"""Where MPI begins: the only place that starts it, and that makes and frees communicators.

Everything mpiml sends travels on duplicates made here, once, on the main thread. What MPI
libraries do differently is known here and nowhere above.
"""

import atexit
import mmap
import os
from typing import Any

from mpi4py import rc

rc.initialize = False  # importing mpiml's modules must not start MPI

from mpi4py import MPI  # noqa: E402

from mpiml.errors import UsageError  # noqa: E402

__all__ = ["World", "exchange_record", "exchange_text", "library", "start"]

# Open MPI 5 prints osc_ucx errors at the first window, and a waiting rank keeps its core
# unless told to yield: 4 ranks on 2 cores need 16 ms for a barrier without, 9 us with it.
_QUIRKS = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_mpi_yield_when_idle": "true"}
_started_here = False


def start() -> MPI.Intracomm:
    """Initialise MPI with full thread support, if nobody has, and return COMM_WORLD.

    Collective over COMM_WORLD.

    Raises
    ------
    UsageError
        If MPI was finalised already, or runs without ``MPI_THREAD_MULTIPLE``.
    """
    global _started_here
    if MPI.Is_finalized():
        raise UsageError("mpiml: MPI has been finalised in this process; start a new one")
    if not MPI.Is_initialized():
        for name, value in _QUIRKS.items():
            os.environ.setdefault(name, value)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _started_here = True
        atexit.register(finish)
    check_threads()
    return MPI.COMM_WORLD


def check_threads() -> None:
    """Refuse an MPI that was started without full thread support."""
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        names = {0: "SINGLE", 1: "FUNNELED", 2: "SERIALIZED"}
        raise UsageError(
            f"mpiml: expected MPI_THREAD_MULTIPLE, got MPI_THREAD_{names.get(level, level)} from "
            f"{library()}. Initialise MPI with MPI_Init_thread(MPI_THREAD_MULTIPLE); mpi4py does "
            "so unless mpi4py.rc says otherwise. Lower levels come with mpiml.poll()."
        )


def finish() -> None:
    """Finalise MPI if `start` initialised it; a second call does nothing."""
    global _started_here
    if _started_here and not MPI.Is_finalized():
        _started_here = False
        MPI.Finalize()


def library() -> str:
    """Return name and version of the MPI library, on one line."""
    return MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")


def exchange_record(comm: MPI.Intracomm, record: bytes) -> list[bytes]:
    """Give every rank the fixed-size `record` of each rank. Collective over `comm`."""
    size = len(record)
    everything = bytearray(size * comm.size)
    comm.Allgather([record, MPI.BYTE], [everything, MPI.BYTE])
    return [bytes(everything[i * size : (i + 1) * size]) for i in range(comm.size)]


def exchange_text(comm: MPI.Intracomm, text: bytes) -> list[bytes]:
    """Give every rank the bytes of each rank, of any length. Collective over `comm`."""
    lengths = exchange_record(comm, len(text).to_bytes(8, "little"))
    sizes = [int.from_bytes(length, "little") for length in lengths]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    everything = bytearray(sum(sizes))
    comm.Allgatherv([text, MPI.BYTE], [everything, sizes, starts, MPI.BYTE])
    return [bytes(everything[s : s + n]) for s, n in zip(starts, sizes, strict=True)]


def single() -> "World":
    """Return the communicators of a process that was started without a launcher."""
    start()
    return World(MPI.COMM_SELF)


class World:
    """The communicators of one program, and the memory its ranks share for wake-ups.

    Collective over `comm`: construction, `split_roles` and `close`.

    Parameters
    ----------
    comm
        The communicator the program was given; it is duplicated and never used afterwards.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.engine_comm = comm.Dup()
        self.engine_comm.Set_name("mpiml engine")
        self.user_comm = comm.Dup()
        self.user_comm.Set_name("mpiml world")
        self.roles: dict[int, MPI.Intracomm] = {}
        self._memory: mmap.mmap | None = None
        self._closed = False
        for own in (self.engine_comm, self.user_comm):
            own.Set_errhandler(MPI.ERRORS_RETURN)

    def split_roles(self, layers: list[tuple[int, int, int]]) -> None:
        """Make role communicators. Collective: one split for each entry, on all ranks.

        Parameters
        ----------
        layers
            For each split ``(role, colour, key)``; a colour of -1 takes no part.
        """
        for role, colour, key in layers:
            comm = self.user_comm.Split(colour if colour >= 0 else MPI.UNDEFINED, key)
            if comm != MPI.COMM_NULL:
                comm.Set_name(f"mpiml role {role}")
                self.roles[role] = comm

    def matched_probe_works(self) -> bool:
        """Send this rank a message and take it in by a matched probe.

        Collective: all ranks of the program agree. Some fabrics do not match probes.
        """
        comm = self.engine_comm
        works = bytearray(1)
        request = comm.Isend([b"probe", MPI.BYTE], comm.rank, 3)
        for _ in range(100_000):
            message = comm.Improbe(comm.rank, 3)
            if message is not None:
                data = bytearray(5)
                message.Recv(data)
                works[0] = data == b"probe"
                break
        else:
            comm.Recv(bytearray(5), comm.rank, 3)
        request.Wait()
        comm.Allreduce(MPI.IN_PLACE, [works, MPI.BYTE], MPI.BAND)
        return bool(works[0])

    def bell_memory(self) -> tuple[Any, dict[int, int]] | None:
        """Map one cache line for each rank of this host; None where that fails for any rank.

        Collective. The file has no name once all have mapped it, so nothing is left behind.
        """
        comm = self.engine_comm
        host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        size = 64 * host.size
        path, memory = b"", None
        if host.rank == 0:
            name = f"/dev/shm/mpiml-{os.getpid()}-{os.urandom(6).hex()}".encode()
            memory = _map(name, size, os.O_CREAT | os.O_EXCL)
            path = name if memory is not None else b""
        buffer = bytearray(path.ljust(96, b"\0"))
        host.Bcast([buffer, MPI.BYTE], 0)
        if host.rank:
            path = bytes(buffer).rstrip(b"\0")
            memory = _map(path, size, 0) if path else None
        everywhere = bytearray([memory is not None])
        comm.Allreduce(MPI.IN_PLACE, [everywhere, MPI.BYTE], MPI.BAND)
        if host.rank == 0 and path:
            os.unlink(path)
        lines = {rank: i for i, rank in enumerate(_members(host, comm))}
        host.Free()
        if not everywhere[0] or memory is None:
            return None
        self._memory = memory
        return memory, lines

    def abort(self, status: int) -> None:
        """End every process of the job with `status`; never returns."""
        import threading

        timer = threading.Timer(3.0, os._exit, (status,))  # should the library not do it
        timer.daemon = True
        timer.start()
        self.engine_comm.Abort(status)
        os._exit(status)

    def close(self) -> None:
        """Free everything. Collective; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for comm in (*self.roles.values(), self.user_comm, self.engine_comm):
            if comm != MPI.COMM_NULL:
                comm.Free()
        self.roles.clear()


def _map(path: bytes, size: int, flags: int) -> mmap.mmap | None:
    try:
        fd = os.open(path, os.O_RDWR | flags, 0o600)
        try:
            if flags:
                os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError:
        return None


def _members(part: MPI.Intracomm, whole: MPI.Intracomm) -> list[int]:
    """Return the ranks in `whole` of the members of `part`, in the order of `part`."""
    ours, all_ = part.Get_group(), whole.Get_group()
    ranks = MPI.Group.Translate_ranks(ours, list(range(part.size)), all_)
    ours.Free()
    all_.Free()
    return list(ranks)
