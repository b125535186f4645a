"""Members whose arrays lie on devices, and the three ways in which they combine them.

*device*: the members of one host map each other's device memory (CUDA IPC; threads of one process
need not), and each combines its stripe of all memories in the order of the members, with the
same bits as in host memory. *mpi*: straight to an MPI that takes device memory, where no such
map is to be had. *host*: through pinned host memory, in chunks that overlap.

Members meet in host memory before and after: each waits for its device before it tells the
others, so that no event needs to cross processes. The first meeting compares what they do.
"""

import json
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from mpiml.collectives.channel import open_channel
from mpiml.collectives.device.direct import agree_direct
from mpiml.collectives.device.kernel import parts
from mpiml.collectives.device.protocol import Device
from mpiml.collectives.device.stages import SLOTS, Event, Staging, chunk_size, run_stages
from mpiml.collectives.labels import Label
from mpiml.collectives.ops import numpy_dtype
from mpiml.collectives.regions import Leaf, Regions, stripe
from mpiml.collectives.team import Team
from mpiml.errors import MpimlError

__all__ = ["WAYS", "DeviceGroup", "Span"]

#: from the best to the one that always works
WAYS: Final = ("device", "mpi", "host")
_TAG: Final = 16  # bytes by which a member knows that it sees another's memory
_MOST: Final = 1 << 28  # elements in one MPI call: counts are 31 bits in old libraries


class Span(NamedTuple):
    """A stretch of every member's memory: whole cache lines of one dtype."""

    dtype: str
    at: int  #: bytes from the begin
    count: int  # type: ignore[assignment]  # elements; hides tuple.count

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self.dtype == "bfloat16" else numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the stretch."""
        return self.count * self.itemsize

    def stripe(self, index: int, size: int) -> tuple[int, int]:
        """Return begin and end of a member's part, in bytes of the memory."""
        low, high = stripe(self.count, self.itemsize, index, size)
        return self.at + low * self.itemsize, self.at + high * self.itemsize


class DeviceGroup:
    """One member's device memory, and its operations with the others.

    Collective over the members: construction and every operation, one at a time.

    Parameters
    ----------
    team : Team
        The members.
    device : Device
        Where this member's memory is to lie.
    nbytes : int
        Size of it, the same on all members; zeroed.
    label : Label
        What this is for.
    check : bool
        Whether members compare what they do.
    ways : sequence of str
        Which of `WAYS` may be taken; for tests and measurements.

    Attributes
    ----------
    slab : Slab
        The memory.
    capacity : int
        Bytes of it that all members have.
    ready : Event or None
        After which the operation that comes next may begin; None: after all that has been
        begun on the device.
    why : str
        Why the way is not "device", where it is not.
    """

    def __init__(
        self,
        team: Team,
        device: Device,
        nbytes: int,
        label: Label,
        check: bool = True,
        ways: Sequence[str] = WAYS,
    ) -> None:
        self._team = team
        self.device = device
        self._check = check
        self._ways = tuple(ways)
        memory, self._control = self._host("int64", 1, label)
        self._flag = memory.view(np.int64)
        self._slots: dict[tuple[str, int], list[tuple[Any, Any, Any]]] = {}
        self._lanes: Any = None
        self._direct = False
        self.why = ""
        self.ready: Event | None = None
        self.capacity = 0
        self.grow(nbytes, label)

    def grow(self, nbytes: int, label: Label) -> None:
        """Take memory of another size. What the old one held is lost."""
        # Not the slab's size, which may be larger, and not on all members.
        self.capacity = nbytes
        failure: MpimlError | None = None
        try:
            self.slab = self.device.slab(nbytes, len(set(self._team.ranks)) > 1)
        except Exception as error:
            failure = MpimlError(
                f"{label.head}: no {nbytes:,} bytes on {self.device.title}: {_line(error)}. "
                "Free arrays there, or pass a smaller tree."
            )
        self._team.agree(failure, label)
        self._peers, self.why = self._map(label)
        self._table = None if self._peers is None else self.device.table(self._peers)
        if self._peers is None and "mpi" in self._ways:
            found = agree_direct(self._team, label)
            self._direct = found.allowed
            self.why = f"{self.why}; {found.why}"
        self.device.zero(self.slab.pointer, self.slab.nbytes)
        self.device.finish()

    # -- operations ----------------------------------------------------------------------------

    def reduce(
        self, spans: Sequence[Span], op: str, label: Label, everywhere: bool = True
    ) -> None:
        """Combine spans of all members' memory, in place.

        Parameters
        ----------
        everywhere : bool
            Whether all members get all of it. Otherwise each is sure of its stripe only.
        """
        self.meet(label)
        mapped = [span for span in spans if self.way(span.dtype, op) == "device"]
        if mapped:
            self.guarded(label, lambda: self._combine(mapped, op, everywhere))
        for span in spans:
            way = self.way(span.dtype, op)
            if way == "mpi":
                self._allreduce(span, op)
            elif way == "host":
                self._stage(span, label, lambda channel: channel.allreduce(op, label))

    def broadcast(self, spans: Sequence[Span], root: int, label: Label) -> None:
        """Copy spans of member `root`'s memory to all others."""
        self.meet(label)
        if self._peers is not None:
            self.guarded(label, lambda: self._pull([(s.at, s.nbytes, root) for s in spans]))
            return
        for span in spans:
            self._spread(span.at, span.nbytes, root, label)

    def allgather(self, spans: Sequence[Span], label: Label) -> None:
        """Copy every member's stripes to all others."""
        self.meet(label)
        pieces = []
        for span in spans:
            for member in range(self._team.size):
                low, high = span.stripe(member, self._team.size)
                if high > low:
                    pieces.append((low, high - low, member))
        if self._peers is not None:
            self.guarded(label, lambda: self._pull(pieces))
            return
        for at, nbytes, member in pieces:
            self._spread(at, nbytes, member, label)

    def meet(self, label: Label) -> None:
        """Wait for this member's device, then for the other members; compare what they do."""
        ready = self.ready
        self.guarded(label, self.device.settle if ready is None else ready.wait)

    def guarded(self, label: Label, work: Callable[[], None]) -> None:
        """Do it, then meet again: what fails on one member's device is an error on all."""
        failure: MpimlError | None = None
        try:
            work()
        except Exception as error:
            failure = error if isinstance(error, MpimlError) else None
            if failure is None:
                failure = MpimlError(f"{label.head}: on {self.device.title}: {_line(error)}")
                failure.__cause__ = error
        self._flag[0] = failure is not None
        self._control.allreduce("max", label)
        if self._flag[0]:
            self._team.agree(failure, label)

    def barrier(self, label: Label) -> None:
        """Meet."""
        self._control.barrier(label)

    def refuse(self, label: Label) -> None:
        """Come to an operation that this member cannot do: the others hear of it, and end."""
        self._control.refuse(label)

    def way(self, dtype: str, op: str) -> str:
        """Return which of `WAYS` a reduction takes."""
        if self._table is not None and parts(dtype, op) is not None:
            return "device"
        if self._direct and dtype not in ("float16", "bfloat16"):
            return "mpi"
        return "host"

    def close(self) -> None:
        """Let go of the memory. Local. Arrays in it keep it."""
        self._control.close()
        for slots in self._slots.values():
            for _, channel, _ in slots:
                channel.close()
        self._slots.clear()
        self._peers = self._table = None

    # -- on the device -------------------------------------------------------------------------

    def _map(self, label: Label) -> tuple[list[int] | None, str]:
        """Return the address of each member's memory, or None and why not, the same on all."""
        team, device = self._team, self.device
        if "device" not in self._ways:
            return None, "other ways were asked for"
        if team.several_hosts:
            return None, "the members live on several hosts"
        tag = secrets.token_hex(_TAG // 2)
        mine: dict[str, Any] = {"tag": tag, "index": device.index, "at": self.slab.pointer}
        try:
            device.write(self.slab.pointer, tag.encode())
            if len(set(team.ranks)) > 1:
                mine["handle"] = device.handle(self.slab).hex()
        except Exception as error:  # whatever CUDA says: there is another way
            mine["error"] = _line(error)
        said = [json.loads(text) for text in team.exchange(json.dumps(mine).encode(), label)]
        pointers, problem = [], ""
        for member, one in enumerate(said):
            try:
                pointers.append(self._open(one, team.ranks[member] == team.rank))
            except Exception as error:
                problem = f"{team.names[team.index]} of {team.names[member]}: {_line(error)}"
                break
        verdicts = [text.decode() for text in team.exchange(problem.encode(), label)]
        found = next(filter(None, verdicts), "")
        return (None, f"no map of device memory, {found}") if found else (pointers, "")

    def _open(self, said: dict[str, Any], here: bool) -> int:
        if "error" in said:
            raise RuntimeError(said["error"])
        pointer: int = said["at"]
        if here:
            self.device.reach(said["index"])
        else:
            pointer = self.device.map(bytes.fromhex(said["handle"]))
        if self.device.read(pointer, _TAG) != said["tag"].encode():
            raise RuntimeError("the handle leads to other memory")
        return pointer

    def _combine(self, spans: Sequence[Span], op: str, everywhere: bool) -> None:
        team = self._team
        to = (0, team.size) if everywhere else (team.index, team.index + 1)
        for span in spans:
            part = span.stripe(team.index, team.size)
            self.device.combine(self._table, span.dtype, op, part, to)
        self.device.finish()

    def _pull(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy pieces (place, bytes, member) of others' memory to the own one."""
        assert self._peers is not None
        for at, nbytes, member in pieces:
            if member != self._team.index:
                self.device.copy(self.slab.pointer + at, self._peers[member] + at, nbytes)
        self.device.finish()

    # -- by MPI --------------------------------------------------------------------------------

    def _allreduce(self, span: Span, op: str) -> None:
        from mpi4py import MPI

        # MPI knows no order of its bools, and bytes 0 and 1 do as well.
        dtype = "uint8" if span.dtype == "bool" else span.dtype
        array = self.slab.array(span.at, (span.count,), dtype)
        known = {"mean": MPI.SUM, "sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
        for low in range(0, span.count, _MOST):
            part = array[low : low + _MOST]
            self._team.comm.Allreduce(MPI.IN_PLACE, part, known.get(op, MPI.PROD))
        if op == "mean":
            self.device.divide(array, self._team.size)
        self.device.settle()

    # -- through host memory -------------------------------------------------------------------

    def _spread(self, at: int, nbytes: int, root: int, label: Label) -> None:
        """Copy a stretch of one member's memory to all others, without a map of it."""
        if not self._direct:
            span = Span("uint8", at, nbytes)
            self._stage(span, label, lambda channel: channel.broadcast(root, label))
            return
        array = self.slab.array(at, (nbytes,), "uint8")
        for low in range(0, nbytes, _MOST):
            self._team.comm.Bcast(array[low : low + _MOST], self._team.ranks[root])
        self.device.settle()

    def _stage(self, span: Span, label: Label, combine: Callable[[Any], None]) -> None:
        """Pass a span through host memory, chunk by chunk; `combine` gets a chunk's channel."""
        size = chunk_size(span.nbytes)
        slots = self._slots.get((span.dtype, size))
        if slots is None:
            slots = [self._slot(span.dtype, size, label) for _ in range(SLOTS)]
            self._slots[span.dtype, size] = slots
        if self._lanes is None:
            self._lanes = self.device.lanes()
        pointer = self.slab.pointer + span.at
        hosts = [host for host, _, _ in slots]
        inward, outward = self._lanes
        staging = Staging(
            inward, outward, pointer, span.nbytes, hosts, size,
            lambda slot, nbytes: combine(slots[slot][1]),
        )  # fmt: skip
        try:
            run_stages(staging, math.ceil(span.nbytes / size))
        except BaseException:
            # The others may wait for this member's next chunk: they hear that it left.
            del self._slots[span.dtype, size]
            for _, channel, _ in slots:
                channel.close()
            raise

    def _slot(self, dtype: str, size: int, label: Label) -> tuple[Any, Any, Any]:
        """Return host memory of a chunk, as bytes, its channel, and what keeps it pinned."""
        memory, channel = self._host(dtype, size // Span(dtype, 0, 1).itemsize, label)
        return memory, channel, self.device.pin(memory)

    def _host(self, dtype: str, count: int, label: Label) -> tuple[Any, Any]:
        """Return memory that the members of a host share, as bytes, and what combines it."""
        regions = Regions([Leaf("", (count,), dtype)])
        memory, _, channel = open_channel(self._team, regions, False, True, self._check, label)
        return np.frombuffer(memory, np.uint8)[: regions.nbytes], channel


def _line(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
