"""The rounds of each operation between hosts: what is done in the host, sent, and fetched.

A round deals with one chunk. `Rounds` writes them for one member; `mpiml.collectives.hosts.between`
goes through them. All members of a team make as many rounds, of the same chunks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpiml import _native
from mpiml._native import Plan
from mpiml.collectives.arena import Arena
from mpiml.collectives.hosts.chunks import Choice, Piece, Split, host_spans, pieces, split_op
from mpiml.collectives.hosts.lanes import Lane, Pending
from mpiml.collectives.in_host import OWN, SHARED
from mpiml.collectives.ops import OPS
from mpiml.collectives.regions import Regions
from mpiml.collectives.team import Team

__all__ = ["Round", "Rounds"]

_Owned = tuple[int, Piece]  # a member, and what is its


class Round(NamedTuple):
    """What one chunk needs of a member."""

    before: Plan | None  #: in the host; then all of it meet
    begin: Callable[[], Pending] | None  #: of members with a lane
    after: Plan | None  #: in the host, once the messages have come


class Rounds:
    """Writes the rounds of one member.

    Local.

    Parameters
    ----------
    team, arena, regions, choice
        As `mpiml.collectives.hosts.between.Between` has them.
    shared : bool
        Whether `allreduce` goes to the host's one result.
    lane : Lane or None
        The member's.
    """

    def __init__(
        self,
        team: Team,
        arena: Arena,
        regions: Regions,
        shared: bool,
        choice: Choice,
        lane: Lane | None,
    ) -> None:
        self._team = team
        self._arena = arena
        self._regions = regions
        self._shared = shared
        self._chunk = choice.chunk
        self._stripes = choice.senders == "stripes"
        self._lane = lane
        self._place = team.local.index(team.index)
        self._members = len(team.local)
        self._order = sorted(set(team.hosts))  # number of a host -> rank in a lane, by position

    # -- allreduce -----------------------------------------------------------------------------

    def allreduce(self, op: str) -> list[Round]:
        """Reduce in the host, to whoever sends; reduce between hosts; fetch."""
        where = SHARED if self._shared else OWN if self._stripes else 0
        base = self._arena.shared_at
        if not self._shared:
            base = self._segment(self._place if self._stripes else 0)
        rounds = []
        for piece in pieces(self._regions, self._chunk):
            before = Plan()
            self._combine(before, piece, op, where)
            sent = piece.part(self._place, self._members) if self._stripes else piece
            begin = None
            if self._lane is not None and sent.count:
                begin = _allreducing(
                    self._lane, self._memory(base, sent), sent, self._split(op, sent)
                )
            rounds.append(Round(before, begin, None if self._shared else self._fetch(piece)))
        return rounds

    def _split(self, op: str, piece: Piece) -> Split:
        return split_op(op, piece.region.dtype_name, self._team.size, len(self._order))

    def _combine(self, plan: Plan, piece: Piece, op: str, where: int) -> None:
        """Reduce this member's part of a piece over the members of the host."""
        split = self._split(op, piece)
        if self._members == 1 and where != SHARED and split.inside != "mean":
            return
        part = piece.part(self._place, self._members)
        if part.count:
            code = OPS[split.inside]
            plan.reduce(
                part.region.code, code, split.inside_divisor, part.at, part.count, where
            )

    def _fetch(self, piece: Piece) -> Plan:
        """Copy the result from the members of this host that have it."""
        plan = Plan()
        if not self._stripes:
            if self._place:
                plan.pull(0, piece.at, piece.nbytes)
            return plan
        for place in range(self._members):
            part = piece.part(place, self._members)
            if place != self._place and part.count:
                plan.pull(place, part.at, part.nbytes)
        return plan

    # -- its two halves ------------------------------------------------------------------------

    def reduce_scatter(self, op: str) -> list[Round]:
        """Reduce in the host, to the leader; leaders send each host what is its members'."""
        rounds = []
        for owned in host_spans(self._regions, self._team.hosts, self._chunk):
            before = Plan()
            for _, piece in owned:
                self._combine(before, piece, op, 0)
            begin = None
            if self._leads:
                begin = self._scattering(self._by_host(owned), op)
            rounds.append(Round(before, begin, None))
        return rounds

    def _scattering(
        self, by_host: Sequence[Sequence[_Owned]], op: str
    ) -> Callable[[], Pending]:
        lane = self._lane
        assert lane is not None
        here = lane.rank
        sends = [[self._memory(self._segment(0), p) for _, p in entry] for entry in by_host]
        partial, sends[here] = sends[here], []
        ours = [piece for _, piece in by_host[here]]
        results = [
            self._memory(self._segment(self._team.local.index(member)), piece)
            for member, piece in by_host[here]
        ]
        total = sum([piece.nbytes for piece in ours])

        def begin() -> Pending:
            scratch = lane.scratch(total * (lane.size - 1))
            rest = memoryview(scratch)
            places = []
            for host in range(lane.size):
                if host == here:
                    places.append(partial)
                else:
                    places.append(_slices(rest, ours))
                    rest = rest[total:]
            receives = [[] if host == here else part for host, part in enumerate(places)]

            def combine() -> None:
                for i, piece in enumerate(ours):
                    split = self._split(op, piece)
                    _native.reduce(
                        piece.region.code, OPS[split.between], [part[i] for part in places],
                        [results[i]], split.divisor,
                    )  # fmt: skip
                lane.recycle(scratch)

            return lane.exchange(sends, receives, combine)

        return begin

    def allgather(self) -> list[Round]:
        """Collect the members' stripes at the leader; leaders exchange them; fetch."""
        rounds = []
        for owned in host_spans(self._regions, self._team.hosts, self._chunk):
            before, after = Plan(), Plan()
            begin = None
            if self._leads:
                by_host = self._by_host(owned)
                for member, piece in owned:
                    if member in self._team.local and member != self._team.index:
                        place = self._team.local.index(member)
                        before.pull(place, piece.at, piece.nbytes)
                begin = self._gathering(by_host)
            elif self._place:
                for member, piece in owned:
                    if member != self._team.index:
                        after.pull(0, piece.at, piece.nbytes)
            rounds.append(Round(before, begin, after))
        return rounds

    def _gathering(self, by_host: Sequence[Sequence[_Owned]]) -> Callable[[], Pending]:
        lane = self._lane
        assert lane is not None
        there = [[self._memory(self._segment(0), p) for _, p in entry] for entry in by_host]
        own, there[lane.rank] = there[lane.rank], []
        sends = [own if host != lane.rank else [] for host in range(lane.size)]
        return lambda: lane.exchange(sends, there)

    # -- broadcast -----------------------------------------------------------------------------

    def broadcast(self, root: int) -> list[Round]:
        """Send from the segment of member `root`; fetch."""
        local = self._team.local
        source = local.index(root) if root in local else 0
        home = self._order.index(self._team.hosts[root])
        rounds = []
        for piece in pieces(self._regions, self._chunk):
            begin = None
            if self._leads:
                memory = self._memory(self._segment(source), piece)
                begin = _broadcasting(self._lane, memory, home)
            after = Plan()
            if self._place != source:
                after.pull(source, piece.at, piece.nbytes)
            rounds.append(Round(None, begin, after))
        return rounds

    # -- who and where -------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        """Whether this member sends for its whole host."""
        return self._lane is not None and self._place == 0

    def _segment(self, place: int) -> int:
        return self._arena.gang.segment_at(place)

    def _memory(self, base: int, piece: Piece) -> memoryview:
        start = base + piece.at
        return memoryview(self._arena.memory)[start : start + piece.nbytes]

    def _by_host(self, owned: Sequence[_Owned]) -> list[list[_Owned]]:
        found: list[list[_Owned]] = [[] for _ in self._order]
        for member, piece in owned:
            found[self._order.index(self._team.hosts[member])].append((member, piece))
        return found


def _allreducing(
    lane: Lane, memory: memoryview, piece: Piece, split: Split
) -> Callable[[], Pending]:
    return lambda: lane.allreduce(memory, piece, split.between, split.divisor)


def _broadcasting(lane: Any, memory: memoryview, root: int) -> Callable[[], Pending]:
    return lambda: lane.broadcast(memory, root)


def _slices(memory: memoryview, pieces_: Sequence[Piece]) -> list[memoryview]:
    """Return the pieces' places in `memory`, one after another."""
    found = []
    for piece in pieces_:
        found.append(memory[: piece.nbytes])
        memory = memory[piece.nbytes :]
    return found
