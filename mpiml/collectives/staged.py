"""Arrays outside of the arena: read where they lie, or passed through mailboxes.

Large arrays are read by the other members where the system lets them: each combines its stripe
of all, and after a meeting reads the others' stripes of the result. So a byte is copied once on
its way from one process to another.

Small ones, and all where memory may not be read, pass in chunks that stay in the caches: every
member copies its chunk to its mailbox, meets the others, and combines what all have posted
straight into its result. There are two mailboxes for each, used in turn, so one meeting per
chunk is enough. Where members are many, each combines a part of the chunk only, and fetches the
others' parts after a second meeting.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiml._native import GANG_INLINE, Plan
from mpiml.collectives.arena import Arena
from mpiml.collectives.in_host import OUT, SHARED, InHost
from mpiml.collectives.labels import Label
from mpiml.collectives.ops import DTYPES, op_code
from mpiml.collectives.regions import Regions, itemsize_of, stripe
from mpiml.collectives.team import Team

__all__ = ["CHUNK", "Staged"]

CHUNK = 256 << 10  #: bytes of a mailbox
READ = 512 << 10  #: bytes from which arrays are read where they lie
FEW = 4  # members up to which each combines whole chunks
_PLANS = 64  # kept for operations that come again


class Staged:
    """Reduces plain memory of one member. Collective over the members of the host.

    Parameters
    ----------
    team : Team
        The members.
    arena : Arena
        With mailboxes of `CHUNK` bytes, and a shared result of two chunks.
    check : bool
        Whether members compare what they do.
    reads : bool
        Whether members may read each other's memory: `mpiml.collectives.peers.readable`.
    """

    def __init__(self, team: Team, arena: Arena, check: bool, reads: bool = False) -> None:
        self.way = "copied through shared memory"
        if reads:
            self.way = f"read by the others from {READ >> 10} KiB up, else {self.way}"
        self._reads = reads
        self._host = InHost(team, arena, Regions(()), shared=False, check=check)
        self._members = len(team.local)
        self._place = team.local.index(team.index)
        self._size = team.size
        self._plans: dict[tuple[str, int, str], Plan] = {}

    def reduce(self, source: Any, out: Any, dtype: str, op: str, label: Label) -> None:
        """Combine the arrays of all members.

        Parameters
        ----------
        source, out : buffer
            C-contiguous memory of `dtype`, of the same length on every member; may be one.
        dtype, op : str
            As `mpiml.collectives.ops` names them.
        label : Label
            What is compared.
        """
        nbytes = source.nbytes
        plan = self._plans.get((dtype, nbytes, op))
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = self._plan(dtype, nbytes, op_code(op, dtype, "allreduce"))
            self._plans[dtype, nbytes, op] = plan
        self._host.run(plan, label, source, out)

    def gather(
        self, array: "np.ndarray[Any, Any]", lengths: Sequence[int], label: Label
    ) -> "list[np.ndarray[Any, Any]]":
        """Return the bytes that each member brings, (n,) uint8; see `Loose.gather`."""
        most = max(lengths, default=0)
        part = max(min(CHUNK, most), 1)
        parts = -(-most // part)
        source = np.zeros(parts * part, np.uint8)
        source[: array.size] = array
        found = np.empty((parts, self._members, part), np.uint8)
        plan = Plan()
        in_slot = part <= GANG_INLINE
        plan.sync()  # what is compared before anything is posted
        for number in range(parts):
            plan.post(number * part, part, 0, external=True, in_slot=in_slot)
            plan.sync()
            plan.gather(number * self._members * part, part, in_slot=in_slot)
        self._host.run(plan, label, source, found)
        return [
            np.ascontiguousarray(found[:, i]).reshape(-1)[:length]
            for i, length in enumerate(lengths)
        ]

    def refuse(self, label: Label) -> None:
        """Come to an operation that this member cannot do."""
        self._host.refuse(label)

    def _plan(self, dtype: str, nbytes: int, op: int) -> Plan:
        plan = Plan()
        if self._reads and nbytes >= READ:
            self._read(plan, dtype, nbytes, op)
        else:
            self._pass(plan, dtype, nbytes, op)
        return plan

    def _read(self, plan: Plan, dtype: str, nbytes: int, op: int) -> None:
        size = itemsize_of(dtype)
        stripes = [stripe(nbytes // size, size, i, self._members) for i in range(self._members)]
        plan.offer()
        plan.sync()
        plan.take()
        low, high = stripes[self._place]
        plan.reduce_offered(DTYPES[dtype], op, self._size, low * size, high - low)
        plan.sync()
        for i in range(
            1, self._members
        ):  # begin with the next one: all read from different ones
            other = (self._place + i) % self._members
            low, high = stripes[other]
            plan.read_offered(other, low * size, (high - low) * size)
        plan.sync()  # until here others read from the own arrays

    def _pass(self, plan: Plan, dtype: str, nbytes: int, op: int) -> None:
        code, size = DTYPES[dtype], itemsize_of(dtype)
        in_slot = nbytes <= GANG_INLINE
        for number, at in enumerate(range(0, max(nbytes, 1), CHUNK)):
            length = min(CHUNK, nbytes - at)
            count = length // size
            plan.post(at, length, 0, external=True, in_slot=in_slot)
            plan.sync()
            if self._members <= FEW or in_slot:
                plan.reduce_posted(code, op, self._size, 0, at, count, OUT, in_slot=in_slot)
                continue
            shared = number % 2 * CHUNK
            low, high = stripe(count, size, self._place, self._members)
            if high > low:
                begin = low * size
                plan.reduce_posted(
                    code, op, self._size, begin, shared + begin, high - low, SHARED
                )
            plan.sync()
            plan.fetch(shared, at, length)

    def close(self) -> None:
        """Tell the others that this member will not come again. Local."""
        self._host.close()
