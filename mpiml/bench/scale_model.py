"""What a program costs to start and to end on many ranks: a model after LogGP, as functions.

LogGP (Alexandrov, Ionescu, Schauser, Scheiman, 1995) says what a message of k bytes costs: ``o`` on
the sender's core, ``L`` on its way, ``(k - 1) G`` for its length, ``o`` on the receiver's core, and
``g`` from one message of a rank to its next. docs/scale.md derives what stands here. All times are
seconds.
"""

from math import ceil, log2
from typing import NamedTuple

from mpiml.control import FANOUT

__all__ = ["Machine", "Part", "launch", "levels"]

RECORD = 512  # bytes of the handshake, from each rank to each
DUPLICATES = (
    5  # the engine's, the user's and a role's, and two that mpi4py makes for reductions
)
SUMS = 8  # two agreements at the start, five sums and a barrier at the end
RESULT = 64  # bytes of a small return value, with its header


class Machine(NamedTuple):
    """The parameters.

    Attributes
    ----------
    L, o, g, G
        Of raw MPI: latency, overhead at each end, gap between messages, seconds a byte.
    frame
        Overhead of a frame of mpiml at each end, in Python.
    duplicate
        What a communicator costs between two ranks, beside a reduction between them.
    work
        What a launch costs a rank, however many there are.
    placing
        What each rank of the program costs every rank: its record, its place.
    cores
        Cores that the ranks share; 0: each has its own.
    """

    L: float
    o: float
    g: float
    G: float
    frame: float
    duplicate: float
    work: float
    placing: float
    cores: int = 0

    def share(self, ranks: int) -> float:
        """Return how much longer `ranks` ranks take that compute at the same time."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0


class Part(NamedTuple):
    """What one launch costs, by what costs it."""

    work: float
    placing: float
    collectives: float
    trees: float
    results: float

    @property
    def total(self) -> float:
        """The whole."""
        return sum(self)


def levels(ranks: int) -> list[int]:
    """Return how many ranks stand on each level of the tree of control messages, top first."""
    found, below = [], 1
    while ranks > 0:
        found.append(min(below, ranks))
        ranks -= below
        below *= FANOUT
    return found


def _rounds(ranks: int) -> int:
    return ceil(log2(ranks)) if ranks > 1 else 0


def _reduction(machine: Machine, ranks: int) -> float:
    """Return the time of a collective of few bytes: a message for each doubling of the ranks."""
    return _rounds(ranks) * (machine.L + 2 * machine.o * machine.share(ranks))


def _tree(machine: Machine, ranks: int) -> float:
    """Return the time of a wave of frames up or down the tree.

    A rank takes the frames of up to eight below it one after the other; the ranks of a level
    share the cores.
    """
    total = 0.0
    for width in levels(ranks)[1:]:
        row = min(FANOUT, width)
        busy = max(machine.g, machine.frame)
        total += machine.L + machine.frame + (row - 1) * busy
        total += machine.frame * machine.share(width)
    return total


def launch(machine: Machine, ranks: int) -> Part:
    """Return the time from the call of ``mpiml.launch`` to its return, without any body.

    MPI runs already: the start of processes is the launcher's, and MPI_Init the library's.
    """
    others = ranks - 1
    share = machine.share(ranks)
    gather = _reduction(machine, ranks) + others * RECORD * machine.G * share
    collectives = gather + SUMS * _reduction(machine, ranks)
    collectives += DUPLICATES * machine.duplicate * _rounds(ranks) * share
    busy = max(machine.g, machine.frame) + RESULT * machine.G
    return Part(
        machine.work * share,
        machine.placing * ranks * share,
        collectives,
        2 * _tree(machine, ranks),
        machine.L + others * busy if others else 0.0,
    )
