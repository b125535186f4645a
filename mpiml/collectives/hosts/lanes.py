"""Messages between hosts: one lane joins a process of each host, by MPI.

What MPI reduces as we do, it reduces. The rest, 16-bit floats and min and max of floats, goes
part by part to the host that reduces the part, in the order of the hosts, and back to all: as
many bytes as MPI's own algorithms send (Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005). Everything is nonblocking; whoever waits
can be told to stop.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from mpiml import _native
from mpiml.collectives.hosts.chunks import Choice, Piece, by_mpi
from mpiml.collectives.hosts.farewells import farewells_of
from mpiml.collectives.messages import keep
from mpiml.collectives.ops import OPS
from mpiml.collectives.team import Team
from mpiml.errors import UsageError

__all__ = ["Comparison", "Lane", "Pending", "open_lane"]

_TAGS = 16_000  # MPI promises 32767; an operation is over long before its tag comes again
_SMALL = 8192  # bytes that each host may send to all others at once: one latency, not two
_TOLD = 64  # hosts up to which each tells every other what it does


class Pending:
    """Messages under way, and what is to be done when they have come.

    Local.

    Parameters
    ----------
    requests : list of mpi4py.MPI.Request
        They keep their buffers.
    then : function, optional
        Called when all are done. What it returns, if anything, comes next.
    """

    __slots__ = ("_requests", "_then")

    def __init__(
        self, requests: list[Any], then: "Callable[[], Pending | None] | None" = None
    ) -> None:
        self._requests = requests
        self._then = then

    def Test(self) -> bool:
        """Make progress; return whether all is done. Named as MPI's."""
        while True:
            while self._requests:
                if not self._requests[-1].Test():
                    return False
                self._requests.pop()
            if self._then is None:
                return True
            then, self._then = self._then, None
            after = then()
            if after is not None:
                self._requests, self._then = after._requests, after._then

    def abandon(self) -> None:
        """Keep the buffers for as long as the process lives: MPI may still use them."""
        if self._requests:
            keep(self._requests)


class Comparison(Pending):
    """Whether all hosts do the same; `same` is known when it is done.

    Local. Each host tells every other one, so that it is known who has not come; where hosts
    are too many for that, MPI looks for the least.
    """

    __slots__ = ("_from", "_own", "_seen")

    def __init__(self, lane: "Lane", hash_: int) -> None:
        self._from: dict[int, Any] = {}
        inverse = ~hash_ & 0xFFFFFFFFFFFFFFFF if hash_ else 0
        self._own = hash_.to_bytes(8, "little") + inverse.to_bytes(8, "little")
        if lane.size > _TOLD:
            from mpi4py import MPI

            # The least of the hashes and the least of their complements are the own ones only
            # where all are equal. No hash is 0.
            self._seen = bytearray(16)
            words = [[memory, 2, MPI.UINT64_T] for memory in (self._own, self._seen)]
            super().__init__([lane.comm.Iallreduce(*words, MPI.MIN)])
            return
        self._seen = bytearray(self._own * lane.size)
        others = [i for i in range(lane.size) if i != lane.rank]
        sends: list[list[memoryview]] = [[] for _ in range(lane.size)]
        receives: list[list[memoryview]] = [[] for _ in range(lane.size)]
        own, seen = memoryview(self._own), memoryview(self._seen)
        for host in others:
            sends[host] = [own]
            receives[host] = [seen[16 * host : 16 * host + 16]]
        requests = lane.start(sends, receives, lane.tag())
        # `start` begins with the receives from each host, one before each send.
        sources = [(lane.rank - step) % lane.size for step in range(1, lane.size)]
        self._from = dict(zip(sources, requests[::2], strict=True))
        super().__init__(requests)

    @property
    def same(self) -> bool:
        """Whether all hosts brought the same, and no host brought 0."""
        return self._seen == self._own * (len(self._seen) // 16) and any(self._own)

    def missing(self) -> list[int]:
        """Return the hosts that have not come; none where that is not known."""
        return [host for host, request in self._from.items() if not request.Test()]


class Lane:
    """One process of each host; rank i is host i's.

    Collective over the ranks of `comm`: every method but `close`, in the same order.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        For this lane alone.
    number : int
        Tells the lanes of a team that were made together from others; the same on all hosts.
    """

    def __init__(self, comm: Any, number: int = 1) -> None:
        self.comm = comm
        self.number = number
        self.size: int = comm.size
        self.rank: int = comm.rank
        self._next = 0
        self._scratch: list[bytearray] = []
        self.broken = ""  #: why nothing can be sent any more

    def compare(self, hash_: int) -> Comparison:
        """Begin to compare what the hosts do; 0: members of this host differ already."""
        return Comparison(self, hash_)

    def allreduce(self, memory: memoryview, piece: Piece, op: str, divisor: float) -> Pending:
        """Begin to combine the `memory` of all, in place."""
        if self.size == 2 or len(memory) * (self.size - 1) <= _SMALL:
            return self._all_to_all(memory, piece, op, divisor)
        if by_mpi(op, piece.region.dtype_name):
            return self._by_mpi(memory, piece, op, divisor)
        return self._in_parts(memory, piece, op, divisor)

    def broadcast(self, memory: memoryview, root: int) -> Pending:
        """Begin to give all what `root` has in `memory`."""
        from mpi4py import MPI

        return Pending([self.comm.Ibcast([memory, len(memory), MPI.BYTE], root)])

    def exchange(
        self,
        sends: Sequence[Sequence[memoryview]],
        receives: Sequence[Sequence[memoryview]],
        then: "Callable[[], Pending | None] | None" = None,
    ) -> Pending:
        """Begin to send and to receive pieces: for each host those to it, and from it."""
        return Pending(self.start(sends, receives, self.tag()), then)

    def scratch(self, nbytes: int) -> bytearray:
        """Return memory of at least `nbytes`; give it back by `recycle`."""
        for i, memory in enumerate(self._scratch):
            if len(memory) >= nbytes:
                return self._scratch.pop(i)
        return bytearray(nbytes)

    def recycle(self, memory: bytearray) -> None:
        """Take memory back that no message uses any more."""
        if len(self._scratch) < 4:
            self._scratch.append(memory)

    # -- ways to combine -----------------------------------------------------------------------

    def _by_mpi(self, memory: memoryview, piece: Piece, op: str, divisor: float) -> Pending:
        from mpi4py import MPI

        kind, theirs = _types()[piece.region.code], _operations()[op]
        request = self.comm.Iallreduce(MPI.IN_PLACE, [memory, piece.count, kind], theirs)
        if op != "mean":
            return Pending([request])
        code = piece.region.code
        return Pending(
            [request], lambda: _native.reduce(code, OPS["mean"], [memory], [memory], divisor)
        )

    def _all_to_all(self, memory: memoryview, piece: Piece, op: str, divisor: float) -> Pending:
        """Every host receives all and combines all: as few bytes for two hosts, or for few."""
        nbytes = len(memory)
        scratch = self.scratch(nbytes * (self.size - 1))
        sources = self._places(memory, scratch, nbytes)
        own = self.rank
        others = [[] if i == own else [m] for i, m in enumerate(sources)]
        sends: list[list[memoryview]] = [[] if i == own else [memory] for i in range(self.size)]

        def combine() -> None:
            _native.reduce(piece.region.code, OPS[op], sources, [memory], divisor)
            self.recycle(scratch)

        return Pending(self.start(sends, others, self.tag()), combine)

    def _in_parts(self, memory: memoryview, piece: Piece, op: str, divisor: float) -> Pending:
        """Every host receives its part from all, combines it, and sends the result to all."""
        parts = [
            memory[p.at - piece.at : p.at - piece.at + p.nbytes]
            for p in [piece.part(i, self.size) for i in range(self.size)]
        ]
        mine = parts[self.rank]
        scratch = self.scratch(len(mine) * (self.size - 1))
        sources = self._places(mine, scratch, len(mine))
        own = self.rank
        there = [[] if i == own or not part else [part] for i, part in enumerate(parts)]
        here = [[] if i == own or not mine else [m] for i, m in enumerate(sources)]
        back = [[] if i == own or not mine else [mine] for i in range(self.size)]

        first, second = self.tag(), self.tag()  # now: later, chunks go their own ways

        def combine() -> Pending:
            _native.reduce(piece.region.code, OPS[op], sources, [mine], divisor)
            self.recycle(scratch)
            return Pending(self.start(back, there, second))

        return Pending(self.start(there, here, first), combine)

    def _places(self, own: memoryview, scratch: bytearray, nbytes: int) -> list[memoryview]:
        """Return for each host where its `nbytes` come to lie, in their order."""
        rest = memoryview(scratch)
        found = []
        for i in range(self.size):
            if i == self.rank:
                found.append(own)
            else:
                found.append(rest[:nbytes])
                rest = rest[nbytes:]
        return found

    def tag(self) -> int:
        """Return the tag of the messages that come next: the same on all hosts."""
        self._next += 1
        return self._next % _TAGS

    def start(
        self,
        sends: Sequence[Sequence[memoryview]],
        receives: Sequence[Sequence[memoryview]],
        tag: int,
    ) -> list[Any]:
        """Begin point-to-point messages; each host begins with another one."""
        from mpi4py import MPI

        comm, requests = self.comm, []
        for step in range(1, self.size):
            source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
            requests += [
                comm.Irecv([m, len(m), MPI.BYTE], source, tag) for m in receives[source]
            ]
            requests += [comm.Isend([m, len(m), MPI.BYTE], target, tag) for m in sends[target]]
        return requests

    def close(self) -> None:
        """Free the communicator, unless messages are left in it. Collective, as MPI has it."""
        from mpi4py import MPI

        broken = self.broken
        self.broken = "the communicator has been freed; free it after the last operation"
        if MPI.Is_finalized() or broken or self.comm.Iprobe():  # of an operation
            return  # to which this host has not come
        self.comm.Free()


def open_lane(team: Team, choice: Choice, label: Any) -> Lane | None:
    """Make the lanes between the hosts of a team, or return those made before.

    Collective over the team.

    Parameters
    ----------
    team : Team
        The members.
    choice : Choice
        Who sends.
    label
        What for, in messages.

    Returns
    -------
    Lane or None
        This member's lane; None if it sends nothing between hosts.

    Raises
    ------
    UsageError
        Settings differ between processes; on all members.
    """
    sends = choice.senders == "stripes" or team.index == team.local[0]
    colour = team.local.index(team.index) if sends else -1
    said = f"{choice.senders},{choice.chunk}".encode()
    shared, key = team.room.shared, ("lanes", choice.senders, team.hosts)
    known: dict[int, Lane] = shared.get(key, {})
    broken = any(lane.broken for lane in known.values())

    def make(everyone: list[bytes]) -> dict[int, Lane]:
        ways = [text[:-1] for text in everyone]
        if len(set(ways)) > 1:
            texts = dict(zip(ways, team.names, strict=True))
            got = ", ".join(f"{text.decode()} ({name})" for text, name in texts.items())
            raise UsageError(
                f"{label}: expected one way to send between hosts, got {got}. Set "
                "MPIML_BETWEEN and MPIML_BETWEEN_CHUNK alike on all ranks."
            )
        again = any(text.endswith(b"!") for text in everyone)  # broken on one host is on all
        lanes: dict[int, Lane] | None = None if again else shared.get(key)
        if lanes is None:
            farewells_of(team)  # they end before the lanes do, when the team is closed
            shared["lanes made"] = shared.get("lanes made", 0) + 1
            lanes = _split(team, choice, shared["lanes made"])
            shared[key] = lanes
            team.closes(partial(_close, team, lanes.values()))
        return lanes

    lanes: dict[int, Lane] = team.share(said + (b"!" if broken else b" "), make, label)
    return lanes[colour] if sends else None


def _split(team: Team, choice: Choice, number: int) -> dict[int, Lane]:
    """Make this process's lanes, by place. Collective over the team's communicator."""
    from mpi4py import MPI

    places = {team.local.index(i) for i in team.housemates}
    if choice.senders == "leaders":
        colour = 0 if 0 in places else MPI.UNDEFINED
    else:
        (colour,) = places
    order = sorted(set(team.hosts))
    comm = team.comm.Split(colour, order.index(team.hosts[team.index]))
    if comm == MPI.COMM_NULL:
        return {}
    comm.Set_name(f"mpiml lane {colour} of {team.title}")
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return {colour: Lane(comm, number)}


_known: list[Any] = []


def _types() -> Any:
    """Return MPI's types by the kernels' numbers."""
    if not _known:
        from mpi4py import MPI

        _known.append(
            {
                0: MPI.FLOAT, 1: MPI.DOUBLE, 4: MPI.INT8_T, 5: MPI.INT16_T, 6: MPI.INT32_T,
                7: MPI.INT64_T, 8: MPI.UINT8_T, 9: MPI.UINT16_T, 10: MPI.UINT32_T,
                11: MPI.UINT64_T, 12: MPI.C_FLOAT_COMPLEX, 13: MPI.C_DOUBLE_COMPLEX,
            }
        )  # fmt: skip
        _known.append(
            {
                "sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX,
                "prod": MPI.PROD,
            }
        )  # fmt: skip
    return _known[0]


def _operations() -> Any:
    _types()
    return _known[1]


def _close(team: Team, lanes: Iterable[Lane]) -> None:
    if not team.spoiled:
        for lane in lanes:
            lane.close()
