"""Collectives among members that share memory: plans for the native gang.

Each operation is a program of few steps, written once. Small payloads travel in the line or
mailbox by which members tell that they have come, so that one meeting is enough and each
member combines everything itself; larger ones are combined in stripes, each element by one
member, which writes it to all. Elements are combined in the order of the members in both ways.
"""

from collections.abc import Callable
from typing import Any

from mpiml._native import GANG_INLINE, Plan
from mpiml.collectives.arena import Arena
from mpiml.collectives.labels import Label, mismatch
from mpiml.collectives.ops import op_code
from mpiml.collectives.over import GUESTS
from mpiml.collectives.regions import Regions, stripe
from mpiml.collectives.team import Team
from mpiml.errors import ServiceGoneError

__all__ = ["ALL", "OUT", "OWN", "SHARED", "SMALL", "TEXT", "InHost", "box_of", "small"]

ALL, OWN, SHARED, OUT = -1, -2, -3, -4  # where a reduction goes to: mpiml::Where
SMALL = 8192  #: bytes up to which a payload is posted and combined by every member
TEXT = 2048  #: bytes of a mailbox for the texts of members that turn out to differ
_MOST = 1 << 20  # bytes of such a text
_DONE, _MISMATCH, _LEFT = 0, 2, 3


def small(nbytes: int, members: int) -> bool:
    """Tell whether a payload is better combined by every member than in stripes."""
    return nbytes * members <= 2 * SMALL


def box_of(nbytes: int, members: int) -> int:
    """Return the bytes of a mailbox that serve a payload, and the text of an error."""
    return max(TEXT, nbytes if small(nbytes, members) else 0)


class InHost:
    """The operations of one member on an arena.

    Collective over the members of the host: every operation. One at a time; the caller sees
    to it.

    Parameters
    ----------
    team : Team
        The members.
    arena : Arena
        Their memory.
    regions : Regions
        What lies in each segment.
    shared : bool
        Whether results go to the host's shared result, not to each member's segment.
    check : bool
        Whether members compare what they do.
    """

    _slice_us = 50_000  # how long to wait for members before looking around

    def __init__(
        self, team: Team, arena: Arena, regions: Regions, shared: bool, check: bool
    ) -> None:
        self._team = team
        self._check = check
        self._gang = arena.gang
        self._regions = regions
        self._to = SHARED if shared else ALL
        self._place = team.local.index(team.index)
        self.members = len(team.local)  #: how many share the arena
        self._plans: dict[tuple[str, Any], Plan] = {}
        self._allreduces: dict[str, Plan] = {}
        self._broken: str | None = None
        self.way = "shared memory"
        self.used = _used(regions)
        GUESTS.add(self)

    @property
    def team(self) -> Team:
        """The members; where memory is not shared, as if each process were a host."""
        return self._team

    # -- operations ----------------------------------------------------------------------------

    def allreduce(self, op: str, label: Label) -> None:
        """Combine all segments, in place or to the shared result."""
        plan = self._allreduces.get(op)
        if plan is None:
            plan = self._plan(("allreduce", op), lambda p: self._allreduce(p, op))
            self._allreduces[op] = plan
        self.run(plan, label)

    def combine(self, op: str, divisor: float, label: Label) -> None:
        """Combine the segments of this host, also where an allreduce would go to others.

        A mean divides by `divisor`. Collective over the members of the host.
        """
        self.run(
            self._plan(("combine", (op, divisor)), lambda p: self._allreduce(p, op, divisor)),
            label,
        )

    def reduce_scatter(self, op: str, label: Label) -> None:
        """Combine all segments; each member's stripe is valid in its own segment afterwards."""
        self.run(self._plan(("scatter", op), lambda p: self._scatter(p, op)), label)

    def allgather(self, label: Label) -> None:
        """Copy every member's stripe to all segments."""
        self.run(self._plan(("allgather", None), self._allgather), label)

    def broadcast(self, place: int, label: Label) -> None:
        """Copy the segment of the member at `place` to all others."""
        self.run(self._plan(("broadcast", place), lambda p: self._broadcast(p, place)), label)

    def barrier(self, label: Label) -> None:
        """Meet."""
        self.run(self._plan(("barrier", None), lambda p: p.sync()), label)

    def refuse(self, label: Label) -> None:
        """Come to an operation that this member cannot do: the others hear of it, and end."""
        if self._check:  # else nobody looks at what others do, and they would be out of step
            self.run(self._plan(("refuse", None), lambda p: p.sync()), label)

    # -- their steps ---------------------------------------------------------------------------

    def _plan(self, key: tuple[str, Any], write: Callable[[Plan], None]) -> Plan:
        plan = self._plans.get(key)
        if plan is None:
            plan = Plan()
            write(plan)
            self._plans[key] = plan
        return plan

    def _allreduce(self, plan: Plan, op: str, divisor: float | None = None) -> None:
        divisor = divisor or self._team.size
        if self._to == ALL and small(self.used, self.members):
            in_slot = self.used <= GANG_INLINE
            plan.post(0, self.used, 0, in_slot=in_slot)
            plan.sync()
            for region in self._regions.regions:
                count = min(region.count, (self.used - region.offset) // region.itemsize)
                plan.reduce_posted(
                    region.code, self._op(op, region), divisor, region.offset, region.offset,
                    count, OWN, in_slot=in_slot,
                )  # fmt: skip
            return
        plan.sync()
        self._reduce(plan, op, self._to, divisor)
        plan.sync()

    def _scatter(self, plan: Plan, op: str) -> None:
        plan.sync()
        self._reduce(plan, op, OWN, self._team.size)
        plan.sync()

    def _reduce(self, plan: Plan, op: str, to: int, divisor: float) -> None:
        for region in self._regions.regions:
            low, high = stripe(region.count, region.itemsize, self._place, self.members)
            if high > low:
                at = region.offset + low * region.itemsize
                code = self._op(op, region)
                plan.reduce(region.code, code, divisor, at, high - low, to)

    def _allgather(self, plan: Plan) -> None:
        plan.sync()
        for region in self._regions.regions:
            for place in range(self.members):
                low, high = stripe(region.count, region.itemsize, place, self.members)
                if high > low and place != self._place:
                    size = region.itemsize
                    plan.pull(place, region.offset + low * size, (high - low) * size)
        plan.sync()

    def _broadcast(self, plan: Plan, place: int) -> None:
        plan.sync()
        if place != self._place:
            plan.pull(place, 0, self._regions.nbytes)
        plan.sync()

    def _op(self, op: str, region: Any) -> int:
        return op_code(op, region.dtype_name, f"Bucket.{op}")

    # -- running -------------------------------------------------------------------------------

    def run(self, plan: Plan, label: Label, source: Any = None, out: Any = None) -> None:
        """Run a plan to its end.

        Raises
        ------
        UsageError
            The members do not do the same; on all of them.
        ServiceGoneError
            A member has closed its part, or an operation was left halfway before.
        """
        if self._broken is not None:
            raise ServiceGoneError(f"{label}: {self._broken}")
        try:
            status = self._gang.run(plan, label.hash, self._check, self._slice_us, source, out)
            if status:
                self._late(status, plan, label, source, out)
        except BaseException as error:  # that of a signal may come after any line
            if self._gang.busy:
                self.leave(error)
            raise

    def _late(self, status: int, plan: Plan, label: Label, source: Any, out: Any) -> None:
        waiting = self._team.waiting(label)
        while status not in (_DONE, _MISMATCH, _LEFT):
            waiting([self._team.local[i] for i in self._gang.missing()])
            self._meanwhile()
            status = self._gang.run(plan, label.hash, self._check, self._slice_us, source, out)
        if status == _LEFT:
            waiting.settle()
            raise self._gone(label)
        if status == _MISMATCH:
            raise self._mismatch(label, waiting)

    def _gone(self, label: Label) -> ServiceGoneError:
        """Return the error for members that have left."""
        gone = [self._team.names[self._team.local[i]] for i in self._gang.gone()]
        return ServiceGoneError(
            f"{label}: {', '.join(gone)} closed it, left it halfway, or has ended, and will "
            "never come. Look for its own error above, or close on all members after the same "
            "operation."
        )

    def leave(self, error: BaseException) -> None:
        """Tell the others, who might wait for this member in vain, that it will not come."""
        self._gang.leave()
        self._broken = f"an earlier operation ended early: {error}"

    def _meanwhile(self) -> None:
        """Make other progress while members are late."""

    def _mismatch(self, label: Label, waiting: Any) -> Exception:
        """Tell each other what we were about to do. The members are in step: all see it."""
        text = label.text().encode("utf-8", "replace")[:_MOST]
        lengths = self._say(len(text).to_bytes(8, "little"), 8, label, waiting)
        sizes = [int.from_bytes(length, "little") for length in lengths]
        parts: list[list[bytes]] = [[] for _ in sizes]
        for at in range(0, max(sizes), TEXT):
            for part, said in zip(
                parts, self._say(text[at : at + TEXT], TEXT, label, waiting), strict=True
            ):
                part.append(said)
        texts = [
            b"".join(part)[:size].decode("utf-8", "replace")
            for part, size in zip(parts, sizes, strict=True)
        ]
        return mismatch(texts, self._team.title, self._team.index)

    def leave_at_end(self) -> None:
        """Tell the others that this process ends."""
        self._gang.leave()

    def _say(self, said: bytes, size: int, label: Label, waiting: Any) -> list[bytes]:
        """Give all members `size` bytes of each."""
        plan = Plan()
        plan.post(0, size, 0, external=True)
        plan.sync()
        plan.gather(0, size)
        everyone = bytearray(size * self.members)
        text = said.ljust(size, b"\0")
        while status := self._gang.run(plan, 1, False, self._slice_us, text, everyone):
            if status == _LEFT:
                raise self._gone(label)
            waiting([self._team.local[i] for i in self._gang.missing()])
        return [bytes(everyone[i * size : (i + 1) * size]) for i in range(self.members)]

    def close(self) -> None:
        """Tell the others that this member will not come again. Local."""
        self._gang.leave()
        self._broken = "it has been closed"


def _used(regions: Regions) -> int:
    """Return where the last element ends; what follows is padding."""
    ends = [0]
    for i in range(len(regions.leaves)):
        offset, shape, name = regions.leaf(i)
        size = next(r.itemsize for r in regions.regions if r.dtype_name == name)
        count = 1
        for length in shape:
            count *= length
        ends.append(offset + count * size)
    return max(ends)
