"""Collectives on arrays of CUDA devices: what `Bucket` and `allreduce` do for them.

The members' arrays stay on their devices where they can (see `mpiml.collectives.device.group`).
A bucket's memory is one block of the device; arrays outside of one pass through such a block,
many small ones together, long ones in pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from mpiml.collectives.device.arrays import Lent, device_of, lend, target
from mpiml.collectives.device.group import WAYS, DeviceGroup, Span
from mpiml.collectives.device.protocol import Device, Slab
from mpiml.collectives.device.stages import Event
from mpiml.collectives.labels import Label
from mpiml.collectives.ops import dtype_name
from mpiml.collectives.regions import LINE, Regions
from mpiml.collectives.team import Team

__all__ = ["DeviceChannel", "DeviceMemory", "open_device", "reduce_arrays"]

#: bytes of the block that arrays outside of a bucket pass through
PIECE: Final = 256 << 20


class DeviceMemory:
    """A member's memory on a device, as arrays of CuPy.

    Parameters
    ----------
    slab : Slab
        Where it is.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def views(self, regions: Regions) -> list[Any]:
        """Return the leaves as arrays, in the order of the tree. They keep the memory."""
        leaves = [regions.leaf(number) for number in range(len(regions.leaves))]
        return [self._slab.array(*leaf) for leaf in leaves]

    def flat(self, regions: Regions) -> list[Any]:
        """Return each region as one array of shape (count,)."""
        return [self._slab.array(r.offset, (r.count,), r.dtype_name) for r in regions.regions]


class DeviceChannel:
    """The operations of a bucket on devices.

    Collective over the members: every operation, one at a time.
    """

    def __init__(self, group: DeviceGroup, regions: Regions) -> None:
        self._group = group
        self._regions = regions
        self._spans = [Span(r.dtype_name, r.offset, r.count) for r in regions.regions]

    @property
    def way(self) -> str:
        """How sums are taken, and why not the best way."""
        ways = sorted({self._group.way(span.dtype, "sum") for span in self._spans})
        why = f" ({self._group.why})" if self._group.why else ""
        return f"{' and '.join(ways)} on {self._group.device.title}{why}"

    def allreduce(self, op: str, label: Label) -> None:
        """Combine all members' memory, in place."""
        self._group.reduce(self._spans, op, label)

    def reduce_scatter(self, op: str, label: Label) -> None:
        """Combine all members' memory; each member's stripes are valid afterwards."""
        self._group.reduce(self._spans, op, label, everywhere=False)

    def allgather(self, label: Label) -> None:
        """Copy every member's stripes to all."""
        self._group.allgather(self._spans, label)

    def broadcast(self, root: int, label: Label) -> None:
        """Copy member `root`'s memory to all others."""
        self._group.broadcast(self._spans, root, label)

    def mark(self) -> Event:
        """Return the point where the calling thread is on the device."""
        return self._group.device.mark()

    def after(self, ready: Event, work: Callable[[], None]) -> None:
        """Do one operation of this channel when a point has been reached, not later."""
        self._group.ready = ready
        try:
            work()
        finally:
            self._group.ready = None

    def on_host(self, work: Callable[[list[Any]], None]) -> None:
        """Give `work` the member's arrays in host memory, and take back what it leaves there."""
        memory = np.empty(self._regions.nbytes, np.uint8)
        pointer = self._group.slab.pointer
        inward, outward = self._group.device.lanes()
        if self._group.ready is None:
            self._group.device.settle()
        else:
            self._group.ready.wait()
        inward.to_host(memory, pointer)
        inward.mark().wait()
        work(self._regions.views(memory.data))
        outward.to_device(pointer, memory)
        outward.mark().wait()

    def barrier(self, label: Label) -> None:
        """Meet."""
        self._group.barrier(label)

    def refuse(self, label: Label) -> None:
        """Come to an operation that this member cannot do: the others hear of it, and end."""
        self._group.refuse(label)

    def close(self) -> None:
        """Let go of the memory. Local. Arrays in it keep it."""
        self._group.close()


def open_device(
    team: Team,
    regions: Regions,
    device: Device,
    check: bool,
    label: Label,
    ways: Sequence[str] = WAYS,
) -> tuple[DeviceMemory, DeviceChannel]:
    """Make memory for a tree on devices, and what reduces it.

    Collective over the members.

    Parameters
    ----------
    team : Team
        The members.
    regions : Regions
        The layout of each one's memory.
    device : Device
        Where this member's lies.
    check : bool
        Whether members compare what they do.
    label : Label
        What this is for.
    ways : sequence of str
        Which ways may be taken; for tests and measurements.
    """
    group = DeviceGroup(team, device, regions.nbytes, label, check, ways)
    return DeviceMemory(group.slab), DeviceChannel(group, regions)


def reduce_arrays(
    team: Team,
    leaves: Sequence[Any],
    paths: Sequence[str],
    op: str,
    outs: Sequence[Any] | None,
    label: Label,
) -> list[Any]:
    """Combine arrays on devices that lie in no bucket.

    Collective over the members.

    Parameters
    ----------
    team : Team
        The members.
    leaves, paths : sequences
        The arrays, all on one device of this member, and how messages call them.
    op : str
        A name of `mpiml.collectives.ops`, checked for the dtypes.
    outs : sequence of arrays, optional
        Where results go; new arrays by default.
    label : Label
        What members compare.

    Returns
    -------
    list of arrays
        In the order of `leaves`, of the same libraries, on the same device.
    """
    device = device_of(leaves, paths, label.head)
    group = _group(team, device, label)
    made: list[Lent] = []
    lent: list[Lent] = []

    def prepare() -> None:
        for number, leaf in enumerate(leaves):
            made.append(target(leaf, None if outs is None else outs[number], label.head))
            lent.append(lend(leaf))
        device.settle()

    group.guarded(label, prepare)
    sets: dict[str, list[int]] = {}
    for number, leaf in enumerate(leaves):
        sets.setdefault(dtype_name(leaf), []).append(number)
    for dtype, numbers in sets.items():
        _reduce_set(
            group, dtype, [lent[i] for i in numbers], [made[i] for i in numbers], op, label
        )
    return [one.made() for one in made]


def _group(team: Team, device: Device, label: Label) -> DeviceGroup:
    """Return this member's group for arrays outside of buckets; made once for a device."""
    group: DeviceGroup | None = team.kept.get((DeviceGroup, device.index))
    if group is None:
        group = DeviceGroup(team, device, LINE, label)
        team.kept[DeviceGroup, device.index] = group
        team.closes(group.close)
    return group


def _reduce_set(
    group: DeviceGroup,
    dtype: str,
    lent: Sequence[Lent],
    made: Sequence[Lent],
    op: str,
    label: Label,
) -> None:
    """Combine arrays of one dtype as if they were one, in pieces of the group's memory."""
    total = sum(one.nbytes for one in lent)
    if min(total, PIECE) > group.capacity:
        group.grow(min(1 << (total - 1).bit_length(), PIECE), label)
    base = group.slab.pointer
    itemsize = Span(dtype, 0, 1).itemsize
    for low in range(0, total, PIECE):
        high = min(low + PIECE, total)
        for at, place, nbytes in _cuts(lent, low, high):
            group.device.copy(base + at, place, nbytes)
        lines = -(-(high - low) // LINE)  # what follows in the last line is combined in vain
        group.device.finish()
        group.reduce([Span(dtype, 0, lines * LINE // itemsize)], op, label)
        for at, place, nbytes in _cuts(made, low, high):
            group.device.copy(place, base + at, nbytes)
        group.device.finish()


def _cuts(arrays: Sequence[Lent], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Cut bytes `low` to `high` of the arrays, laid end to end, where one ends.

    Yields offset from `low`, address, number of bytes.
    """
    begin = 0
    for one in arrays:
        first, last = max(low, begin), min(high, begin + one.nbytes)
        if last > first:
            yield first - low, one.pointer + first - begin, last - first
        begin += one.nbytes
