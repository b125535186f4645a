"""`init_process_group`: `torch.distributed` among the nodes of a role."""

import time
import traceback
import weakref
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from mpiml.board import BoardClient
from mpiml.context import context
from mpiml.errors import MpimlError, PlacementError, Stopped, UsageError
from mpiml.torch.store import RoleStore

__all__ = ["ProcessGroup", "init_process_group"]

_WHERE = "mpiml.torch.init_process_group"
_OURS = ("init_method", "rank", "store", "world_size")
_HOLD = 0.5  # s, that a node that has failed keeps its connections: its error is to come first

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_current: "ProcessGroup | None" = None


class ProcessGroup:
    """The membership of a node in its role's default process group.

    What `init_process_group` returns; usable in a ``with`` block. `torch.distributed` itself
    is used as ever.

    Attributes
    ----------
    store : RoleStore
        The store that the group met at, for the program's own keys.
    rank, world_size : int
        Index of the node and size of its role.
    """

    def __init__(self, node: Any, number: int) -> None:
        self.rank: int = node.spec.index
        self.world_size: int = node.spec.replicas
        self.title: str = node.title
        self._node = node
        self._board = BoardClient(node.runtime, node, number)
        self.store = RoleStore(self._board)
        self._open = False
        self._given_up = False

    @property
    def alive(self) -> bool:
        """Whether its program runs, and its ``with`` block was not left by an error."""
        return not (self._given_up or self._node.runtime.done)

    def join(self, backend: str | None, timeout: timedelta | None, options: Any) -> None:
        """Meet the others of the role. Collective over the role."""
        global _current
        self._open = True
        _current = self
        try:
            dist.init_process_group(
                backend,
                store=self.store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
                **options,
            )
        except BaseException:
            self.destroy()
            raise
        self._node.leaving.append(self._leave)

    def destroy(self) -> None:
        """Leave: end torch's groups in this process. Local; a second call does nothing."""
        global _current
        if not self._open:
            return
        self._open = False
        if _current is self:
            _current = None
            if dist.is_initialized():
                dist.destroy_process_group()
        if self._node.runtime.ending.note is None:
            with suppress(MpimlError, Stopped):  # the keys are forgotten with the program
                self._board.ask("leave")

    def _leave(self, error: BaseException | None) -> None:
        if error is not None and self._open:
            # the others' waits in torch end by an error as soon as we are gone: that of this
            # node is the one to be shown
            engine, ending = self._node.runtime.engine, self._node.runtime.ending
            engine.wait(ending.stopped, time.monotonic() + _HOLD, None)
            _let_go(error)
        self.destroy()

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error it is destroyed when the body has been left, or for the next one: the
        # others would hear of lost connections before they hear of the error.
        self._given_up = error is not None
        if error is None:
            self.destroy()

    def __repr__(self) -> str:
        state = "" if self._open else ", left"
        return f"<process group of {self.title}, {self.rank} of {self.world_size}{state}>"


def _let_go(error: BaseException) -> None:
    """Forget the local variables behind an error, which has been told of already.

    Operations of torch among them keep their connections open, and the others would wait for
    what never comes.
    """
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def init_process_group(
    backend: str | None = None, *, timeout: float | timedelta | None = None, **options: Any
) -> ProcessGroup:
    """Make `torch.distributed` work among the nodes of a role.

    Collective over the role: every replica calls it, in its body or a method. Afterwards
    `torch.distributed`, FSDP and `DistributedDataParallel` are used as under ``torchrun``, with
    the node's index as rank. There is no address and no port to give: the processes meet at a
    store over mpiml's messages, whose values live with replica 0. The backend's own
    connections (gloo's, NCCL's) are its own affair.

    The groups are destroyed when the node's body is left, or the program ends; `destroy`, or
    the end of a ``with`` block, does it earlier, and they may then be made again.

    Parameters
    ----------
    backend
        ``"gloo"``, ``"nccl"``, ``"cpu:gloo,cuda:nccl"``; None lets torch choose.
    timeout
        Seconds (or a `timedelta`) for torch's collectives and for meeting; torch's default
        is 1800, with NCCL 600.
    **options
        ``device_id``, ``pg_options``, ``group_name``: see `torch.distributed.init_process_group`.

    Returns
    -------
    ProcessGroup
        With the `store`, and ``destroy()``.

    Raises
    ------
    UsageError
        Outside of a node; a second time; with an address, a rank or a store.
    PlacementError
        Where replicas of the role share a process.
    """
    global _current
    try:
        node = context()._node
    except UsageError as error:
        raise UsageError(f"{_WHERE}: {error}") from None
    _check(node, options)
    if isinstance(timeout, int | float):
        if not timeout > 0:
            raise UsageError(f"{_WHERE}: expected a timeout above 0 s, got {timeout!r}")
        timeout = timedelta(seconds=timeout)
    number = _numbers[node] = _numbers.get(node, -1) + 1
    group = ProcessGroup(node, number)
    group.join(backend, timeout, options)
    return group


def _check(node: Any, options: dict[str, Any]) -> None:
    given = [name for name in _OURS if name in options]
    if given:
        raise UsageError(
            f"{_WHERE}: expected no {' or '.join(given)}: rank, size and store are those of the "
            f"role {node.spec.role!r}. Leave it out."
        )
    if not dist.is_available():
        raise UsageError(f"{_WHERE}: this build of PyTorch has no torch.distributed")
    runtime, role = node.runtime, node.spec.role_index
    ranks = {runtime.ranks[v.id] for v in runtime.vertices if v.role_index == role}
    if len(ranks) < node.spec.replicas:
        raise PlacementError(
            f"{_WHERE}, {node.title}: torch.distributed has one default group in a process, but "
            f"the {node.spec.replicas} replicas of the role share {len(ranks)} of them. Start "
            "one rank for each replica: mpirun -n N, or python -m mpiml.run -n N. In threads, "
            "mpiml.torch.GradientSync does what DistributedDataParallel does."
        )
    if not dist.is_initialized():
        return
    if _current is not None and not _current.alive:
        _current.destroy()
        return
    by = f"for {_current.title}" if _current is not None else "by other code"
    raise UsageError(
        f"{_WHERE}, {node.title}: torch.distributed is initialised in this process already, {by}. "
        "Use its group, or torch.distributed.new_group for another; destroy() it first."
    )
