"""Where MPI begins: the only place that starts it, and that makes and frees communicators.

Everything mpiml sends travels on duplicates made here, once, on the main thread. What MPI
libraries do differently is known here and nowhere above.
"""

import atexit
import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

from mpi4py import rc

# MPI is initialised by `start`, once it is decided that this process uses it. So this module
# is imported only on the way there: whoever imports mpi4py.MPI after it gets it as it is.
_initialize, rc.initialize = rc.initialize, False

from mpi4py import MPI  # noqa: E402

rc.initialize = _initialize

from mpiml import threads  # noqa: E402
from mpiml.errors import UsageError  # noqa: E402
from mpiml.initializing import initialize  # noqa: E402

__all__ = [
    "World",
    "attached",
    "called_here",
    "check_threads",
    "described",
    "finish",
    "library",
    "own_duplicate",
    "ranks_by_host",
    "single",
    "start",
    "unname",
]

# Open MPI 5 prints osc_ucx errors at the first window, and a waiting rank keeps its core
# unless told to yield: 4 ranks on 2 cores need 16 ms for a barrier without, 9 us with it.
_QUIRKS = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_mpi_yield_when_idle": "true"}
_starting = Lock()
_started_by: int | None = None  # the process that initialised MPI here, if it was we
_given_up = False  # whether a program has left communication behind that nobody will complete
_FIRST = 1.0  # s, that rank 0, which shows what went wrong, is ahead in ending the job


def start() -> MPI.Intracomm:
    """Initialise MPI with full thread support, if nobody has, and return COMM_WORLD.

    Collective over COMM_WORLD. Where the library has less, rank 0 says so, and it goes on.

    Raises
    ------
    UsageError
        If MPI was finalised already, or runs with ``MPI_THREAD_SINGLE``.
    """
    global _started_by
    if MPI.Is_finalized():
        raise UsageError("mpiml: MPI has been finalised in this process; start a new one")
    with _starting:  # it is long, and other threads run meanwhile
        if not MPI.Is_initialized():
            with _quirks():
                initialize()
            _started_by = os.getpid()
            atexit.register(finish)
            if MPI.Query_thread() < MPI.THREAD_MULTIPLE and MPI.COMM_WORLD.rank == 0:
                sys.stderr.write(
                    f"mpiml: {library()} gives {threads.name(_level())}, so the main thread "
                    "of each rank makes all calls of MPI; docs/inside.md says what is missing then\n"
                )
    check_threads()
    return MPI.COMM_WORLD


@contextlib.contextmanager
def _quirks() -> Iterator[None]:
    """Set what MPI reads when it starts, for so long only: jobs of a child are not ours."""
    added = {name: value for name, value in _QUIRKS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def check_threads() -> None:
    """Note the thread level of MPI; refuse one, or a thread, with which nothing works.

    Raises
    ------
    UsageError
        MPI is finalised, runs with ``MPI_THREAD_SINGLE``, or this thread may not call it.
    """
    if MPI.Is_finalized():
        raise UsageError(
            "mpiml: MPI has been finalised in this process; use mpiml before MPI.Finalize()"
        )
    threads.settle(_level(), MPI.Is_thread_main(), library())


@contextlib.contextmanager
def called_here() -> Iterator[None]:
    """Let this thread call MPI for a program; refuse one that may not, before it does. Local.

    Raises
    ------
    UsageError
        MPI runs with less than ``MPI_THREAD_SERIALIZED``, and was initialised by another; or with
        that, and a program of another thread runs.
    """
    level = _level()
    threads.check_main(level, MPI.Is_thread_main())
    with threads.at_home(level):
        yield


def _level() -> int:
    """Return the thread level of MPI, as `mpiml.threads` numbers them. Local."""
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED)
    level = MPI.Query_thread()
    return levels.index(level) if level in levels else threads.MULTIPLE


def finish(status: int = 1) -> None:
    """Finalise MPI if `start` initialised it; a second call, or a forked child's, does nothing.

    Collective over COMM_WORLD. Where a program was given up, MPI_Finalize would wait for its
    messages, perhaps for ever: then the job is ended instead, with `status`.
    """
    global _started_by
    if _started_by != os.getpid() or MPI.Is_finalized():
        return
    _started_by = None
    if not _given_up:
        MPI.Finalize()
        return
    if MPI.COMM_WORLD.rank:
        time.sleep(_FIRST)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.write(
            "mpiml: a program was given up while nodes of it ran on, so MPI cannot be "
            f"finalised: all ranks of the job end now, with status {status}\n"
        )
        sys.stderr.flush()
    _abort(MPI.COMM_WORLD, status)


def _abort(comm: MPI.Comm, status: int) -> None:
    import threading

    timer = threading.Timer(3.0, os._exit, (status,))  # should the library not do it
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no new threads while the interpreter ends
        timer.start()
    comm.Abort(status)
    os._exit(status)


def described() -> str:
    """Return all that the MPI library says of itself; may be asked before `start`. Local."""
    return MPI.Get_library_version()


def library() -> str:
    """Return name and version of the MPI library, on one line."""
    return MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")


_keyval: int | None = None


def attached(comm: MPI.Intracomm, make: Callable[[MPI.Intracomm], Any]) -> Any:
    """Return what `make` has made for this communicator, once; closed when that is freed.

    Collective over `comm`, if `make` is. What is made has a ``close()``.
    """
    global _keyval
    if MPI.Is_finalized():
        check_threads()
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: value.close())
    found = comm.Get_attr(_keyval)
    if found is None:
        found = make(comm)
        comm.Set_attr(_keyval, found)
    return found


def own_duplicate(comm: MPI.Intracomm, name: str) -> MPI.Intracomm:
    """Return a communicator of the same ranks for messages of our own. Collective.

    Not a duplicate by MPI's `Dup`: hints and attributes of the user's do not come along.
    """
    own: Any = comm.Split(0, comm.rank)
    own.Set_name(name)
    own.Set_errhandler(MPI.ERRORS_RETURN)
    return own  # type: ignore[no-any-return]


def ranks_by_host(comm: MPI.Intracomm, pretended: int | None = None) -> list[int]:
    """Return for each rank the number of its host, in the order of their first ranks.

    Collective over `comm`. Hosts are what ``MPI_COMM_TYPE_SHARED`` says.

    Parameters
    ----------
    comm
        The communicator.
    pretended
        For tests: ranks that a host has at most.
    """
    local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    first = local.bcast(comm.rank)
    part = 0 if pretended is None else local.rank // pretended
    local.Free()
    keys = comm.allgather((first, part))
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


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

    Attributes
    ----------
    roles, folded
        By role, its communicator: with a rank for each replica; or, where replicas share
        ranks, with a rank for each of these, which only mpiml itself uses.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        # Not a duplicate: what the user attached to `comm` is no promise of ours. A hint such
        # as mpi_assert_allow_overtaking, which libraries before MPI-4 copy, would break us.
        self.engine_comm = own_duplicate(comm, "mpiml engine")
        self.user_comm = comm.Dup()
        self.user_comm.Set_name("mpiml world")
        self.roles: dict[int, MPI.Intracomm] = {}
        self.folded: dict[int, MPI.Intracomm] = {}
        self._teams: dict[int, MPI.Intracomm] = {}
        self._memory: mmap.mmap | None = None
        self._closed = False
        for own in (self.engine_comm, self.user_comm):
            own.Set_errhandler(MPI.ERRORS_RETURN)

    def split_roles(self, layers: list[tuple[int, int, int, bool]]) -> None:
        """Make role communicators. Collective: one split for each entry, on all ranks.

        Parameters
        ----------
        layers
            For each split ``(role, colour, key, folded)``; a colour of -1 takes no part.
        """
        for role, colour, key, folded in layers:
            comm: Any = self.user_comm.Split(colour if colour >= 0 else MPI.UNDEFINED, key)
            if comm != MPI.COMM_NULL:
                comm.Set_name(f"mpiml role {role}")
                (self.folded if folded else self.roles)[role] = comm
        for own in (self.user_comm, *self.roles.values()):
            _warm(own)

    def team_comm(self, role: int) -> MPI.Intracomm:
        """Return a communicator of a role's ranks that the user does not have.

        Collective over the role.
        """
        self._teams[role] = own_duplicate(self.roles[role], f"mpiml team of role {role}")
        return self._teams[role]

    def prepare(self, path: str | None, lines: dict[int, int], keep: bool = False) -> Any:
        """Map a cache line for each rank of this host.

        Collective: one barrier. All ranks of a host open the same file, whoever comes
        first makes it, and it has no name any more when this returns, so nothing is left
        behind. Each marks its own line: a rank that cannot map the file, or has another
        ``/dev/shm`` under the same host name, is not in `lines` afterwards.

        Parameters
        ----------
        path
            The file; None: no shared memory.
        lines
            Line of each rank of this host; those that do not share it are removed.
        keep
            Let the file have its name: others are to map it too.

        Returns
        -------
        mmap or None
            The memory.
        """
        comm = self.engine_comm
        memory = _map(path, 64 * len(lines)) if path is not None else None
        if memory is not None:
            _mark(memory, lines[comm.rank])
        comm.Barrier()  # all have marked their lines
        if memory is not None and path is not None:
            if not keep:
                unname(path)
            for rank, line in list(lines.items()):
                if not _is_marked(memory, line):
                    del lines[rank]
        self._memory = memory
        return memory

    def abort(self, status: int) -> None:
        """End every process of the job with `status`; never returns."""
        _abort(self.engine_comm, status)

    def give_up(self) -> None:
        """Note that messages are left that nobody will receive; instead of `close`. Local."""
        global _given_up
        if not MPI.Is_finalized():
            _given_up = _given_up or self.engine_comm.size > 1

    def close(self, spoiled: bool = False) -> None:
        """Free everything. Collective; a second call does nothing.

        Parameters
        ----------
        spoiled
            Collectives may have ended in their midst: their communicators stay, since an MPI
            gives the next one the same number, and with it the messages that are left.
        """
        if self._closed:
            return
        self._closed = True
        teams = [comm for _, comm in sorted(self._teams.items())]  # made in any order
        collectives = [] if spoiled else [*teams, *self.folded.values()]
        for comm in (*collectives, *self.roles.values(), self.user_comm, self.engine_comm):
            if comm != MPI.COMM_NULL:
                comm.Free()
        self.roles.clear()
        self.folded.clear()


def unname(path: str) -> None:
    """Take the name of a file away, if it has one still: who has mapped it keeps it. Local."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


_MARK, _AT = b"mpiml\0\1\n", 56  # in the last bytes of a line; a bell uses the first


def _map(path: str, size: int) -> mmap.mmap | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a full /dev/shm is an error here, a SIGBUS later
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError:
        return None


def _mark(memory: mmap.mmap, line: int) -> None:
    start = 64 * line + _AT
    memory[start : start + len(_MARK)] = _MARK


def _is_marked(memory: mmap.mmap, line: int) -> bool:
    start = 64 * line + _AT
    return memory[start : start + len(_MARK)] == _MARK


def _warm(comm: Any) -> None:
    """Let mpi4py make what it needs for pickled reductions. Collective over `comm`.

    It duplicates the communicator at the first one and holds the interpreter lock until all
    ranks have come (mpi4py #784): this rank's other threads would stand still so long, and a
    rank that waits for an answer of theirs before it comes would wait for ever.
    """
    if comm.size > 1:
        comm.allreduce(0)
