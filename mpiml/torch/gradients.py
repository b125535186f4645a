"""`GradientSync`: the gradients of a model, reduced over a role while backward still runs.

The design is that of PyTorch's DistributedDataParallel (Li et al., VLDB 2020): gradients live
in buckets, in the reverse order of the parameters, and a bucket is reduced as soon as backward
has come to all of it. Here the buckets lie in memory that the members of a host share, so that
reducing them copies nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mpiml.collectives.alike import agree_on
from mpiml.collectives.bucket import Bucket
from mpiml.collectives.gradients import assign, check_compress, check_options
from mpiml.collectives.members import team_of
from mpiml.errors import UsageError
from mpiml.torch.checks import WHERE, check_model, describe
from mpiml.torch.joining import Join
from mpiml.torch.memory import Courier
from mpiml.torch.parcels import Parcel
from mpiml.torch.reducing import Reduction
from mpiml.torch.watching import ForwardHook, Watch

__all__ = ["GradientSync"]


class GradientSync:
    """Makes ``loss.backward()`` reduce the gradients of a model over the members.

    Collective over the members: construction, every backward of the model outside of
    `no_sync`, and `join`. ``backward()`` returns when the gradients are reduced, so the loop
    of a training that has one is left as it is::

        sync = mpiml.torch.GradientSync(model)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    Every parameter's ``.grad`` is a view of a bucket, and stays it after ``zero_grad()``. A
    bucket is reduced while backward goes on, in the same order on all members, and each of its
    elements is added in the order of the members: the gradients are the same on all of them,
    to the last bit.

    Parameters
    ----------
    model : torch.nn.Module
        The same on all members: names, shapes, dtypes and memory formats of its parameters.
        Those with ``requires_grad`` are reduced; shared ones once.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node, which may be
        threads of one process, each with a model of its own.
    op : {"mean", "sum"} or mpi4py.MPI.SUM
        "mean" makes of the members' mean losses that of the whole batch, where their parts
        are equal in size.
    bucket_bytes : int
        Of a bucket of gradients.
    first_bucket_bytes : int
        Of the first, which is smaller so that it starts early.
    compress : codec, optional
        See `mpiml.collectives.compression`.
    broadcast : bool
        Begin with member 0's parameters and buffers.
    broadcast_buffers : bool
        Give all members member 0's buffers (running means, say) after every backward that
        reduces.
    find_unused : bool
        Let parameters be without a gradient: where no member has one, ``.grad`` stays None;
        where some have, the others count as zero. It costs one small message. With False such
        a parameter is an error, after the gradients of the others have been reduced.
    fallback : bool
        Without shared memory (``/dev/shm`` too small) send messages, instead of failing.
    name : str, optional
        What messages call it.

    Raises
    ------
    UsageError
        The members' models or arguments differ; the model is of a kind that cannot be reduced;
        it has no parameters to train. On all members.

    Notes
    -----
    A second backward before ``zero_grad()`` adds to gradients that are reduced already, which
    a mean leaves as they are, and a sum does not. ``torch.autograd.grad`` reduces nothing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        comm: Any = None,
        *,
        op: Any = "mean",
        bucket_bytes: int = 25 << 20,
        first_bucket_bytes: int = 1 << 20,
        compress: Any = None,
        broadcast: bool = True,
        broadcast_buffers: bool = True,
        find_unused: bool = True,
        fallback: bool = False,
        name: str | None = None,
    ) -> None:
        self._title = WHERE if name is None else f"{WHERE} {name!r}"
        self._comm = comm
        self._model = model
        self._bytes = bucket_bytes
        self._fallback = fallback
        self._closed = False
        self._team = team_of(comm, WHERE)
        op = self._agree(compress, {
            "op": op, "bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes,
            "broadcast": broadcast, "broadcast_buffers": broadcast_buffers,
            "find_unused": find_unused,
        })  # fmt: skip
        parcels, control = self._make_buckets(first_bucket_bytes)
        self._reduction = Reduction(
            self._team, self._title, parcels, control, op, compress, find_unused
        )
        self._stored = [
            (module, key)
            for module in model.modules()
            for key, value in module._buffers.items()
            if value is not None
        ]
        self._courier: Courier | None = None
        if self._stored and broadcast_buffers:
            self._courier = self._courier_of(self._buffers(), "buffers")
            self._reduction.send_buffers = self._send_buffers
            self._reduction.buffers = self._courier.bucket
        if broadcast:
            self.broadcast()
        self._hooks = self._hooked()

    # -- what the user calls -------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The number of this member."""
        return self._team.index

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._team.size

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in this block add up gradients without reducing them.

        Local; to be entered by all members for the same backwards. The first backward after
        it reduces the whole sum::

            with sync.no_sync():
                loss(model(x1), y1).backward()
            loss(model(x2), y2).backward()
        """
        self._check_open()
        self._reduction.off += 1
        try:
            yield
        finally:
            self._reduction.off -= 1

    def join(self, step: Callable[[], Any] | None = None) -> Join:
        """Return a block for members that have different numbers of batches.

        Collective over the members. A member that leaves the block goes on with zeros until
        all have left it. "mean" divides by the members that still have data, and each of them
        goes on with the same gradients. ::

            with sync.join():
                for x, y in batches:  # of another length on each member
                    optimizer.zero_grad()
                    loss(model(x), y).backward()
                    optimizer.step()

        At the end all members get the parameters and buffers of one that was the last to have
        data. The state of an optimizer (momentum) of the others is behind; `step` cures that.

        Parameters
        ----------
        step
            What a member that has no more data does with each gradient of the others, usually
            ``optimizer.step``. Parameters and optimizers are then the same everywhere all the
            time, and are not sent at the end.
        """
        self._check_open()
        return Join(self._reduction, self.broadcast, step)

    def broadcast(self, root: int = 0) -> None:
        """Give every member the parameters and buffers of member `root`. Collective."""
        tensors = [p for _, p in self._model.named_parameters()] + self._buffers()
        courier = self._courier_of(tensors, "parameters")
        try:
            courier.send(tensors, root)
        finally:
            courier.close()

    def close(self) -> None:
        """Leave the gradients alone from now on. Local: call it on every member.

        They stay where they are, and keep their memory.
        """
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        for parcel in self._reduction.parcels:
            parcel.bucket.close()
        self._reduction.control.close()
        if self._courier is not None:
            self._courier.close()

    def statistics(self) -> dict[str, Any]:
        """Return sizes and counts, for logs.

        ``reduced_early``: buckets whose reduction began while backward still ran.
        ``wait_seconds``: how long backwards have waited at their end.
        """
        parcels = self._reduction.parcels
        return {
            "members": self.size,
            "parameters": len(self._reduction.slots),
            "buckets": len(parcels),
            "bytes": sum(parcel.bucket.regions.nbytes for parcel in parcels),
            "way": parcels[0].bucket.statistics()["way"],
            **self._reduction.counts,
        }

    def __enter__(self) -> "GradientSync":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        reduction = self._reduction
        return (
            f"<GradientSync of {len(reduction.slots)} parameters in {len(reduction.parcels)} "
            f"buckets, member {self.index} of {self.size}>"
        )

    # -- inside --------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        raise UsageError(
            f"{self._title}: it belongs to this process and to one model, and cannot be copied "
            "or saved. Keep it outside of the model, and copy or save the model alone."
        )

    def _agree(self, compress: Any, options: Mapping[str, Any]) -> str:
        """Return the name of the operation; raise on all where one cannot go on, or they differ."""
        caught: Exception | None = None
        text = op = ""
        try:
            sizes = {key: value for key, value in options.items() if key.endswith("_bytes")}
            op = check_options(WHERE, options["op"], **sizes)
            check_model(self._model, self._title)
            named = [(f"parameter {k!r}", p) for k, p in self._model.named_parameters()]
            codec = check_compress(
                self._title, compress, [n for n in named if n[1].requires_grad]
            )
            text = describe(self._model, {**options, "op": repr(op), "compress": codec})
        except Exception as error:  # the others must hear of it
            caught = error
        cure = "Make the model the same way on every member."
        agree_on(self._team, self._title, text, caught, "model and arguments", cure)
        return op

    def _make_buckets(self, first_bucket_bytes: int) -> tuple[list[Parcel], Bucket]:
        """Return the buckets of gradients, and the one for who has data and what was used."""
        trained = [(key, p) for key, p in self._model.named_parameters() if p.requires_grad]
        sizes = [p.numel() * p.element_size() for _, p in trained]
        parcels = [
            Parcel(
                self._comm,
                [(*trained[i], i) for i in numbers],
                f"{self._title}, bucket {number}",
                self._fallback,
            )
            for number, numbers in enumerate(assign(sizes, self._bytes, first_bucket_bytes))
        ]
        bytes_of = {"here": self._team.size, "used": len(trained)}
        control = Bucket(
            self._comm,
            {key: torch.empty(count, dtype=torch.uint8) for key, count in bytes_of.items()},
            name=f"{self._title}, control",
            fallback=self._fallback,
        )
        return parcels, control

    def _hooked(self) -> list[Any]:
        """Have the reduction called by the model's forward and by its gradients."""
        reduction = self._reduction
        trained: list[Any] = [slot.param for slot in reduction.slots]
        reduction.watch = Watch(self._model, trained, self._title).check
        hooks: list[Any] = [
            self._model.register_forward_pre_hook(ForwardHook(reduction.on_forward))
        ]
        for slot, param in zip(reduction.slots, trained, strict=True):
            hooks.append(param.register_post_accumulate_grad_hook(reduction.hook(slot)))
        return hooks

    def _courier_of(self, tensors: list[torch.Tensor], what: str) -> Courier:
        title = f"{self._title}, {what}"
        return Courier(self._comm, tensors, self._bytes, title, self._fallback)

    def _buffers(self) -> list[torch.Tensor]:
        return [module._buffers[key] for module, key in self._stored]  # type: ignore[misc]

    def _send_buffers(self, root: int) -> None:
        assert self._courier is not None
        self._courier.send(self._buffers(), root)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self._title}: it is closed; make another one")
