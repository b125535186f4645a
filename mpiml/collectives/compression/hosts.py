"""Compression between hosts: each host sums in its memory, the sums are compressed.

Within a host memory is faster than any codec. So the members of a host are summed as they are
(for a mean of 16-bit numbers, averaged: the sum might be too large for them), and the first of them speaks for the host: with residuals of its own it takes part in the
compressed operation among the hosts, and tells the others how it went.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mpiml._native import Plan
from mpiml.collectives.channel import open_channel
from mpiml.collectives.compression.reducer import Reducer
from mpiml.collectives.hosts.between import Between
from mpiml.collectives.hosts.chunks import WHOLE, Choice, Piece, split_op
from mpiml.collectives.hosts.lanes import Lane, Pending, open_lane
from mpiml.collectives.in_host import TEXT, InHost
from mpiml.collectives.labels import Label
from mpiml.collectives.messages import complete
from mpiml.collectives.ops import DTYPES, dtype_name
from mpiml.collectives.regions import Region, Regions
from mpiml.collectives.team import Team
from mpiml.errors import MpimlError, RemoteError, ServiceGoneError, UsageError

__all__ = ["BucketInside", "HostExchange", "Inside", "LooseInside", "reduce_between"]

_Arrays = Sequence[NDArray[Any]]
_LEADERS: Final = Choice("leaders", WHOLE, "compressed")


class HostExchange:
    """The hosts of a team, for one operation; an `Exchange` among their first members.

    Collective over the first members of the hosts: `sum`, `gather`.

    Parameters
    ----------
    team : Team
        The members.
    lane : Lane
        Joins the first members, by `mpiml.collectives.hosts.lanes.open_lane`.
    waiting : function
        Called while hosts are missing; raises what ends the wait.
    """

    def __init__(self, team: Team, lane: Lane, waiting: Callable[[], None]) -> None:
        self._lane = lane
        self._waiting = waiting
        self.index = lane.rank
        self.size = lane.size
        self.names = [_host_name(team, host) for host in sorted(set(team.hosts))]

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Sum a 1-D array over the hosts, in place; return it."""
        name = dtype_name(array)
        memory = memoryview(array.view(np.uint8))  # type: ignore[arg-type]
        most = WHOLE // array.itemsize
        for start in range(0, array.size, most):
            count = min(most, array.size - start)
            part = memory[start * array.itemsize : (start + count) * array.itemsize]
            piece = Piece(Region(name, DTYPES[name], 0, count), 0, count)
            self._finish(self._lane.allreduce(part, piece, "sum", 1.0))
        return array

    def gather(
        self, array: NDArray[np.uint8], lengths: Sequence[int]
    ) -> list[NDArray[np.uint8]]:
        """Return the array of each host."""
        found = [np.empty(length, np.uint8) for length in lengths]
        found[self.index] = array
        sends: list[list[memoryview]] = [[] for _ in lengths]
        receives: list[list[memoryview]] = [[] for _ in lengths]
        for host in range(self.size):
            if host != self.index:
                sends[host] = _parts(array)
                receives[host] = _parts(found[host])
        self._finish(self._lane.exchange(sends, receives))
        return found

    def _finish(self, pending: Pending) -> None:
        try:
            complete(pending, self._waiting)
        except BaseException:
            pending.abandon()
            raise


class Inside(Protocol):
    """What the members of a host do before and after the hosts talk.

    Collective over the members of the host: every method.
    """

    host: InHost  #: by which they meet

    def combine(self, op: str, label: Label) -> tuple[_Arrays, int]:
        """Combine the arrays over the members of the host.

        Returns
        -------
        arrays, count
            What the first member may change; and by what a mean of the hosts' divides.
        """

    def spread(self, label: Label) -> None:
        """Give all members what the first one has made of the sums."""


class BucketInside:
    """Arrays that lie in the arena of a bucket: nothing is copied; an `Inside`.

    Parameters
    ----------
    host : InHost
        The bucket's channel.
    sums : sequence of ndarray
        Where it sums to: the member's arrays, or the host's one result.
    shared : bool
        Whether it is the latter.
    """

    def __init__(self, host: InHost, sums: _Arrays, shared: bool) -> None:
        self.host = host
        self._sums = sums
        self._shared = shared

    def combine(self, op: str, label: Label) -> tuple[_Arrays, int]:
        """Combine in place, in this host."""
        return self._sums, _combine(self.host, op, self._sums, label)

    def spread(self, label: Label) -> None:
        """Fetch what the first member has; one result for all is there already."""
        if self._shared:
            InHost.barrier(self.host, label)
        else:
            InHost.broadcast(self.host, 0, label)


class LooseInside:
    """Arrays anywhere, copied into memory that is made for them, and out of it; an `Inside`.

    Collective over the team: construction.

    Parameters
    ----------
    team : Team
        The members.
    specs
        What `mpiml.collectives.regions.specs_of` says of the arrays.
    label : Label
        What it is for, in messages.

    Raises
    ------
    SharedMemoryError
        A host has no room. On all members.
    """

    def __init__(self, team: Team, specs: Any, label: Label) -> None:
        regions = Regions(specs)
        own, _, self.host = open_channel(team, regions, False, False, True, label)
        self._views = regions.views(own)
        self._sources: _Arrays = ()
        self._results: _Arrays = ()

    def take(self, sources: _Arrays, results: _Arrays) -> None:
        """Say where the numbers come from and go to."""
        self._sources, self._results = sources, results

    def combine(self, op: str, label: Label) -> tuple[_Arrays, int]:
        """Copy the arrays, and combine the copies."""
        for source, view in zip(self._sources, self._views, strict=True):
            np.copyto(view, source)
        return self._views, _combine(self.host, op, self._views, label)

    def spread(self, label: Label) -> None:
        """Fetch what the first member has, and copy it to where it goes."""
        InHost.broadcast(self.host, 0, label)
        for view, result in zip(self._views, self._results, strict=True):
            np.copyto(result, view)
        self.take((), ())


def reduce_between(
    team: Team,
    reducer: Reducer,
    inside: Inside,
    names: Sequence[str],
    op: str,
    label: Label,
    where: str,
) -> None:
    """Combine in each host, compress between the hosts, and let all members have the result.

    Collective over the team.

    Parameters
    ----------
    team : Team
        The members, on several hosts.
    reducer : Reducer
        What compresses.
    inside : Inside
        What is reduced.
    names : sequence of str
        Under which the codec remembers each array.
    op : str
        ``"sum"`` or ``"mean"``.
    label : Label
        The call.
    where : str
        Its name, for messages.

    Raises
    ------
    UsageError, RemoteError
        As `Reducer.reduce` does; on all members.
    """
    host = inside.host
    assert isinstance(host, Between)  # of a team on several hosts
    host.barrier(label)  # here members of all hosts compare what they are about to do
    lane = open_lane(team, _LEADERS, label)  # those who do something else never come here
    sums, count = inside.combine(op, label)
    error: MpimlError | None = None
    if lane is not None:
        try:
            if lane.broken:
                raise ServiceGoneError(f"{label}: {lane.broken}")
            exchange = HostExchange(team, lane, host.watch(label))
            reducer.reduce(exchange, sums, sums, names, op, count, where)
        except (UsageError, RemoteError) as caught:  # the same on all hosts
            error = caught
        except BaseException as caught:
            lane.broken = lane.broken or f"an earlier operation ended early: {caught}"
            host.leave(caught)
            raise
    said = _tell(host, _encoded(error), label)
    if said:
        kind: type[MpimlError] = UsageError if said[:1] == b"u" else RemoteError
        text = said[1:].decode("utf-8", "replace")
        raise kind(text) from (None if error is None else error.__cause__)
    inside.spread(label)


def _combine(host: InHost, op: str, arrays: _Arrays, label: Label) -> int:
    """Sum in a host, of a mean in a way that 16 bits can hold; return what is to divide by yet."""
    team = host.team
    hosts = len(set(team.hosts))
    splits = [split_op(op, dtype_name(array), team.size, hosts) for array in arrays]
    for split in splits:
        if split.inside == "mean":  # then that of all arrays, which go together
            host.combine("mean", split.inside_divisor, label)
            return hosts
    host.combine("sum", 1.0, label)
    return team.size


def _tell(host: InHost, said: bytes, label: Label) -> bytes:
    """Return what the first member of the host says. Collective over its members."""
    plan = Plan()
    plan.post(0, TEXT, 0, external=True)
    plan.sync()
    plan.gather(0, TEXT)
    text = len(said).to_bytes(4, "little") + said
    everyone = bytearray(TEXT * host.members)
    host.run(plan, label, text.ljust(TEXT), everyone)
    return bytes(everyone[4 : 4 + int.from_bytes(everyone[:4], "little")])


def _encoded(error: MpimlError | None) -> bytes:
    if error is None:
        return b""
    kind = "u" if isinstance(error, UsageError) else "r"
    return f"{kind}{error}".encode("utf-8", "backslashreplace")[: TEXT - 4]


def _host_name(team: Team, host: int) -> str:
    names = [n for n, where in zip(team.names, team.hosts, strict=True) if where == host]
    return names[0] if len(names) == 1 else f"the host of {', '.join(names)}"


def _parts(array: NDArray[np.uint8]) -> list[memoryview]:
    """Return memory in parts that MPI can count; none of an empty array."""
    memory = memoryview(array)  # type: ignore[arg-type]
    return [memory[at : at + WHOLE] for at in range(0, len(memory), WHOLE)]
