"""The arena: memory that the members of one host map, and the gang that works in it.

The memory is a file in ``/dev/shm`` that has a name only until all have mapped it, so nothing
is left behind however the program ends; threads of one process share one mapping. Room is
asked for before anything is written: a full ``/dev/shm`` is an error here and would be a
SIGBUS later. Each process has the pages of its own members made, on its own NUMA node.
"""

import contextlib
import mmap
import os
import secrets
from typing import Any, NamedTuple

from mpiml._native import Gang, Mapping, gang_bytes
from mpiml.collectives.team import Team
from mpiml.errors import SharedMemoryError

__all__ = ["Arena", "by_process", "make_arena", "private_arena"]

FOLDER = "/dev/shm"
_Memory = mmap.mmap | Mapping
_SPARE = 1 << 20  # bytes that stay free, for the MPI library's own


class Arena(NamedTuple):
    """One member's part in the memory of its host.

    Attributes
    ----------
    memory : mmap.mmap or mpiml._native.Mapping
        All of it. Views keep it alive, after `mpiml.collectives.Bucket.close` too.
    gang : mpiml._native.Gang
        Runs plans on it.
    own_at, shared_at : int
        Where the own segment and the shared result begin, in bytes.
    each : int
        Size of a segment.
    nbytes : int
        Size of the memory.
    """

    memory: _Memory
    gang: Gang
    own_at: int
    shared_at: int
    each: int
    nbytes: int

    def segment(self, nbytes: int) -> memoryview:
        """Return the own segment's first `nbytes` bytes."""
        return memoryview(self.memory)[self.own_at : self.own_at + nbytes]

    def shared(self, nbytes: int) -> memoryview:
        """Return the shared result's first `nbytes` bytes."""
        return memoryview(self.memory)[self.shared_at : self.shared_at + nbytes]


def make_arena(
    team: Team, segment: int, label: Any, box: int = 512, shared: int = 0
) -> Arena | SharedMemoryError:
    """Make memory for the members of each host. Collective over the team.

    Parameters
    ----------
    team : Team
        The members.
    segment, shared, box : int
        Bytes of each member's segment, of the host's shared result, of a mailbox.
    label
        What it is for, in messages.

    Returns
    -------
    Arena or SharedMemoryError
        The same kind on every member: if one cannot have it, none has. Not raised, so that
        the caller may do without.
    """
    size = len(team.local)
    total = gang_bytes(size, box, segment, shared)
    memory = _map(team, total, _own_range(team, size, box, segment, shared), label)
    if isinstance(memory, SharedMemoryError):
        return memory
    return _arena(team, memory, segment, box, shared)


def by_process(team: Team) -> Team:
    """Return the team as if each process were a host of its own. Local.

    To agree and to wait by; operations are run by the team itself, in their order.
    """
    view = Team(
        team.index, team.ranks, team.ranks, team.comm, team.room, team.names, team.title,
        team.hooks, team.spin_us, team.yield_us, team.worker,
    )  # fmt: skip
    team.closes(view.close)
    return view


def private_arena(
    team: Team, segment: int, label: Any, box: int = 512, shared: int = 0
) -> Arena:
    """Make memory that only the members of this process share. Collective over the team.

    Parameters
    ----------
    team : Team
        Whose hosts are its processes: `by_process` made it.
    segment, label, box, shared
        As for `make_arena`.

    Raises
    ------
    SharedMemoryError
        A process has no room for it. On all members.
    """
    total = gang_bytes(len(team.local), box, segment, shared)

    memory, wrong = team.share(b"", lambda _: _own_memory(total), label)
    said = team.exchange(wrong.encode(), label)
    for name, text in zip(team.names, said, strict=True):
        if text:
            raise SharedMemoryError(
                f"{label}: expected {total:,} bytes of memory on every member; {name} got "
                f"{text.decode(errors='replace')!r}. Give the process more (ulimit -v, the "
                "container's limit), or use a smaller tree."
            )
    return _arena(team, memory, segment, box, shared)


def _own_memory(total: int) -> tuple[mmap.mmap | None, str]:
    """Return memory of this process, or why there is none."""
    try:
        return mmap.mmap(-1, total), ""
    except (OSError, OverflowError) as error:
        return None, f"{getattr(error, 'strerror', None) or error}"


def _arena(team: Team, memory: _Memory, segment: int, box: int, shared: int) -> Arena:
    size = len(team.local)
    place = team.local.index(team.index)
    total = gang_bytes(size, box, segment, shared)
    gang = Gang(
        memory, place, size, box, segment, shared, team.spin_us, team.yield_us,
        team.in_one_process,
    )  # fmt: skip
    return Arena(memory, gang, gang.segment_at(place), gang.shared_at, segment, total)


def _own_range(team: Team, size: int, box: int, segment: int, shared: int) -> tuple[int, int]:
    """Return begin and end of what this process has made: its members', the first one's all else."""
    places = [team.local.index(i) for i in team.housemates]
    head = gang_bytes(size, box, 0, 0)
    each = (gang_bytes(size, box, segment, 0) - head) // size
    begin = 0 if places[0] == 0 else head + places[0] * each
    # members of a process need not stand side by side; what lies between comes twice, unharmed
    end = head + (places[-1] + 1) * each
    if places[0] == 0 and shared:
        end = gang_bytes(size, box, segment, shared)
    return begin, end


def _map(
    team: Team, total: int, own: tuple[int, int], label: Any
) -> _Memory | SharedMemoryError:
    if len(team.local) == len(team.housemates) and not team.several_hosts:
        made: tuple[_Memory | None, str] = team.share(b"", lambda _: _own_memory(total), label)
        memory, why = made
        if memory is None:
            return _refusal(team, [f"needs {total:,} bytes of memory: {why}".encode()])
        return memory
    first = team.index == team.local[0]
    said = team.exchange(_room(total).encode() if first else b"", label)
    if any(said):
        return _refusal(team, said)
    token = secrets.token_hex(8).encode() if first else b""

    def open_file(tokens: list[bytes]) -> tuple[str, Mapping | None, str]:
        path = f"{FOLDER}/mpiml-{tokens[team.local[0]].decode()}"
        return path, *_open(path, total, own)

    path, memory, identity = team.share(token, open_file, label)
    said = team.exchange(identity.encode(), label)
    # All have it open. Each removes it, since a process may see another folder than the rest.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    problems = _compare(team, said)
    if any(problems):
        return _refusal(team, problems)
    return memory  # type: ignore[no-any-return]


def _room(total: int) -> str:
    """Return what is wrong with the room in ``/dev/shm``, or nothing."""
    try:
        free = os.statvfs(FOLDER)
    except OSError as error:
        return f"{FOLDER}: {error.strerror}"
    available = free.f_bavail * free.f_frsize
    if total + _SPARE <= available:
        return ""
    return f"needs {total:,} bytes in {FOLDER}, which has {available:,} free"


def _open(path: str, total: int, own: tuple[int, int]) -> tuple[Mapping | None, str]:
    """Map the file, made by whoever comes first; the second part tells which file it was."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        try:
            os.ftruncate(fd, total)
            if own[1] > own[0]:
                os.posix_fallocate(fd, own[0], own[1] - own[0])
            found = os.fstat(fd)
            memory = Mapping(fd, total)
        finally:
            os.close(fd)
    except OSError as error:
        return None, f"!{FOLDER}: {error.strerror or error}, for {total:,} bytes"
    return memory, f"{found.st_dev}.{found.st_ino}"


def _compare(team: Team, said: list[bytes]) -> list[bytes]:
    """Return for each member what is wrong: an error of its own, or another file than its host's."""
    first: dict[int, bytes] = {}
    for host, text in zip(team.hosts, said, strict=True):
        first.setdefault(host, text)
    problems = []
    for host, text in zip(team.hosts, said, strict=True):
        if text.startswith(b"!"):
            problems.append(text[1:])
        elif text != first[host] and not first[host].startswith(b"!"):
            problems.append(f"sees another {FOLDER} than the others of its host".encode())
        else:
            problems.append(b"")
    return problems


def _refusal(team: Team, said: list[bytes]) -> SharedMemoryError:
    who = next(i for i, text in enumerate(said) if text)
    return SharedMemoryError(
        f"{team.title}: expected shared memory on every host; {team.names[who]} "
        f"{said[who].decode(errors='replace')}. Give the container more (docker: --shm-size=8g, "
        "Kubernetes: an emptyDir of medium Memory on /dev/shm), use a smaller tree, or pass "
        "fallback=True to send messages instead."
    )
