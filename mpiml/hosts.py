"""What is where: hosts, cores and GPUs, as a plain table.

Each rank finds its own `Facts`; the launch handshake gathers their bytes, and every rank
builds the same `Hosts` from the list. Cores are counted by the affinity mask, the control
group and the launcher, never by the machine's total: a job that believes it owns the whole
machine starts too many threads and slows its neighbours and itself.
"""

import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpiml.config import Config
from mpiml.errors import UsageError
from mpiml.machine import affinity, folder_number, group_quota, read_text, visible_gpus

__all__ = [
    "FACTS_SIZE",
    "FACTS_VERSION",
    "Facts",
    "Hosts",
    "Row",
    "cores_available",
    "group_quota",
    "local_facts",
]

FACTS_VERSION = 1
"""First byte of packed facts; a rank that reads another one refuses it."""

_NAME_BYTES = 64
_CORE_BITS = 2048
_GPU_BITS = 64

# version, flags (1: GPUs private, 2: GPUs hidden), length of the name, -, cores given by the
# launcher, quota in cores (0: none), machine, GPU mask, name, core mask, threads, cores of the
# launcher, working folder; little endian, no padding; what is 0 is not known
_LAYOUT = struct.Struct(f"<BBBxIdQQ{_NAME_BYTES}s{_CORE_BITS // 8}sHHI")

FACTS_SIZE = _LAYOUT.size
"""Bytes of one packed `Facts`."""


class Facts(NamedTuple):
    """What one rank knows about the place where it runs.

    Attributes
    ----------
    name
        Host name, at most 64 bytes of UTF-8.
    cores
        Numbers of the cores in the affinity mask.
    quota
        Cores that the control group grants, or None.
    gpus
        Numbers of the devices this rank sees, as ``CUDA_VISIBLE_DEVICES`` spells them; where
        that holds UUIDs, their positions.
    given
        Cores that the launcher gave this rank, or 0 where it does not say.
    machine
        A number that differs between two machines of the same name, or 0.
    gpus_private
        Device numbers of this rank mean devices that no other rank sees.
    gpus_hidden
        There are devices, but ``CUDA_VISIBLE_DEVICES`` shows none of them.
    threads
        First number in ``OMP_NUM_THREADS``, or 0.
    around
        Cores in the affinity mask of the parent, which is the launcher's process on this host:
        more than in the own mask where the rank was bound. 0 where that is not known.
    folder
        A number made of the path of the working folder; 1 where that is missing, 0 where nothing
        is known of it.
    """

    name: str
    cores: frozenset[int]
    quota: float | None = None
    gpus: tuple[int, ...] = ()
    given: int = 0
    machine: int = 0
    gpus_private: bool = False
    gpus_hidden: bool = False
    threads: int = 0
    around: int = 0
    folder: int = 0

    def pack(self) -> bytes:
        """Return the facts as `FACTS_SIZE` bytes; cores above 2047 and GPUs above 63 drop out.

        Local: no MPI.
        """
        name = self.name.encode()[:_NAME_BYTES]
        return _LAYOUT.pack(
            FACTS_VERSION,
            self.gpus_private | self.gpus_hidden << 1,
            len(name),
            min(self.given, 0xFFFFFFFF),
            self.quota or 0.0,
            self.machine,
            _mask(self.gpus, _GPU_BITS),
            name,
            _mask(self.cores, _CORE_BITS).to_bytes(_CORE_BITS // 8, "little"),
            min(self.threads, 0xFFFF),
            min(self.around, 0xFFFF),
            self.folder,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> "Facts":
        """Read what `pack` wrote.

        Local: no MPI.

        Raises
        ------
        UsageError
            The bytes have another length or version: ranks run different versions of mpiml.
        """
        if len(data) != FACTS_SIZE or data[0] != FACTS_VERSION:
            version = data[0] if len(data) else None
            raise UsageError(
                f"launch: expected facts of {FACTS_SIZE} bytes, version {FACTS_VERSION}; got "
                f"{len(data)} bytes, version {version}. Install the same mpiml for all ranks."
            )
        _, flags, length, given, quota, machine, gpus, name, cores, *rest = _LAYOUT.unpack(data)
        return cls(
            name[:length].decode(errors="replace"),
            frozenset(_bits(int.from_bytes(cores, "little"))),
            quota or None,
            tuple(_bits(gpus)),
            given,
            machine,
            bool(flags & 1),
            bool(flags & 2),
            *rest,
        )


def _mask(numbers: Iterable[int], bits: int) -> int:
    mask = 0
    for number in numbers:
        if number < bits:
            mask |= 1 << number
    return mask


def _bits(mask: int) -> list[int]:
    return [i for i, bit in enumerate(f"{mask:b}"[::-1]) if bit == "1"]


def cores_available(affinity: int, quota: float | None = None, given: int = 0) -> int:
    """Return the cores that may be used, at least 1.

    Local: no MPI.

    Parameters
    ----------
    affinity
        Cores in the affinity mask.
    quota
        Cores that the control group grants; None for no limit.
    given
        Cores that the launcher gave; 0 where it does not say.
    """
    limits = [float(affinity)]
    if quota:
        limits.append(quota)
    if given:
        limits.append(given)
    return max(1, int(min(limits)))


def local_facts(config: Config | None = None) -> Facts:
    """Find the facts of this process.

    Local: no MPI; reads a few small files below ``/proc`` and ``/sys``.
    """
    config = Config.read() if config is None else config
    boot = read_text("/proc/sys/kernel/random/boot_id") or ""
    digits = boot.strip().replace("-", "")[:16]
    gpus = visible_gpus(config.cuda_visible_devices)
    return Facts(
        name=os.uname().nodename.encode()[:_NAME_BYTES].decode(errors="ignore") or "localhost",
        cores=affinity(),
        quota=group_quota(read_text("/proc/self/cgroup") or "", read_text),
        gpus=gpus,
        given=config.cpus_per_task or 0,
        machine=int(digits, 16) if digits.isalnum() else 0,
        gpus_private=config.gpus_private or _named(config.cuda_visible_devices),
        gpus_hidden=not gpus and _hides(config),
        threads=config.omp_threads or 0,
        around=_around(config),
        folder=folder_number(),
    )


def _around(config: Config) -> int:
    cores = len(affinity(os.getppid()))
    if (
        config.launcher == "slurm"
    ):  # whose daemon may run on all cores, also those of other jobs
        return min(cores, config.cpus_on_node or cores)
    return cores


def _named(visible: str | None) -> bool:
    """Tell whether a rank is shown one device by its UUID: another rank's is another one."""
    return visible is not None and visible.startswith(("GPU-", "MIG-")) and "," not in visible


def _hides(config: Config) -> bool:
    return config.cuda_visible_devices is not None and bool(visible_gpus(None))


class Row(NamedTuple):
    """One host: its name, its ranks in order, the cores its ranks may use, its GPUs."""

    name: str
    ranks: tuple[int, ...]
    cores: int
    gpus: int


class Hosts:
    """The table of hosts, from the facts of all ranks.

    Local: no MPI. Hosts stand in the order of their lowest rank. Two machines of the same
    name are two hosts.

    Parameters
    ----------
    facts
        One for each rank, in rank order.
    host_size
        Pretend that a host has at most so many ranks (``MPIML_HOST_SIZE``, for tests); cores
        and GPUs of a host are divided between the pretend ones.

    Attributes
    ----------
    rows : tuple of Row
        One for each host.
    size : int
        Number of ranks.
    """

    __slots__ = ("_devices", "_hosts", "rows", "size")

    def __init__(self, facts: Sequence[Facts], host_size: int | None = None) -> None:
        self.size = len(facts)
        groups: dict[tuple[str, int], list[int]] = {}
        for rank, fact in enumerate(facts):
            groups.setdefault((fact.name, fact.machine), []).append(rank)
        rows: list[Row] = []
        alike_once: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}
        self._devices: list[tuple[tuple[int, int], ...]] = [()] * self.size
        for (name, _), ranks in groups.items():
            step = host_size or len(ranks)
            parts = [ranks[i : i + step] for i in range(0, len(ranks), step)]
            cores = _host_cores([facts[rank] for rank in ranks])
            pool = sorted({key for rank in ranks for key in _keys(rank, facts[rank])})
            alike = [key for key in pool if key[0] < 0]
            for i, part in enumerate(parts):
                low, high = (len(alike) * k // len(parts) for k in (i, i + 1))
                mine = {key for key in pool if key[0] in part} | set(alike[low:high])
                for rank in part:
                    seen = tuple(key for key in _keys(rank, facts[rank]) if key in mine)
                    self._devices[rank] = alike_once.setdefault(seen, seen)
                label = name if len(parts) == 1 else f"{name}/{i}"
                share = max(1, cores * len(part) // len(ranks))
                rows.append(Row(label, tuple(part), share, len(mine)))
        self.rows = tuple(sorted(rows, key=lambda row: row.ranks[0]))
        self._hosts = array("i", bytes(4 * self.size))  # lasts, on each rank: 4 bytes a rank
        for host, row in enumerate(self.rows):
            for rank in row.ranks:
                self._hosts[rank] = host

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], cores: int = 1, gpus: int = 0) -> "Hosts":
        """Return a table of hosts with so many ranks, alike otherwise: a sketch, for dry runs.

        Local: no MPI. Names are ``host0``, ``host1``, ...; ranks are dealt in blocks.
        """
        mask, devices = frozenset(range(cores)), tuple(range(gpus))
        return cls(
            [
                Facts(f"host{host}", mask, gpus=devices)
                for host, size in enumerate(sizes)
                for _ in range(size)
            ]
        )

    def host_of(self, rank: int) -> int:
        """Return the index in `rows` of a rank's host."""
        return self._hosts[rank]

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.rows[self.host_of(rank)].name

    def local_rank(self, rank: int) -> int:
        """Return a rank's number among the ranks of its host."""
        return bisect_left(self.rows[self._hosts[rank]].ranks, rank)

    def local_size(self, rank: int) -> int:
        """Return how many ranks a rank's host has."""
        return len(self.rows[self.host_of(rank)].ranks)

    def threads_per_rank(self, rank: int) -> int:
        """Return the cores of a rank's host divided by its ranks, at least 1."""
        row = self.rows[self.host_of(rank)]
        return max(1, row.cores // len(row.ranks))

    def oversubscribed(self, rank: int) -> bool:
        """Tell whether a rank's host has more ranks than cores, so that spinning hurts."""
        row = self.rows[self.host_of(rank)]
        return len(row.ranks) > row.cores

    def crowd(self, rank: int) -> float:
        """Return how many ranks of a rank's host there are for each of its cores, at least 1."""
        row = self.rows[self.host_of(rank)]
        return max(1.0, len(row.ranks) / row.cores)

    def devices(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return what GPUs a rank may use, as (owner, device number).

        The owner is -1 for a device that the ranks of the host see alike, else the only rank
        that sees it.
        """
        return self._devices[rank]


def _keys(rank: int, fact: Facts) -> list[tuple[int, int]]:
    return [(rank if fact.gpus_private else -1, gpu) for gpu in fact.gpus]


def _host_cores(facts: Sequence[Facts]) -> int:
    mask: frozenset[int] = frozenset().union(*(fact.cores for fact in facts))
    quotas = [fact.quota for fact in facts]
    # Control groups of ranks may differ: a rank without a limit lifts it for the host.
    quota = max((q for q in quotas if q), default=None) if all(quotas) else None
    given = sum(f.given for f in facts) if all(f.given for f in facts) else 0
    return cores_available(len(mask), quota, given)
