"""On the ranks: ways to do the same sum, timed in turn, each on buffers that were just refilled.

Every rank refills its own buffer before each repetition, as backward passes do: untouched
buffers flatter, since they stay where the last repetition has left them. A repetition lasts from
a barrier to the end on the slowest rank.
"""

import gc
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

__all__ = [
    "KIB",
    "MIB",
    "SIZES",
    "VALUES",
    "Way",
    "expected",
    "fill_value",
    "in_turn",
    "way_of",
]

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "8 B": 8, "1 KiB": KIB, "4 KiB": 4 * KIB, "64 KiB": 64 * KIB,
    "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB,
}  # fmt: skip
#: Refills differ from each other by their number modulo this: sums stay exact in float16.
VALUES = 16

_Samples = dict[str, list[float]]


class Way(NamedTuple):
    """One way to do it.

    Attributes
    ----------
    refill
        Write this rank's input, of a number that says which repetition it is.
    run
        What is timed.
    check
        Look at the result, of the same number; True: at all of it.
    """

    refill: Callable[[int], None]
    run: Callable[[], Any]
    check: Callable[[int, bool], None]


def fill_value(i: int, rank: int) -> int:
    """Return what a rank writes into its buffer for repetition `i`. Local: a pure function."""
    return i % VALUES + rank + 1


def expected(i: int, size: int) -> int:
    """Return the sum of what all ranks have written. Local: a pure function."""
    return sum(fill_value(i, rank) for rank in range(size))


def way_of(name: str, comm: Any, mine: Any, run: Callable[[], Any], result: Any) -> Way:
    """Return the way that sums `mine` over the ranks.

    Local: no message.

    Parameters
    ----------
    name
        What stands in the message of a wrong result.
    comm
        The communicator that is summed over.
    mine
        This rank's input: (n,), any dtype of numbers.
    run
        What is timed.
    result
        A function of no arguments that returns the result: (n,).
    """

    def check(i: int, whole: bool) -> None:
        found, sum_ = result(), expected(i, comm.size)
        good = bool((found == sum_).all()) if whole else found[0] == sum_ == found[-1]
        if not good:
            raise AssertionError(
                f"{name}, rank {comm.rank}, repetition {i}: expected {sum_} everywhere, "
                f"got {found[0]} .. {found[-1]}"
            )

    return Way(lambda i: mine.fill(fill_value(i, comm.rank)), run, check)


def in_turn(
    comm: Any, ways: Mapping[str, Way], rounds: int, repeats: int, warm: int
) -> _Samples:
    """Time all ways in blocks that alternate, in an order that turns from round to round.

    Collective over `comm`.

    Parameters
    ----------
    comm
        The communicator of the barrier, and of the slowest rank.
    ways
        The same names in the same order on all ranks.
    rounds
        How often each way has its block.
    repeats
        Repetitions of a block that count.
    warm
        Repetitions of a block before those.

    Returns
    -------
    dict
        Way -> seconds of each repetition on the slowest rank; the same on all ranks.
    """
    import numpy as np
    from mpi4py import MPI

    names = list(ways)
    took: _Samples = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            took[name] += _block(comm, ways[name], repeats, warm)
    slowest = np.array([took[name] for name in names])  # (ways, rounds * repeats)
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return {name: slowest[i].tolist() for i, name in enumerate(names)}


def _block(comm: Any, way: Way, repeats: int, warm: int) -> list[float]:
    took = []
    refill, run, check = way
    gc.collect()
    gc.disable()
    try:
        for i in range(warm + repeats):
            refill(i)
            comm.Barrier()
            began = perf_counter()
            run()
            took.append(perf_counter() - began)
            check(i, i == warm + repeats - 1)
    finally:
        gc.enable()
    return took[warm:]
