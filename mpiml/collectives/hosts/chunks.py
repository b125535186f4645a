"""How an operation is cut up that goes between hosts: who sends, in which pieces, in which order.

Pure: every member of a team computes the same from the same layout, so nothing of it is sent.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from mpiml.collectives.ops import COMPLEX
from mpiml.collectives.regions import Region, Regions, stripe

__all__ = [
    "WINDOW",
    "Choice",
    "Piece",
    "Split",
    "by_mpi",
    "choose",
    "host_spans",
    "pieces",
    "schedule",
    "split_op",
]

#: chunks that are on their way at a time; while they are, the next is reduced in the host
WINDOW: Final = 2
#: bytes of a chunk: large enough for the speed of a link, small enough to overlap soon
CHUNK: Final = 1 << 20
#: bytes of a message where nothing overlaps with it: below what counts of MPI can say
WHOLE: Final = 1 << 30
#: bytes from which several members of a host send; below, latency is all that counts
STRIPES_FROM: Final = 1 << 20


class Choice(NamedTuple):
    """Who sends between hosts, and how much at a time.

    Attributes
    ----------
    senders
        "leaders": the first member of each host sends everything; "stripes": every member
        of a host sends a part of its own.
    chunk
        Bytes that are reduced and sent at a time.
    reason
        Why, for people.
    """

    senders: Literal["leaders", "stripes"]
    chunk: int
    reason: str

    def __str__(self) -> str:
        return f"{self.senders}, chunks of {self.chunk:,} bytes: {self.reason}"


class Piece(NamedTuple):
    """Elements of one dtype that stand side by side."""

    region: Region
    at: int  #: bytes from the start of the block
    #: elements
    count: int  # type: ignore[assignment]  # hides tuple.count

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.count * self.region.itemsize

    def part(self, index: int, size: int) -> "Piece":
        """Return what part `index` of `size` is; perhaps no elements."""
        low, high = stripe(self.count, self.region.itemsize, index, size)
        return Piece(self.region, self.at + low * self.region.itemsize, high - low)


class Split(NamedTuple):
    """An operation in two: in each host, then between the hosts."""

    inside: str
    inside_divisor: float
    between: str
    divisor: float


def choose(
    hosts: Sequence[int],
    ranks: Sequence[int],
    nbytes: int,
    asked: str = "auto",
    chunk: int | None = None,
    crowded: bool = False,
) -> Choice:
    """Return who sends between hosts.

    Parameters
    ----------
    hosts, ranks : sequence of int
        For each member its host and its process.
    nbytes : int
        Size of the block.
    asked : {"auto", "leaders", "stripes"}
        ``MPIML_BETWEEN``. Stripes need the same number of members on every host, each in a
        process of its own; they are not taken without.
    chunk : int, optional
        ``MPIML_BETWEEN_CHUNK``, in bytes.
    crowded : bool
        Whether members of a host share cores: several senders then wait for each other.
    """
    counts = {hosts.count(host) for host in hosts}
    possible = len(counts) == 1 and len(set(ranks)) == len(ranks)
    most = max(counts)
    several = possible and most > 1
    size = (WHOLE if most == 1 else CHUNK) if chunk is None else max(chunk // 64 * 64, 64)
    on = f"up to {most} members on each of {len(set(hosts))} hosts"
    if asked == "stripes" and several:
        return Choice("stripes", size, f"{on}, as MPIML_BETWEEN says")
    if asked == "leaders" or (asked == "stripes" and not several):
        why = "as MPIML_BETWEEN says" if asked == "leaders" else "stripes are not possible"
        return Choice("leaders", size, f"{on}, {why}")
    if several and nbytes >= STRIPES_FROM and not crowded:
        return Choice("stripes", size, f"{on}, {nbytes:,} bytes")
    why = f"{nbytes:,} bytes"
    if crowded:
        why = "members share cores"
    if not possible:
        why = "not a process for each, as many on every host"
    return Choice("leaders", size, f"{on}, {why}")


def split_op(op: str, dtype: str, members: int, hosts: int) -> Split:
    """Return the two halves of an operation.

    A mean is a sum that is divided once, at the end. Of 16-bit numbers the sum of a host
    might not be one, so there it is a mean of the hosts' means, each scaled alike.
    """
    if op != "mean":
        return Split(op, 1.0, op, 1.0)
    if dtype in ("float16", "bfloat16"):
        return Split("mean", members / hosts, "mean", float(hosts))
    return Split("sum", 1.0, "mean", float(members))


def by_mpi(op: str, dtype: str) -> bool:
    """Tell whether MPI reduces this as we do: it has no 16-bit floats, and it loses NaN."""
    if dtype in ("float16", "bfloat16"):
        return False
    ordered = op in ("min", "max")
    return not (ordered and (dtype.startswith("float") or dtype in COMPLEX))


def pieces(regions: Regions, chunk: int) -> list[Piece]:
    """Return the block cut into pieces of at most `chunk` bytes, each of one dtype."""
    return [
        piece
        for region in regions.regions
        for piece in _cut(region, 0, region.count, max(chunk // region.itemsize, 1))
    ]


def _cut(region: Region, low: int, high: int, most: int) -> Iterator[Piece]:
    for start in range(low, high, most):
        at = region.offset + start * region.itemsize
        yield Piece(region, at, min(most, high - start))


def host_spans(
    regions: Regions, hosts: Sequence[int], chunk: int
) -> list[list[tuple[int, Piece]]]:
    """Return, in rounds, what belongs to the members of each host after a reduce-scatter.

    Parameters
    ----------
    regions : Regions
        The layout.
    hosts : sequence of int
        For each member its host.
    chunk : int
        Bytes of a round, all hosts together.

    Returns
    -------
    list of list of (int, Piece)
        Each round has pieces of at most ``chunk / number of hosts`` bytes, with the members
        they belong to.
    """
    number = len(set(hosts))
    queues: dict[int, list[tuple[int, Piece]]] = {host: [] for host in sorted(set(hosts))}
    for region in regions.regions:
        most = max(chunk // number // region.itemsize, 1)
        for member, host in enumerate(hosts):
            low, high = stripe(region.count, region.itemsize, member, len(hosts))
            queues[host].extend((member, piece) for piece in _cut(region, low, high, most))
    rounds: list[list[tuple[int, Piece]]] = []
    while any(queues.values()):
        rounds.append(
            [entry for queue in queues.values() for entry in _take(queue, chunk, number)]
        )
    return rounds


def _take(queue: list[tuple[int, Piece]], chunk: int, number: int) -> list[tuple[int, Piece]]:
    """Take what fits into a host's part of a round, at least one piece."""
    taken: list[tuple[int, Piece]] = []
    room = chunk // number
    while queue and (not taken or queue[0][1].nbytes <= room):
        room -= queue[0][1].nbytes
        taken.append(queue.pop(0))
    return taken


def schedule(count: int, window: int = WINDOW) -> Iterator[tuple[int | None, int | None]]:
    """Yield which chunk is reduced and begun next, and which must have come by then.

    >>> list(schedule(3, 2))
    [(0, None), (1, None), (2, 0), (None, 1), (None, 2)]
    """
    for i in range(count):
        yield i, (i - window if i >= window else None)
    for i in range(max(count - window, 0), count):
        yield None, i
