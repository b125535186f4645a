"""What models and windows have in common: their members, their end."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from mpiml.collectives.labels import Label
from mpiml.collectives.members import team_of
from mpiml.collectives.onesided.layout import Layout, agreed_layout
from mpiml.collectives.onesided.memory import HostMemory, host_memory
from mpiml.collectives.onesided.remote import Remote
from mpiml.collectives.team import Team
from mpiml.collectives.trees import unflatten
from mpiml.errors import ServiceGoneError

__all__ = ["Held", "open_alike", "open_memory"]


def open_memory(
    title: str,
    team: Team,
    layout: Layout,
    groups: Sequence[int],
    fallback: bool,
    label: Label,
    beside: int = 0,
    twins: bool = False,
) -> tuple[HostMemory, Remote | None]:
    """Make the blocks of each host, and what there is to do with others, if there are any.

    Collective over the members. `title` opens messages; the rest is as for
    `host_memory`.
    """
    with team.round(label):
        memory = host_memory(team, layout.regions, groups, fallback, label, beside, twins)
        apart = memory.team.several_hosts
        return memory, Remote(team, memory, title, label) if apart else None


def open_alike(
    title: str,
    comm: Any,
    like: Any,
    groups: Callable[[Team], Sequence[int]],
    fallback: bool,
    name: str | None,
) -> tuple[HostMemory, Layout, Remote | None]:
    """Agree on the arrays, then open memory for them. Collective over the members.

    `groups` tells what those of the members are for `host_memory`; the rest is as the user says
    it.
    """
    team = team_of(comm, title)
    layout, label = agreed_layout(team, title, like, f"fallback={fallback}", name)
    memory, remote = open_memory(title, team, layout, groups(team), fallback, label)
    return memory, layout, remote


class Held:
    """Memory that members hold together until they close it.

    Collective over the members: `barrier`, `close`.

    Parameters
    ----------
    team : Team
        The members, as the memory sees them.
    layout : Layout
        Of the arrays.
    remote : Remote or None
        What it has to do with other hosts.
    name : str or None
        What the user calls it.
    """

    title: ClassVar[str] = ""  #: the class, in messages
    what: ClassVar[str] = "model"
    tree: Any  #: the arrays

    def __init__(
        self, team: Team, layout: Layout, remote: Remote | None, name: str | None
    ) -> None:
        self._team = team
        self._layout = layout
        self._remote = remote
        self._name = name
        self._closed = False

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    @property
    def index(self) -> int:
        """The number of this member."""
        return self._team.index

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._team.size

    def flush(self) -> None:
        """Wait until all that this member has written to other hosts is there. Local.

        Within a host it is at once.

        Raises
        ------
        RankFailedError
            A host that it was for is gone.
        """
        self._open("flush")
        if self._remote is not None:
            self._remote.flush()

    def barrier(self) -> None:
        """Wait until every member is here, and what all have written is where it belongs.

        Collective over the members.
        """
        self._meet("barrier")

    def close(self) -> None:
        """Let go of the memory. Collective over the members. Views stay readable."""
        if self._closed:
            return
        if self._is_cut_off():
            self._abandon()
            return
        self._meet("close")
        self._closed = True
        self._close_own()
        if self._remote is not None:
            self._remote.close()

    def _meet(self, call: str) -> None:
        """Flush, and wait for the others. Collective over the members."""
        self._open(call)
        if self._is_cut_off():
            raise ServiceGoneError(
                f"{self.title}.{call}: MPI has been finalised in this process, or the "
                f"communicator freed. Close the {self.what} before."
            )
        label = Label(f"{self.title}.{call}", name=self._name)
        with self._team.round(label):
            said = self._before_meeting(call)
            if self._remote is not None:
                self._remote.flush()
            self._after_meeting(self._team.exchange(said, label))

    def _before_meeting(self, call: str) -> bytes:
        """Do what comes before the others are waited for; return what they are told. Local."""
        return b""

    def _after_meeting(self, said: Sequence[bytes]) -> None:
        """Take in what all have said. Local."""

    def _close_own(self) -> None:
        """Close what the class has besides, after the meeting. Collective over the members."""

    def _is_cut_off(self) -> bool:
        """Whether what joined the members, communicator or MPI, has ended. Local."""
        if self._team.closed or self._team.comm is None:
            return self._team.closed
        from mpi4py import MPI

        return MPI.Is_finalized()

    def _copied(self, copy: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return new arrays, whose memory `copy` has filled, and what that returned."""
        regions = self._layout.regions
        out = np.empty(regions.nbytes, np.uint8)
        told = copy(out.data)
        return unflatten(self._layout.treedef, regions.views(out)), told

    def _abandon(self) -> None:
        """Close it without the others: they may never come. Local."""
        self._closed = True
        if self._remote is not None:
            self._remote.abandon()

    def _open(self, call: str) -> None:
        if self._closed:
            raise ServiceGoneError(
                f"{self.title}.{call}: the {self.what} is closed; use it before close(), or make "
                "another"
            )

    def statistics(self) -> dict[str, Any]:
        """Return size and way of working, for logs."""
        return {
            "arrays": len(self._layout.regions.leaves),
            "bytes": self._layout.regions.nbytes,
            "members": self.size,
            "hosts": len(set(self._team.hosts)),
            "way": "shared memory" if self._remote is None else self._remote.way,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def __repr__(self) -> str:
        name = "" if self._name is None else f" {self._name!r}"
        return (
            f"<{self.title}{name} of {len(self._layout.regions.leaves)} arrays, "
            f"{self._layout.regions.nbytes:,} bytes, member {self.index} of {self.size}>"
        )
