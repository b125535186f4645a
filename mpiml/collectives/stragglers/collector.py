"""The one place that decides which gradients of a step count, and makes the result.

It belongs to one member and lives in that member's process, but waits for nobody: what has
come is taken in by whichever thread of the process waits for a result, or by the process's
agent while all of them compute. So the member that it belongs to may be late as any other.
"""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpiml.collectives.mail import Channel, Parcel, Receiving, Sending
from mpiml.collectives.stragglers.backup import Verdict
from mpiml.collectives.stragglers.blocks import Blocks
from mpiml.collectives.stragglers.records import Kind, Record, mask
from mpiml.collectives.stragglers.rules import Pace, Rule

__all__ = ["Collector"]


class Collector:
    """Takes gradients in, and gives results out. Local; `turn` from any thread.

    Parameters
    ----------
    rule : Rule
        What counts.
    pace : Pace
        Who is where.
    blocks : Blocks
        Of the arrays.
    up, down : Channel
        Of the member that it belongs to: from the members, and to them.
    where : str
        Opens messages.

    Attributes
    ----------
    failed : str
        Why there will be no result any more; empty: there will.
    messages, nbytes : int
        What it has sent, and the bytes of the bodies.
    """

    def __init__(
        self, rule: Rule, pace: Pace, blocks: Blocks, up: Channel, down: Channel, where: str
    ) -> None:
        self.failed = ""
        self.messages = self.nbytes = 0
        self._rule, self._pace, self._blocks = rule, pace, blocks
        self._up, self._down, self._where = up, down, where
        team = up.mail.team
        self._names = team.names
        self._here = [rank == team.rank for rank in team.ranks]
        self._pending: list[Receiving] = [self._next(m) for m in range(team.size)]
        self._parcels: dict[int, Parcel] = {}  # of the current step
        self._memory: dict[int, Any] = {}  # by member, where its body lies, if not with itself
        self._free: list[Any] = []
        self._held: tuple[int, bytes, Any] | None = None  # a result that must wait
        self._flying: list[tuple[Any, list[Sending]]] = []
        self._notes: list[Sending] = []
        self._lost: set[int] = set()  # members that take nothing any more
        self._lock = threading.Lock()  # held by who takes in; never in a wait
        self._again = False

    # -- what others call ----------------------------------------------------------------------

    def turn(self) -> bool:
        """Do what there is to do; return whether there was anything. Waits for nobody."""
        busy = False
        self._again = True
        while self._again and self._lock.acquire(blocking=False):
            try:
                self._again = False
                busy = self._work() or busy
            except Exception as error:  # all members must hear of it
                self._fail(f"{self._where}: {type(error).__name__}: {error}")
            finally:
                self._lock.release()
        return busy

    def waits_for(self) -> tuple[int, ...]:
        """Return the members for whom the next result waits."""
        held, arrived = self._held, self._rule.arrived
        if held is not None:
            return self._pace.behind(held[0])
        return tuple([m for m in self._pace.live if m not in arrived])

    def leave(self, member: int, why: str) -> None:
        """Note that a member takes part no more. Local, for members of this process."""
        with self._lock:
            self._leave(member, why)

    def fail(self, why: str) -> None:
        """Tell all members that there will be no result any more."""
        with self._lock:
            self._fail(why)

    @property
    def live(self) -> tuple[int, ...]:
        """Members that take part."""
        return self._pace.live

    def quiet(self) -> bool:
        """Tell whether all have left, and everything that was sent has been taken."""
        self.turn()
        with self._lock:
            self._prune()
            return not (self._pace.live or self._flying or self._notes)

    def settled(self) -> bool:
        """Tell whether nothing of it is on its way."""
        with self._lock:
            self._prune()
            return not (self._flying or self._notes or self._memory)

    # -- taking in -----------------------------------------------------------------------------

    def _work(self) -> bool:
        busy = False
        for member in range(len(self._pending)):
            while (parcel := self._pending[member].test()) is not None:
                busy = True
                self._pending[member] = self._next(member)
                self._take(member, parcel)
        self._prune()
        return self._release() or busy

    def _next(self, member: int) -> Receiving:
        return self._up.receive(member, self._into, borrow=True)

    def _into(self, source: int, head: bytes, nbytes: int) -> Any:
        if nbytes < 0 or self._here[source]:
            return None  # of a member here: where it lies
        self._memory[source] = memory = self._block()
        return memory

    def _block(self) -> Any:
        return self._free.pop() if self._free else self._blocks.empty()

    def _take(self, member: int, parcel: Parcel) -> None:
        record = Record.unpack(parcel.head)
        if record.kind == Kind.GRADIENT:
            self._offer(member, record.step, parcel)
        elif record.kind == Kind.TOOK:
            self._pace.took(member, record.step)
        elif record.kind == Kind.ASK:
            self._say(member, Record(Kind.STATE, more=mask(self.waits_for())))
        elif record.kind == Kind.LOST:
            self._lost.add(record.member)
            self._leave(record.member, record.text)
        else:
            self._leave(member, record.text)
            self._say(member, Record(Kind.BYE))

    def _offer(self, member: int, step: int, parcel: Parcel) -> None:
        verdict = Verdict.LATE
        members = (*self._rule.arrived, member)
        try:
            if not self.failed:
                verdict = self._rule.offer(member, step)
        finally:
            if not verdict.taken:
                self._let_go(member, parcel)
        if verdict.taken:
            self._parcels[member] = parcel
        if verdict is Verdict.LAST:
            self._finish(step, members)
        self._judge()

    def _let_go(self, member: int, parcel: Parcel) -> None:
        parcel.release()
        memory = self._memory.pop(member, None)
        if memory is not None:
            self._free.append(memory)

    def _finish(self, step: int, members: tuple[int, ...]) -> None:
        messages: Mapping[int, Any] = {
            member: self._blocks.tree(parcel.body) for member, parcel in self._parcels.items()
        }
        used, block = self._rule.used(members), self._block()
        with np.errstate(all="ignore"):  # infinities are the gradients' own
            result = self._rule.combine(messages)
        self._blocks.fill(result, block, self._where)
        del messages, result
        self._drop_all()
        self._held = (step, mask(used), block)

    def _drop_all(self) -> None:
        for member, parcel in self._parcels.items():
            self._let_go(member, parcel)
        self._parcels.clear()

    # -- who is gone ---------------------------------------------------------------------------

    def _leave(self, member: int, why: str) -> None:
        self._pace.leave(member, why)
        self._judge()

    def _judge(self) -> None:
        """Give up where somebody waits for a step that so few cannot make."""
        arrived, gone = self._rule.arrived, self._pace.gone
        if self.failed or not arrived or self._rule.enough({*arrived, *self._pace.live}):
            return
        left = "; ".join([f"{self._names[m]}: {gone[m]}" for m in sorted(gone)])
        self._fail(
            f"{self._where}: step {self._rule.step} needs gradients of more members than are left, "
            f"{len(self._pace.live)} of {len(self._names)}. Gone: {left}"
        )

    def _fail(self, why: str) -> None:
        if not self.failed:
            self.failed = why
            self._drop_all()
            for member in self._pace.live:
                self._say(member, Record(Kind.FAILED, more=why.encode()))

    # -- giving out ----------------------------------------------------------------------------

    def _release(self) -> bool:
        """Send the result that is held, unless somebody is too far behind."""
        if self._held is None or self._pace.behind(self._held[0]):
            return False
        step, used, block = self._held
        self._held = None
        head = Record(Kind.RESULT, step, more=used).pack()
        live = self._pace.live
        self._flying.append((block, [self._down.send(m, head, block) for m in live]))
        self.messages += len(live)
        self.nbytes += len(live) * self._blocks.nbytes
        return True

    def _say(self, member: int, record: Record) -> None:
        self._notes.append(self._down.send(member, record.pack()))
        self.messages += 1

    def _prune(self) -> None:
        """Take back the memory of what has been sent."""
        self._notes = self._under_way(self._notes)
        flying, self._flying = self._flying, []
        for block, sendings in flying:
            left = self._under_way(sendings)
            if left:
                self._flying.append((block, left))
            elif not any(sending.to in self._lost for sending in sendings):
                self._free.append(block)

    def _under_way(self, sendings: list[Sending]) -> list[Sending]:
        left = [sending for sending in sendings if not sending.test()]
        return [sending for sending in left if sending.to not in self._lost]
