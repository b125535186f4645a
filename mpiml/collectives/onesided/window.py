"""`Window`: memory of each member that the others read and write without its help."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from mpiml.collectives.onesided.held import Held, open_alike
from mpiml.collectives.onesided.layout import (
    elements_of,
    leaves_like,
    scale_for,
    values_for,
)
from mpiml.collectives.onesided.targets import Away, Here, Target
from mpiml.collectives.trees import unflatten
from mpiml.errors import UsageError

__all__ = ["Window"]


class Window(Held):
    """Arrays of each member, which all others read and write whenever they like.

    Collective over the members: construction, `barrier`, `close`. All else is local: the other
    member takes no part. What is written goes there at once within a host; to another host it
    travels, and `flush` waits until it is there.

    Nothing is lost: what is accumulated is added component by component, atomically. Nothing
    torn is returned by `read` and `collect`: each write counts as one update of the arrays it is
    for, and these copy between two updates. `get` copies what is there.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    like : array or tree of arrays
        Shapes and dtypes, float32 or float64. All start at zero.
    fallback : bool
        Without shared memory (``/dev/shm`` too small) let each process be a host of its own,
        instead of failing.
    name : str, optional
        What messages call it. Compared among the members.

    Attributes
    ----------
    tree
        The member's own arrays, in the structure of `like`: views of the memory itself. Write
        to them within ``with window.writing()``.

    Raises
    ------
    UsageError
        The members' trees differ; a leaf is neither float32 nor float64. On all members.
    SharedMemoryError
        A host has no room, and `fallback` is off. On all members.

    Notes
    -----
    The pattern of BlueFog's ``win_put``, ``win_get`` and ``win_accumulate``. Within a host it is
    the memory that all map (what ``MPI_Win_allocate_shared`` gives, without its limits on
    threads). Of other hosts, reads go by a window of MPI that was tried first, or by messages;
    writes go by messages to the host, which applies them: an accumulate of MPI is not atomic
    to what the processors of that host write.

    Examples
    --------
    ::

        window = Window(comm, like=np.zeros(1000, np.float32))
        with window.writing():
            window.tree[...] = model
        window.accumulate((window.index + 1) % window.size, gradient, scale=0.5)
        window.flush()
    """

    title: ClassVar[str] = "Window"
    what: ClassVar[str] = "window"

    def __init__(
        self,
        comm: Any = None,
        like: Any = None,
        *,
        fallback: bool = False,
        name: str | None = None,
    ) -> None:
        memory, layout, remote = open_alike(
            self.title, comm, like, lambda team: range(team.size), fallback, name
        )
        super().__init__(memory.team, layout, remote, name)
        self._memory = memory
        self._own = memory.block(self.index)
        self._targets: dict[int, Target] = {self.index: Here(self._own, layout, self.title)}
        self._writers: set[int] = set()  # threads within `writing`
        self.tree = unflatten(layout.treedef, self._own.views)

    # -- the own arrays ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """How many updates the own arrays have had, by anybody."""
        return self._own.gate.version()

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Let what the block writes to the own arrays be one update. Local.

        Others may accumulate meanwhile, so set values in it; to add to them, `accumulate` at the
        own number, which loses nothing. Do not read other members' arrays by `read` in it: they
        might wait for this one.
        """
        self._open("writing")
        self._own.enter("Window.writing")
        self._writers.add(threading.get_ident())
        try:
            yield self.tree
        finally:
            self._writers.discard(threading.get_ident())
            self._own.gate.leave(1)

    def collect(self) -> tuple[Any, int]:
        """Take what has been accumulated: a copy of the own arrays, which are zero afterwards.

        Local. In one moment: what comes meanwhile, comes after it.

        Returns
        -------
        tree
            New arrays.
        version : int
            Updates so far.
        """
        self._open("collect")
        return self._snapshot(self.index, "Window.collect", True)

    # -- others' arrays ------------------------------------------------------------------------

    def get(self, member: int, name: Any = None) -> Any:
        """Return a copy of a member's arrays, or of one of them, as they are now. Local.

        Elements are whole; the copy may have a part of an update, see `read`.

        Parameters
        ----------
        member : int
            Whose.
        name : optional
            A key of the tree, or a tuple of keys; all by default.
        """
        target = self._target(member, "get")
        if name is None and None not in self._layout.places:
            return self._copied(lambda out: target.get(None, out, "Window.get"))[0]
        number = self._layout.number(name, "Window.get")
        like = self._own.views[number]
        array = np.empty(like.shape, like.dtype)
        if array.size:
            target.get(number, array.reshape(-1).data.cast("B"), "Window.get")
        return array

    def read(self, member: int) -> tuple[Any, int]:
        """Return a copy of a member's arrays between two updates, and its version. Local.

        It has all that this member has sent there before.

        Raises
        ------
        RankFailedError
            A member has died within an update.
        """
        self._target(member, "read")
        return self._snapshot(member, "Window.read", False)

    def put(self, member: int, values: Any, name: Any = None) -> None:
        """Set a member's arrays, or one of them: one update. Local.

        Parameters
        ----------
        member : int
            Whose.
        values : array or tree of arrays
            Like the arrays; not kept.
        name : optional
            As for `get`.
        """
        target = self._target(member, "put")
        number, leaves = self._values(values, name, "Window.put")
        target.assign(number, leaves, "Window.put")

    def accumulate(
        self, member: int, values: Any, scale: float = 1.0, name: Any = None
    ) -> None:
        """Add ``scale * values`` to a member's arrays, or to one of them: one update. Local.

        Parameters
        ----------
        member, values, name
            As for `put`.
        scale : float
            What the values are multiplied with.
        """
        where = "Window.accumulate"
        target = self._target(member, "accumulate")
        number, leaves = self._values(values, name, where)
        target.add(number, leaves, scale_for(scale, where), where)

    def accumulate_at(
        self, member: int, name: Any, indices: Any, values: Any, scale: float = 1.0
    ) -> None:
        """Add to elements of one of a member's arrays: one update. Local.

        Parameters
        ----------
        member : int
            Whose.
        name, indices, values, scale
            As for `SharedModel.add_at`.
        """
        where = "Window.accumulate_at"
        target = self._target(member, "accumulate_at")
        number = self._layout.number(name, where)
        positions, found = elements_of(self._own.views[number], indices, values, where)
        target.add_at(number, positions, found, scale_for(scale, where))

    def statistics(self) -> dict[str, Any]:
        """Return size and way of working, for logs."""
        return {**super().statistics(), "version": self.version}

    # -- parts ---------------------------------------------------------------------------------

    def _target(self, member: int, call: str) -> Target:
        self._open(call)
        target = self._targets.get(member)
        if target is None:
            target = self._targets[member] = self._new(member, f"Window.{call}")
        return target

    def _new(self, member: int, where: str) -> Target:
        team = self._team
        if not isinstance(member, int | np.integer) or not 0 <= member < team.size:
            raise UsageError(
                f"{where}: member: expected 0 to {team.size - 1}, got {member!r}. This is "
                f"member {team.index} of {team.title}."
            )
        if team.hosts[member] == team.hosts[team.index]:
            return Here(self._memory.block(int(member)), self._layout, self.title)
        assert self._remote is not None
        return Away(self._remote.route(int(member)), self._layout)

    def _values(
        self, values: Any, name: Any, where: str
    ) -> "tuple[int | None, list[np.ndarray[Any, Any]]]":
        if name is None and None not in self._layout.places:
            return None, leaves_like(values, self._layout.treedef, self._own.views, where)
        number = self._layout.number(name, where)
        like = self._own.views[number]
        return number, [values_for(values, like.dtype, like.shape, where)]

    def _snapshot(self, member: int, label: str, clear: bool) -> tuple[Any, int]:
        if member == self.index and threading.get_ident() in self._writers:
            raise UsageError(
                f"{label}: expected no update under way, got a call within `with "
                "window.writing()` of the same arrays, which it would wait for. Leave the block "
                "first; there, window.tree is what you write."
            )
        target = self._targets[member]
        return self._copied(lambda out: target.snapshot(out, label, clear))
