"""Collectives among hosts: each host reduces in its memory, messages join the hosts.

An operation is a sequence of rounds, one for each chunk. Before a round the members of a host
reduce the chunk; then a lane sends it, and while it is under way the next chunk is reduced;
after the round the members fetch the result from whoever received it. The points where the
members of a host meet keep these in order. What the hosts do is compared, by its hash, before
any data is sent and while the first chunk is reduced.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpiml._native import Plan
from mpiml.collectives.arena import Arena
from mpiml.collectives.hosts.chunks import Choice, schedule
from mpiml.collectives.hosts.farewells import farewells_of
from mpiml.collectives.hosts.lanes import Comparison, Lane, Pending
from mpiml.collectives.hosts.rounds import Round, Rounds
from mpiml.collectives.in_host import InHost
from mpiml.collectives.labels import Label
from mpiml.collectives.messages import complete
from mpiml.collectives.regions import Regions
from mpiml.collectives.team import Team
from mpiml.errors import ServiceGoneError

__all__ = ["Between"]

_MESSAGES_US = 300  # how long a member may wait for its host while messages are under way
_HEARING = 0.05  # s, that a farewell of another host may come later than one of this host
_YES, _NO = b"\1" * 8, b"\0" * 8  # by which a leader tells its host whether all hosts agree


class Between(InHost):
    """The operations of one member of a team that lives on several hosts.

    Collective over the members of the team: every operation. One at a time; the caller sees
    to it.

    Parameters
    ----------
    team, arena, regions, shared, check
        As for `InHost`; the arena is that of the member's host.
    choice : Choice
        Who sends between hosts, and in which chunks.
    lane : Lane or None
        This member's, see `mpiml.collectives.hosts.lanes.open_lane`.
    """

    def __init__(
        self,
        team: Team,
        arena: Arena,
        regions: Regions,
        shared: bool,
        check: bool,
        choice: Choice,
        lane: Lane | None,
    ) -> None:
        super().__init__(team, arena, regions, shared, check)
        self._lane = lane
        self._all_have_lanes = choice.senders == "stripes"
        self._rounds = Rounds(team, arena, regions, shared, choice, lane)
        self._made: dict[tuple[str, Any], list[Round]] = {}
        self._flying: list[Pending] = []
        self._door = farewells_of(team).open(team, lane, self._all_have_lanes)
        self._label: Label | None = None  # of what is being run
        self._afar = ""  # who has left, of another host
        self._known: BaseException | None = None  # an error that all members know of
        self._source: Any = None  # of an operation on memory outside of the arena
        self._out: Any = None
        self._meet = Plan()
        self._meet.sync()
        self._tell = Plan()
        self._tell.post(0, len(_YES), 0, external=True)
        self._tell.sync()
        self._tell.gather(0, len(_YES))
        self.way = f"{self.way}, and messages between hosts ({choice})"

    # -- operations ----------------------------------------------------------------------------

    def allreduce(self, op: str, label: Label) -> None:
        """Combine all segments, in place or to the host's shared result."""
        self._drive(self._once("allreduce", op, self._rounds.allreduce), label)

    def reduce_scatter(self, op: str, label: Label) -> None:
        """Combine all segments; each member's stripe is valid in its own segment afterwards."""
        self._drive(self._once("scatter", op, self._rounds.reduce_scatter), label)

    def allgather(self, label: Label) -> None:
        """Copy every member's stripe to all segments."""
        self._drive(self._once("allgather", 0, lambda _: self._rounds.allgather()), label)

    def broadcast(self, root: int, label: Label) -> None:
        """Copy the segment of member `root` of the team to all others."""
        self._drive(self._once("broadcast", root, self._rounds.broadcast), label)

    def barrier(self, label: Label) -> None:
        """Meet."""
        self._drive([], label)

    def refuse(self, label: Label) -> None:
        """Come to an operation that this member cannot do: the others hear of it, and end."""
        if self._check:
            self._drive([], label)

    def _once(self, kind: str, key: Any, make: Callable[[Any], list[Round]]) -> list[Round]:
        rounds = self._made.get((kind, key))
        if rounds is None:
            rounds = self._made[kind, key] = make(key)
        return rounds

    # -- running -------------------------------------------------------------------------------

    def _drive(self, rounds: Sequence[Round], label: Label) -> None:
        """Go through the rounds of an operation."""
        if self._broken is not None:
            raise ServiceGoneError(f"{label}: {self._broken}")
        self._door.turn += 1
        with self._under_way():
            if self._lane is not None:
                self._look(label)
            self.run(self._meet, label)
            if self._lane is not None and self._lane.broken:
                raise ServiceGoneError(f"{label}: {self._lane.broken}")
            comparison = None
            if self._lane is not None and (self._check or not rounds):
                comparison = self._lane.compare(label.hash if self._check else 1)
                self._flying.append(comparison)
            if not self._go(rounds, label, comparison):
                raise self._differ(label)

    def _go(self, rounds: Sequence[Round], label: Label, comparison: Comparison | None) -> bool:
        """Return whether all hosts do the same; without that nothing is sent."""
        begun: list[Pending | None] = []
        agreed = not self._check and bool(rounds)
        for new, old in schedule(len(rounds)) if rounds else ((None, None),):
            if new is not None:
                self._run(rounds[new].before, label)
            if old is not None:
                self._complete(begun[old], label)
            if agreed:
                self.run(self._meet, label)
            else:
                agreed = self._agree(comparison, label)
                if not agreed:
                    return False
            if new is not None:
                begun.append(self._begin(rounds[new]))
            if old is not None:
                self._run(rounds[old].after, label)
        self.run(self._meet, label)  # nobody changes what another one still reads
        return True

    def _run(self, plan: Plan | None, label: Label) -> None:
        if plan is not None and len(plan):
            self.run(plan, label, self._source, self._out)

    def _begin(self, round_: Round) -> Pending | None:
        if round_.begin is None:
            return None
        pending = round_.begin()
        self._flying.append(pending)
        return pending

    def _complete(self, pending: Pending | None, label: Label) -> None:
        if pending is None:
            return
        waiting = self._team.waiting(label)

        def look() -> None:
            self._look(label, waiting)
            waiting(self._absent(pending))

        complete(pending, look, self._progress)
        self._flying.remove(pending)

    def _absent(self, pending: Pending) -> list[int]:
        """Return the members of hosts that have not come."""
        if not isinstance(pending, Comparison):
            return []
        hosts = self._team.hosts
        order = sorted(set(hosts))
        missing = {order[i] for i in pending.missing()}
        return [member for member, host in enumerate(hosts) if host in missing]

    def _agree(self, comparison: Comparison | None, label: Label) -> bool:
        """Meet; return whether all hosts do the same. The same on all members."""
        self._complete(comparison, label)
        same = comparison is not None and comparison.same
        if not self._check:
            same = True  # a barrier: only that all have come matters
        if self._all_have_lanes:
            self.run(self._meet, label)
            return same
        said = bytearray(len(_YES) * self.members)
        self.run(self._tell, label, _YES if same else _NO, said)
        return said.startswith(_YES)  # of the leader, who stands first

    def _mismatch(self, label: Label, waiting: Any) -> Exception:
        """Tell the other hosts that members of this one differ."""
        if self._lane is not None:
            with self._under_way():
                comparison = self._lane.compare(0)
                self._flying.append(comparison)
                self._complete(comparison, label)
        return self._differ(label)

    def _differ(self, label: Label) -> Exception:
        self._look(label)  # who has left exchanges nothing
        self._known = self._team.differ(label)
        return self._known

    # -- who has left --------------------------------------------------------------------------

    def _look(self, label: Label, waiting: Any = None) -> None:
        """Raise what ends a wait for members that have left."""
        if self._door.ended:
            raise ServiceGoneError(f"{label}: {self._door.ended}")
        who = self._door.look()
        if who:
            if waiting is not None:
                waiting.settle()
            raise _gone(label, who)

    def watch(self, label: Label) -> Callable[[], None]:
        """Return what a wait for other hosts within an operation calls from time to time."""
        waiting = self._team.waiting(label)

        def look() -> None:
            self._look(label, waiting)
            waiting()

        return look

    def run(self, plan: Plan, label: Label, source: Any = None, out: Any = None) -> None:
        """Run a plan to its end; as `InHost.run`."""
        self._label = label
        self._afar = ""
        try:
            super().run(plan, label, source, out)
        except ServiceGoneError:
            if self._afar:  # because of whom the members of this host have left
                raise _gone(label, self._afar) from None
            raise

    def leave(self, error: BaseException) -> None:
        """Tell the others, on all hosts, that this member will not come."""
        if self._door.left:
            return
        if self._lane is not None and not self._lane.broken:  # its messages are out of step now
            self._lane.broken = f"an earlier operation ended early: {error}"
        here = ", ".join(self._team.names[self._team.local[i]] for i in self._gang.gone())
        limit = time.monotonic() + (_HEARING if here else 0.0)
        while not (who := self._door.look()) and time.monotonic() < limit:
            time.sleep(1e-3)
        self._afar = who
        self._door.leave(who or here or self._door.own)
        super().leave(error)

    def leave_at_end(self) -> None:
        """Tell the others that this process ends."""
        self._door.close()
        super().leave_at_end()

    def close(self) -> None:
        """Tell the others, on all hosts, that this member will not come again. Local."""
        self._door.close()
        super().close()

    # -- while it waits ------------------------------------------------------------------------

    @property
    def _slice_us(self) -> int:  # type: ignore[override]  # a constant where nothing flies
        return _MESSAGES_US if self._flying else InHost._slice_us

    def _meanwhile(self) -> None:
        self._progress()
        if self._label is not None:
            self._look(self._label)

    def _progress(self) -> None:
        """Let the messages under way go on."""
        for pending in self._flying:
            pending.Test()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """End what was begun on an error: the others, here and elsewhere, shall not wait."""
        before, self._door.inside = self._door.inside, True
        try:
            yield
        except BaseException as error:
            if error is self._known:
                raise
            for pending in self._flying:
                pending.abandon()
            self._flying.clear()
            self.leave(error)
            raise
        finally:
            self._door.inside = before


def _gone(label: Label, who: str) -> ServiceGoneError:
    return ServiceGoneError(
        f"{label}: {who} closed it, left it halfway, or has ended, and will never come. Look "
        "for its own error above, or close on all members after the same operation."
    )
