"""Arrays outside of the arena, reduced among hosts.

In a host they pass through segments in chunks, as in `mpiml.collectives.staged`, into memory of
the host that the messages are sent from; `mpiml.collectives.hosts.between` says in which order.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from mpiml._native import Plan
from mpiml.collectives.arena import Arena, by_process, make_arena, private_arena
from mpiml.collectives.channel import chosen
from mpiml.collectives.hosts.between import Between
from mpiml.collectives.hosts.chunks import WINDOW, Piece, split_op
from mpiml.collectives.hosts.lanes import Lane, Pending, open_lane
from mpiml.collectives.hosts.rounds import Round
from mpiml.collectives.in_host import SHARED, TEXT
from mpiml.collectives.labels import Label
from mpiml.collectives.ops import DTYPES, OPS
from mpiml.collectives.regions import Region, Regions, itemsize_of
from mpiml.collectives.staged import Staged
from mpiml.collectives.team import Team
from mpiml.errors import SharedMemoryError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Apart", "open_apart"]

CHUNK: Final = 1 << 20  #: bytes of half a segment, and of a message
_SLOTS: Final = WINDOW + 1  # chunks of a host: those under way, and the one being reduced
_KEPT: Final = 64  # operations whose rounds are kept for when they come again


class Apart(Between):
    """Reduces plain memory of one member of a team that lives on several hosts.

    Collective over the members of the team: every operation. As `Staged`, for one host.

    Parameters
    ----------
    team, choice, lane
        As for `Between`.
    arena : Arena
        With segments of two chunks, and a shared result for `_SLOTS` of them.
    """

    def __init__(
        self, team: Team, arena: Arena, choice: Any, lane: Lane | None, check: bool
    ) -> None:
        super().__init__(team, arena, Regions(()), True, check, choice, lane)
        self._memory = memoryview(arena.memory)[arena.shared_at :]
        self._striped = choice.senders == "stripes"
        self._host = Staged(team, arena, check)
        self.way = f"copied through {self.way}"

    def reduce(self, source: Any, out: Any, dtype: str, op: str, label: Label) -> None:
        """Combine the arrays of all members; as `Staged.reduce`."""
        key = (dtype, op, source.nbytes)
        if ("reduce", key) not in self._made and len(self._made) >= _KEPT:
            self._made.pop(next(iter(self._made)))
        rounds = self._once("reduce", key, lambda _: self._chunks(source.nbytes, dtype, op))
        self._source, self._out = source, out
        try:
            self._drive(rounds, label)
        finally:
            self._source = self._out = None

    def _chunks(self, nbytes: int, dtype: str, op: str) -> list[Round]:
        region = Region(dtype, DTYPES[dtype], 0, CHUNK // itemsize_of(dtype))
        split = split_op(op, dtype, self._team.size, len(set(self._team.hosts)))
        rounds = []
        for number, at in enumerate(range(0, nbytes, CHUNK)):
            length = min(CHUNK, nbytes - at)
            whole = Piece(region, number % _SLOTS * CHUNK, length // region.itemsize)
            part = whole.part(self._place, self.members)
            before = Plan()
            half = number % 2 * CHUNK  # of the segment
            before.put(at, length, half)  # what lay here was combined before the last meeting
            before.sync()
            if part.count:
                before.reduce(
                    region.code, OPS[split.inside], split.inside_divisor,
                    half + part.at - whole.at, part.count, SHARED, part.at,
                )  # fmt: skip
            sent = part if self._striped else whole
            begin = None
            if self._lane is not None and sent.count:
                begin = _sending(self._lane, self._memory, sent, split)
            after = Plan()
            after.fetch(whole.at, at, length)
            rounds.append(Round(before, begin, after))
        return rounds

    def gather(
        self, array: "np.ndarray[Any, Any]", lengths: Sequence[int], label: Label
    ) -> "list[np.ndarray[Any, Any]]":
        """Return the bytes that each member brings; as `Loose.gather`."""
        self._drive([], label)  # what is compared
        with self._under_way():
            everything = self._everything(array, lengths, label)
        team = self._team
        owned = self._owned()
        found: list[Any] = [None] * team.size
        at = 0
        for member in [i for members in owned for i in members]:
            found[member] = everything[at : at + lengths[member]]
            at += lengths[member]
        return found

    def _owned(self) -> list[list[int]]:
        """Return the members of each host."""
        hosts = self._team.hosts
        order = sorted(set(hosts))
        return [[i for i in range(len(hosts)) if hosts[i] == host] for host in order]

    def _everything(
        self, array: "np.ndarray[Any, Any]", lengths: Sequence[int], label: Label
    ) -> "np.ndarray[Any, Any]":
        """Return the bytes of all members, host by host."""
        import numpy as np

        team = self._team
        ours = self._host.gather(array, [lengths[i] for i in team.local], label)
        owned = self._owned()
        totals = [sum([lengths[i] for i in members]) for members in owned]
        starts = [sum(totals[:i]) for i in range(len(totals))]
        whole = np.zeros(sum(totals) if self._place == 0 else 0, np.uint8)
        if self._place == 0 and self._lane is not None:
            here = next(i for i, members in enumerate(owned) if team.index in members)
            whole[starts[here] :][: totals[here]] = np.concatenate(ours)
            memory = memoryview(whole)  # type: ignore[arg-type]
            parts = [[memory[s : s + n]] for s, n in zip(starts, totals, strict=True)]
            own, parts[here] = parts[here], []
            sends = [own if host != here else [] for host in range(len(owned))]
            self._flying.append(self._lane.exchange(sends, parts))
            self._complete(self._flying[-1], label)
        bring = [sum(totals)] + [0] * (self.members - 1)
        return self._host.gather(whole, bring, label)[0]


def _sending(lane: Lane, memory: memoryview, piece: Piece, split: Any) -> Callable[[], Pending]:
    view = memory[piece.at : piece.at + piece.nbytes]
    return lambda: lane.allreduce(view, piece, split.between, split.divisor)


def open_apart(team: Team, label: Label, check: bool) -> Apart:
    """Make what reduces plain memory among hosts, or among processes that share none.

    Collective over the members.

    Parameters
    ----------
    team : Team
        The members; of one host, if that gives them no memory to share.
    label : Label
        What this is for.
    check : bool
        Whether members compare what they do.
    """
    arena = (
        make_arena(team, 2 * CHUNK, label, TEXT, _SLOTS * CHUNK) if team.several_hosts else None
    )
    way = "shared memory"
    if arena is None or isinstance(arena, SharedMemoryError):
        way = "memory of each process"
        team = by_process(team)
        arena = private_arena(team, 2 * CHUNK, label, TEXT, _SLOTS * CHUNK)
    choice = chosen(team, CHUNK, label)._replace(chunk=CHUNK)
    apart = Apart(team, arena, choice, open_lane(team, choice, label), check)
    apart.way = apart.way.replace("shared memory", way)
    return apart
