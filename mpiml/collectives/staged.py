"""Arrays outside of the arena, reduced by way of segments in it.

An array passes in chunks that stay in the caches: every member copies a chunk to its segment,
meets the others, combines its stripe of all segments in place, and after the next meeting copies
the result out. A segment holds two chunks, used in turn, so that the copies of one go on before
the meeting that the other needs anyway: one meeting for each chunk.

Small arrays are posted, and every member combines all, as in a bucket.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiml._native import GANG_INLINE, Plan
from mpiml.collectives.arena import Arena, make_arena
from mpiml.collectives.in_host import ALL, OUT, SMALL, InHost, box_of, small
from mpiml.collectives.labels import Label
from mpiml.collectives.ops import DTYPES, op_code
from mpiml.collectives.regions import Regions, itemsize_of, stripe
from mpiml.collectives.team import Team
from mpiml.errors import SharedMemoryError

__all__ = ["CHUNK", "Staged", "chunk_of", "staged_arena"]

CHUNK = 1 << 20  #: most bytes of a chunk; of 64 KiB to 8 MiB the best for 2 and 4 members
_ROOM = 16 << 20  # bytes for all chunks of a host, since a container may have 64 MiB only
_LEAST = 64 << 10
_PLANS = 64  # kept for operations that come again


def chunk_of(members: int) -> int:
    """Return the bytes of a chunk, of which each member of a host has two."""
    return max(min(CHUNK, _ROOM // (2 * members) // 4096 * 4096), _LEAST)


def staged_arena(team: Team, label: Label) -> Arena | SharedMemoryError:
    """Make memory for a `Staged` of a team on one host. Collective over the team."""
    members = team.size
    box = box_of(2 * SMALL // members, members)  # the largest that is small
    return make_arena(team, 2 * chunk_of(members), label, box)


class Staged:
    """Reduces plain memory of one member. Collective over the members of the host.

    Parameters
    ----------
    team : Team
        The members.
    arena : Arena
        With segments of two chunks, and mailboxes for what is `small`.
    check : bool
        Whether members compare what they do.
    """

    way = "copied through shared memory"

    def __init__(self, team: Team, arena: Arena, check: bool) -> None:
        self._chunk = arena.each // 2
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
        part = max(min(self._chunk, most), 1)
        parts = max(-(-most // part), 1)
        source = np.zeros(parts * part, np.uint8)
        source[: array.size] = array
        found = np.empty((parts, self._members, part), np.uint8)
        plan = Plan()
        if most <= GANG_INLINE:
            plan.post(0, part, 0, external=True, in_slot=True)
            plan.sync()
            plan.gather(0, part, in_slot=True)
        else:
            for number in range(parts):
                half = number % 2 * self._chunk
                plan.put(number * part, part, half)
                plan.sync()
                for member in range(self._members):
                    place = (number * self._members + member) * part
                    plan.get(member, half, place, part)
            plan.sync()  # others read the own segment until here
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
        code, size = DTYPES[dtype], itemsize_of(dtype)
        if small(nbytes, self._members):
            in_slot = nbytes <= GANG_INLINE
            plan.post(0, nbytes, 0, external=True, in_slot=in_slot)
            plan.sync()
            plan.reduce_posted(code, op, self._size, 0, 0, nbytes // size, OUT, in_slot=in_slot)
            return plan
        chunks = [
            (at, min(self._chunk, nbytes - at), number % 2 * self._chunk)
            for number, at in enumerate(range(0, nbytes, self._chunk))
        ]
        plan.put(*chunks[0])
        for number, (_, length, place) in enumerate(chunks):
            plan.sync()  # all have put this chunk, and combined the one before
            if number:
                _take(plan, self._place, chunks[number - 1])
            low, high = stripe(length // size, size, self._place, self._members)
            if high > low:
                plan.reduce(code, op, self._size, place + low * size, high - low, ALL)
            if number + 1 < len(chunks):  # where the one before lay, which nobody needs now
                plan.put(*chunks[number + 1])
        plan.sync()
        _take(plan, self._place, chunks[-1])
        return plan

    def close(self) -> None:
        """Tell the others that this member will not come again. Local."""
        self._host.close()


def _take(plan: Plan, own: int, chunk: tuple[int, int, int]) -> None:
    at, length, place = chunk
    plan.get(own, place, at, length)
