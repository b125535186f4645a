"""`Bucket`: the arrays of a tree in memory that the members of a host share."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from mpiml.collectives.alike import agree_on, guarded
from mpiml.collectives.calls import Calls
from mpiml.collectives.channel import open_channel
from mpiml.collectives.device.arrays import device_of, on_device
from mpiml.collectives.device.channel import open_device
from mpiml.collectives.labels import Label
from mpiml.collectives.members import team_of
from mpiml.collectives.regions import Regions, specs_of, stripe
from mpiml.collectives.requests import Request
from mpiml.collectives.team import Team
from mpiml.collectives.trees import flatten, unflatten
from mpiml.config import Config
from mpiml.errors import ServiceGoneError, UsageError

__all__ = ["Bucket"]

_SAME = "Build the tree the same way on every member."


class Bucket:
    """Arrays that live in the arena, so that reducing them needs no copy.

    Collective over the members: construction, and every operation. Each member writes its
    values into its own arrays, calls an operation, and finds the result in the same arrays.
    Every element is combined by one member, in the order of the members, so the result is
    the same, to the last bit, on all of them and from run to run.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    like : array or tree of arrays
        Shapes and dtypes, in any nesting that optree knows. The values are not copied: the
        bucket's arrays start at zero. Where they lie on a CUDA device, so do the bucket's, as
        CuPy arrays.
    result : {"own", "shared"}
        Where `allreduce` writes to. "own": each member's arrays, 2 n S bytes of traffic for n
        members of S bytes each. "shared": one array for the host, `result`, (n + 1) S bytes;
        the members' own arrays keep what they wrote.
    fallback : bool
        Without shared memory (``/dev/shm`` too small) send messages, instead of failing.
    name : str, optional
        What messages call it. Compared among the members.
    check : bool
        Whether members compare what they are about to do: operation, name, shapes, dtypes.
        ``MPIML_CHECK=off`` turns it off for all.

    Attributes
    ----------
    tree
        The member's arrays, in the structure of `like`; NumPy arrays (CuPy arrays on a
        device), writable.
    result
        With ``result="shared"`` the host's results, read-only; otherwise `tree`.
    flat : list of numpy.ndarray
        The same memory as one array of shape (count,) for each dtype, in the order of
        ``regions.regions``; includes the padding between arrays.
    stripes : list of slice
        The part of each of `flat` that `reduce_scatter` leaves with this member.
    index, size : int
        This member, and how many there are.

    Raises
    ------
    UsageError
        The members' trees differ; a leaf is no array of numbers. On all members.
    SharedMemoryError
        A host has no room, and `fallback` is off. On all members.

    Notes
    -----
    A view keeps the memory mapped: after `close` it can be read and written, and is no
    longer shared in any useful way. Between a member's last write and the operation no copy
    is made, so an array must not be written while an operation goes on.
    """

    def __init__(
        self,
        comm: Any = None,
        like: Any = None,
        *,
        result: Literal["own", "shared"] = "own",
        fallback: bool = False,
        name: str | None = None,
        check: bool = True,
    ) -> None:
        where = "Bucket"
        team = team_of(comm, where)
        check = check and Config.read().check
        self._team, self._name = team, name
        caught: UsageError | None = None
        device, said = None, ""
        try:
            if result not in ("own", "shared"):
                raise UsageError(f"{where}: result: expected 'own' or 'shared', got {result!r}")
            leaves, self.structure, paths = flatten(like, where)  # structure: internal
            regions = Regions(specs_of(leaves, paths))
            said = regions.digest_text()
            if any(map(on_device, leaves)):
                device = _device(leaves, paths, result)
        except UsageError as error:  # the others must hear of it
            caught = error
        more = f"result={result!r}, fallback={fallback}, check={check}"
        more += ", on a device" if device is not None else ""
        label = Label(where, name=name, leaves=said, more=more)
        self._own: memoryview | None = None  # None: on a device
        self._shared: memoryview | None = None
        self._channel: Any
        with team.round(label):
            what = "arguments and arrays"
            agree_on(team, where, label.head, caught, what, _SAME, label, said)
            self.regions = regions
            self.number = team.number()  # internal
            self._calls = Calls(regions, team.size, name, self.number)
            if device is None:
                self._own, self._shared, self._channel = open_channel(
                    team, regions, result == "shared", fallback, check, label
                )
                views, self._flat = regions.views(self._own), regions.flat(self._own)
            else:
                block, self._channel = open_device(team, regions, device, check, label)
                views, self._flat = block.views(regions), block.flat(regions)
        self._tree = unflatten(self.structure, views)
        self._result = self._tree
        if self._shared is not None:
            self._result = unflatten(self.structure, regions.views(self._shared.toreadonly()))

    # -- what it holds -------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The number of this member."""
        return self._team.index

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._team.size

    @property
    def tree(self) -> Any:
        """The member's own arrays, in the structure of ``like``."""
        return self._tree

    @property
    def result(self) -> Any:
        """What `allreduce` writes: the host's one result, or the own arrays."""
        return self._result

    @property
    def flat(self) -> list["np.ndarray[Any, Any]"]:
        """The own memory as one array (count,) for each dtype."""
        return self._flat

    @property
    def stripes(self) -> list[slice]:
        """The part of each of `flat` that is this member's after `reduce_scatter`."""
        return [
            slice(*stripe(r.count, r.itemsize, self.index, self.size))
            for r in self.regions.regions
        ]

    def __getitem__(self, key: Any) -> Any:
        return self._tree[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Copy `value` into the array at `key`, so that ``bucket["w"] += g`` works too. Local."""
        own = self._tree[key]
        if own is value:
            return
        if not hasattr(own, "dtype"):
            raise UsageError(
                f"Bucket: only an array can be written, got {key!r}, which holds several. Write "
                f"into each: bucket[{key!r}][...][:] = value."
            )
        own[...] = value

    # -- operations ----------------------------------------------------------------------------

    def allreduce(self, op: Any = "sum", compress: Any = None, name: str | None = None) -> None:
        """Combine the arrays of all members, in place.

        Collective over the members.

        Parameters
        ----------
        op : {"sum", "mean", "min", "max", "prod"} or mpi4py.MPI.Op
            float16 and bfloat16 are combined in float32 and rounded once; integers wrap;
            NaN wins in min and max.
        compress : codec, optional
            See `mpiml.collectives.compression`; for "sum" and "mean".
        name : str, optional
            Compared among the members, and shown in messages.

        Raises
        ------
        UsageError
            Members differ in what they do; the operation is not defined for a dtype.
        ServiceGoneError
            The bucket is closed, here or by another member.
        """
        label = None
        if compress is None and type(op) is str and (name is None or type(name) is str):
            label = self._calls.allreduces.get((op, name))
        if label is None:
            label = self._label("allreduce", name, op=op, compressed=compress is not None)
        if compress is None and self._channel is not None:  # nothing made for the call
            self._team.run(self._channel.allreduce, label, label.op, label)
        else:
            self._team.run(self._allreduce(label, compress), label)

    def iallreduce(
        self, op: Any = "sum", compress: Any = None, name: str | None = None
    ) -> Request:
        """Begin `allreduce`; the arrays belong to it until the request is done.

        Collective over the members. Returns a request with ``wait(timeout)`` and ``test()``.
        """
        label = self._label("allreduce", name, op=op, compressed=compress is not None).here()
        return self._submit(self._allreduce(label, compress), label)

    def reduce_scatter(self, op: Any = "sum", name: str | None = None) -> None:
        """Combine the arrays of all members; each gets its `stripes` of the result.

        Collective over the members. What lies outside of the own stripes is undefined
        afterwards.
        """
        label = self._label("reduce_scatter", name, op=op)
        self._team.run(lambda: self.channel(label).reduce_scatter(label.op, label), label)

    def ireduce_scatter(self, op: Any = "sum", name: str | None = None) -> Request:
        """Begin `reduce_scatter`. Collective over the members."""
        label = self._label("reduce_scatter", name, op=op).here()
        return self._submit(lambda: self.channel(label).reduce_scatter(label.op, label), label)

    def allgather(self, name: str | None = None) -> None:
        """Give every member the `stripes` of each: the other half of `reduce_scatter`.

        Collective over the members.
        """
        label = self._label("allgather", name)
        self._team.run(lambda: self.channel(label).allgather(label), label)

    def iallgather(self, name: str | None = None) -> Request:
        """Begin `allgather`. Collective over the members."""
        label = self._label("allgather", name).here()
        return self._submit(lambda: self.channel(label).allgather(label), label)

    def broadcast(self, root: int = 0, name: str | None = None) -> None:
        """Give every member the arrays of member `root`.

        Collective over the members.
        """
        label = self._label("broadcast", name, root=root)
        self._team.run(lambda: self.channel(label).broadcast(root, label), label)

    def ibroadcast(self, root: int = 0, name: str | None = None) -> Request:
        """Begin `broadcast`. Collective over the members."""
        label = self._label("broadcast", name, root=root).here()
        return self._submit(lambda: self.channel(label).broadcast(root, label), label)

    def _submit(self, work: Callable[[], None], label: Label) -> Request:
        """Begin an operation: on a device, after what this thread has begun there so far."""
        channel = self.channel(label)
        if self._own is not None:
            return self._team.submit(work, label)
        ready = channel.mark()
        return self._team.submit(lambda: channel.after(ready, work), label)

    def _allreduce(self, label: Label, compress: Any) -> Callable[[], None]:
        channel = self.channel(label)
        if compress is None:
            return lambda: channel.allreduce(label.op, label)
        return lambda: self._compressed(label, compress)

    def _compressed(self, label: Label, compress: Any) -> None:
        from mpiml.collectives.exchanging import reduce_bucket, reduce_compressed

        channel = self.channel(label)
        names = [f"{self._name or ''}{leaf.path}" for leaf in self.regions.leaves]

        def work(leaves: list[Any]) -> None:
            reduce_compressed(self._team, compress, leaves, leaves, names, label.op, label)

        if self._own is None:
            channel.barrier(label)  # others, who do not compress, never come where this goes on
            channel.on_host(work)
        else:  # there they meet in the same way
            reduce_bucket(
                channel, compress, self.regions, self._own, self._shared, names, label.op, label
            )

    def _label(self, kind: str, name: str | None, **more: Any) -> Label:
        """Return what members compare of an operation; an error is one on all of them."""
        return guarded(
            self._team,
            f"Bucket.{kind}",
            lambda: self._calls.label(kind, name, **more),
            self.channel,
        )

    # -- for other modules of mpiml ------------------------------------------------------------

    @property
    def team(self) -> Team:
        """The members. Internal: no promise is made about it."""
        return self._team

    @property
    def on_host(self) -> bool:
        """Whether the arrays lie in host memory. Internal."""
        return self._own is not None

    def channel(self, label: Label) -> Any:
        """Return what does the operations, which come one after another by the team. Internal.

        Raises
        ------
        ServiceGoneError
            The bucket is closed here.
        """
        if self._channel is None:
            raise ServiceGoneError(
                f"{label.head}: the bucket is closed; use it before close(), or make another"
            )
        return self._channel

    # -- its end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the shared memory. Local: call it on every member.

        Views stay readable. Requests under way are waited for. A member that calls an
        operation after another has closed gets a `ServiceGoneError`.
        """
        self._team.worker.settle()
        self._close()

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def statistics(self) -> dict[str, Any]:
        """Return size and way of working, for logs."""
        return {
            "arrays": len(self.regions.leaves),
            "bytes": self.regions.nbytes,
            "members": self.size,
            "hosts": len(set(self._team.hosts)),
            "way": "closed" if self._channel is None else self._channel.way,
        }

    def __enter__(self) -> "Bucket":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:  # the others may never come to what is under way
            self._close()

    def __repr__(self) -> str:
        name = "" if self._name is None else f" {self._name!r}"
        return (
            f"<Bucket{name} of {len(self.regions.leaves)} arrays, {self.regions.nbytes:,} bytes, "
            f"member {self.index} of {self.size}>"
        )


def _device(leaves: list[Any], paths: tuple[str, ...], result: str) -> Any:
    """Return the device that the bucket's memory is to lie on."""
    for leaf, path in zip(leaves, paths, strict=True):
        if not on_device(leaf):
            raise UsageError(
                f"Bucket: expected all arrays in one kind of memory, got {path or 'x'} in host "
                "memory beside arrays on a device. Make a bucket for each."
            )
    if result == "shared":
        raise UsageError(
            "Bucket: result='shared' is for host memory; arrays on devices have own results. "
            "Leave it out."
        )
    return device_of(leaves, paths, "Bucket")
