"""What happens to gradients during one backward: which are ready, when a bucket is reduced."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mpiml.collectives.alike import refuse
from mpiml.collectives.bucket import Bucket
from mpiml.collectives.labels import Label
from mpiml.collectives.requests import wait_for_all
from mpiml.collectives.team import Team
from mpiml.errors import UsageError
from mpiml.torch.parcels import Parcel, Slot

__all__ = ["Reduction"]

# What torch has no public name for. Tried with torch 2.13, which uses all three itself, in Python:
# the first in DistributedDataParallel and FSDP, the others in torch/autograd/graph.py. The package
# asks for torch>=2.4. In a version without them `import mpiml.torch` ends by an AttributeError that
# says which is missing; nothing is reduced by half.
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_current_task = torch._C._current_graph_task_id  # of the backward of this thread, -1: none
_current_node = torch._C._current_autograd_node  # what a backward is computing, None: nothing


class _Joined(Protocol):
    """What a `join` block has to say in a backward."""

    def announce(self) -> None:
        """Begin to tell the others that this member has data."""

    def listen(self) -> bool:
        """Wait until it is known who has data."""

    def settle(self, op: str, parcels: Sequence[Parcel]) -> int:
        """Correct the results for members without data; return a member that has data."""


class Reduction:
    """Counts the gradients that are ready and reduces buckets in their order.

    Collective over the members: every backward. The order of operations is the same on all of
    them, whatever the order in which gradients become ready: in a `join` block who has data,
    the buckets, which parameters were used, the buffers.

    Parameters
    ----------
    team : Team
        The members.
    title : str
        Opens the messages of errors.
    parcels : sequence of Parcel
        The buckets.
    control : Bucket
        Its ``control["used"]`` has a byte for each parameter.
    op, compress
        As for `Bucket.allreduce`.
    find_unused : bool
        Whether parameters may be without a gradient.
    """

    def __init__(
        self,
        team: Team,
        title: str,
        parcels: Sequence[Parcel],
        control: Bucket,
        op: str,
        compress: Any,
        find_unused: bool,
    ) -> None:
        self.team = team
        self.title = title
        self.label = Label(title, op)
        self.parcels = parcels
        self.slots = [slot for parcel in parcels for slot in parcel.slots]
        self.control = control
        self.op = op
        self.active = False  # between the first gradient and the end of backward
        self.off = 0  # blocks of no_sync that are open
        self.join: _Joined | None = None
        self.send_buffers: Callable[[int], None] | None = None
        self.buffers: Bucket | None = None  # by which it sends them
        self.watch: Callable[[], None] | None = None  # refuses a model that has changed
        self.counts = {"backwards": 0, "reduced_early": 0, "wait_seconds": 0.0}
        self._compress = compress
        self._find_unused = find_unused
        self._device = self.slots[0].param.device
        self._tasks: set[int] = set()  # backwards that will call us at their end
        self._inside = False  # the last reduction ended inside of a backward that went on
        self._next = 0  # the bucket to be reduced next

    def hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        """Return what autograd calls when the gradient of a parameter has been written."""

        def on_gradient(_: torch.Tensor) -> None:
            try:
                with torch.no_grad():
                    slot.attach(self.title)
                if not self.off:
                    self._on_ready(slot)
            except Exception as error:
                if not self.off:
                    self._give_up(error)
                raise

        return on_gradient

    def _on_ready(self, slot: Slot) -> None:
        task = _current_task()
        if task not in self._tasks:
            self._tasks.add(task)
            _queue_callback(self._on_end)
        if not self.active:
            self.begin()
            if self.watch is not None:
                self.watch()  # the model may have been called by a part of it
        again = slot.ready and slot.parcel.request is not None
        if again or (self._inside and self.op == "sum"):  # a mean of means is the mean
            raise UsageError(
                f"{self.title}: parameter {slot.name!r} gets a second gradient in one backward, "
                "after its bucket has been reduced. Checkpoint the segments that share it with "
                "use_reentrant=False."
            )
        if not slot.ready:
            slot.ready = True
            slot.parcel.left -= 1
            while self._next < len(self.parcels) and not self.parcels[self._next].left:
                self._launch()
                self.counts["reduced_early"] += 1

    def on_forward(self) -> None:
        """Refuse what would go unnoticed: a model that has changed, a backward without an end."""
        if _current_task() != -1:
            return  # a checkpoint computes it again
        self._inside = False
        if self.active:
            raise UsageError(
                f"{self.title}: the last backward did not come to its end: it raised, or "
                "parameters in checkpoints with use_reentrant=True have no gradient. The other "
                "members wait for the gradients of this one: let the error end the program, or "
                "make the checkpoints with use_reentrant=False."
            )
        if self.watch is not None and torch.is_grad_enabled():
            self.watch()

    def begin(self) -> None:
        """Begin a backward that reduces: one round of the members, whatever it is made of."""
        self.team.begin_round(self.label)
        self.active = True
        if self.join is not None:
            self.join.announce()

    def _launch(self) -> None:
        parcel = self.parcels[self._next]
        self._next += 1
        if self._device.type != "cpu":  # what was computed has to be there first
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self.team.submit(event.synchronize, self.label)
        parcel.request = parcel.bucket.iallreduce(self.op, self._compress)

    def _on_end(self) -> None:
        """Finish, when backward has come to its end. Called by autograd."""
        inner = _current_node() is not None
        if not self.active or (inner and any(parcel.left for parcel in self.parcels)):
            return  # a backward inside of one, of a reentrant checkpoint: the outer one goes on
        missing = self.finish()
        self._inside = inner
        if missing and not self._find_unused:
            raise UsageError(
                f"{self.title}: expected a gradient of every parameter, got none of "
                f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}, which the loss "
                "does not depend on. They count as zero on this member. Make it with "
                "find_unused=True, or freeze them with requires_grad_(False) before."
            )

    @torch.no_grad()
    def finish(self) -> list[str]:
        """Reduce what is left and wait for all; return the parameters without a gradient."""
        used = self.control["used"]
        try:
            if self.join is not None:
                self.join.listen()  # after it, the control bucket may be written
            missing = self._reduce(used)
            root = 0 if self.join is None else self.join.settle(self.op, self.parcels)
            if self.send_buffers is not None:
                self.send_buffers(root)
        finally:
            self.team.end_round()
            self._again()  # an error of an operation is one on all members, who may go on
        for slot in self.slots:
            if slot.param.grad is None and (used[slot.number] or not self._find_unused):
                slot.param.grad = slot.view
        self.counts["backwards"] += 1
        return missing

    def _give_up(self, error: Exception) -> None:
        """End a backward that this member cannot go on with: the others have it ended too."""
        if not self.active:
            self.begin()
        try:
            if self.join is not None:
                self.join.listen()
            self._refuse(error)
        finally:
            self.team.end_round()
            self._again()

    def _refuse(self, error: Exception) -> None:
        """Come to what is left of a backward of the others, so that they hear of the error."""
        left = [parcel.bucket for parcel in self.parcels[self._next :]]
        if self._find_unused:
            left.append(self.control)
        if not left and self.buffers is not None:  # all gradients are reduced, and right
            left.append(self.buffers)
        refuse(self.team, self.title, error, *[bucket.channel for bucket in left])

    def _again(self) -> None:
        self.active = False
        self._tasks.clear()
        self._next = 0
        for parcel in self.parcels:
            parcel.again()

    def _reduce(self, used: Any) -> list[str]:
        try:
            missing = self._gathered(used)
        except Exception as error:
            self._refuse(error)
            raise
        while self._next < len(self.parcels):
            self._launch()
        requests = [parcel.request for parcel in self.parcels]
        if self._find_unused:
            requests.append(self.control.iallreduce("max", name="used"))
        began = time.perf_counter()
        wait_for_all([request for request in requests if request is not None])
        self.counts["wait_seconds"] += time.perf_counter() - began
        return missing

    def _gathered(self, used: Any) -> list[str]:
        """See that all gradients lie in the buckets; return the parameters that have none."""
        missing = []
        for slot in self.slots:
            grad = slot.param.grad
            used[slot.number] = grad is not None
            if grad is None:
                slot.view.zero_()
                missing.append(slot.name)
            else:
                slot.attach(self.title)
        return missing
