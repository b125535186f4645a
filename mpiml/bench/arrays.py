"""Arrays: results and arguments of 1 KiB, 1 MiB and 16 MiB beside raw Send and Recv.

Each is timed by the rank that asks (rank 1), from the call until the array is there (a result)
or the service has answered (an argument); raw the same, with a message of one byte as request
and as answer. The sender refills its array before each; the raw receiver has one buffer for
all, and ours gets memory of its own.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import mpiml
from mpiml.bench.measure import Goal, Row, sampled, summarize, timed
from mpiml.bench.spawn import Options, Ranks, only_two

__all__ = ["Shelf", "arrays", "measure"]

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
PLANS = {
    False: {"rounds": 8, "repeats": {"1 KiB": 300, "1 MiB": 60, "16 MiB": 15}, "warm": 3},
    True: {"rounds": 2, "repeats": {"1 KiB": 5, "1 MiB": 3, "16 MiB": 2}, "warm": 1},
}
CLOSE = 1.3
WAYS = ("lent", "kept", "push", "push_futures")

_Plan = dict[str, Any]
_Samples = dict[str, list[float]]


class Shelf:
    """A service that hands out an array and takes some in.

    Parameters
    ----------
    nbytes
        Size of its array of float64.
    """

    def __init__(self, nbytes: int) -> None:
        import numpy as np

        self._array = np.zeros(nbytes // 8)
        self._seen = (0.0, 0.0)

    def refill(self, value: float) -> None:
        """Write over the array: it is not the one that was sent before."""
        self._array.fill(value)

    def lent(self) -> Any:
        """Hand the array over; it is not changed before it has arrived."""
        return mpiml.give(self._array)

    def kept(self) -> Any:
        """Return the array, which stays this service's to change: (n,) float64."""
        return self._array

    def push(self, array: Any) -> None:
        """Take an array."""
        self._seen = (float(array[0]), float(array[-1]))

    def seen(self) -> tuple[float, float]:
        """Return first and last item of the array that was pushed last."""
        return self._seen


def _drive(shelf: Any, nbytes: int, repeats: int, warm: int, turn: int) -> _Samples:
    """Measure all ways, in an order that turns from round to round."""
    import numpy as np

    mine = np.zeros(nbytes // 8)
    submit = shelf.futures.push
    pushes: dict[str, Callable[[], Any]] = {
        "push": lambda: shelf.push(mine),
        "push_futures": lambda: submit(mine).result(),
    }
    found: _Samples = {}
    for way in WAYS[turn % 4 :] + WAYS[: turn % 4]:
        found[way] = []
        for i in range(1, warm + repeats + 1):
            if way in pushes:
                mine.fill(i)
                shelf.seen()  # both are idle again, as after `refill`
                took = timed(pushes[way])[0]
                ends = shelf.seen()
            else:
                shelf.refill(i)
                took, array = timed(getattr(shelf, way))
                ends = (array[0], array[-1])
                del array
            if ends != (i, i):
                raise AssertionError(f"{way}: expected {i} at both ends, got {ends}")
            if i > warm:
                found[way].append(took)
    return found


def _program(nbytes: int, repeats: int, warm: int, turn: int) -> mpiml.Program:
    program = mpiml.Program("bench arrays")
    shelf = program.add_node(mpiml.ServiceNode(Shelf, nbytes), label="shelf")
    program.add_node(mpiml.PyNode(_drive, shelf, nbytes, repeats, warm, turn), label="driver")
    return program


def _raw(comm: Any, nbytes: int, repeats: int, warm: int) -> _Samples:
    """Send arrays from rank 0 to 1 on request, and from 1 to 0 with an answer."""
    import numpy as np

    mine, theirs = np.zeros(nbytes // 8), np.zeros(nbytes // 8)
    token = np.zeros(1, "u1")
    found: _Samples = {"raw_result": [], "raw_push": []}
    other = 1 - comm.rank
    for way, took in found.items():
        for i in range(1, warm + repeats + 1):
            mine.fill(i)
            if comm.rank == 0:
                comm.Send(token, other)  # refilled, and waiting from here on
                if way == "raw_result":
                    comm.Recv(token, other)
                    comm.Send(mine, other)
                else:
                    comm.Recv(theirs, other)
                    comm.Send(token, other)
                continue
            comm.Recv(token, other)
            began = perf_counter()
            if way == "raw_result":
                comm.Send(token, other)
                comm.Recv(theirs, other)
            else:
                comm.Send(mine, other)
                comm.Recv(token, other)
            if i > warm:
                took.append(perf_counter() - began)
    return found


def _memcpy(nbytes: int, repeats: int, warm: int) -> list[float]:
    """Copy a refilled array to memory that is there already."""
    import numpy as np

    source, target = np.zeros(nbytes // 8), np.zeros(nbytes // 8)
    took = []
    for i in range(warm + repeats):
        source.fill(i)
        took.append(timed(lambda: np.copyto(target, source))[0])
    return took[warm:]


def arrays(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure results and arguments of each size, raw and ours in turn.

    Collective over `comm`, of two ranks.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``; ``repeats`` of a round by size; ``warm`` repeats before them.

    Returns
    -------
    dict
        On rank 0: size -> way -> seconds.
    """
    found: dict[str, _Samples] = {size: {} for size in plan["repeats"]}
    warm = plan["warm"]
    for turn in range(plan["rounds"]):
        for size, repeats in plan["repeats"].items():
            nbytes = SIZES[size]
            seen = comm.bcast(_raw(comm, nbytes, repeats, warm), root=1)
            result = mpiml.launch(_program(nbytes, repeats, warm, turn), comm=comm)
            comm.Barrier()
            if comm.rank == 0:
                seen = seen | {"memcpy": _memcpy(nbytes, repeats, warm)} | result["driver"][0]
                for way, took in seen.items():
                    found[size].setdefault(way, []).extend(took)
            comm.Barrier()
    return found


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench arrays``.

    Local: starts ranks; no MPI in this process.
    """
    only_two(options)
    found = ranks.scenario("arrays:arrays", 2, PLANS[options.quick])
    rows = [row for size in SIZES for row in _rows(size, found[size])]
    return rows, [f"Goals of 16 MiB: {CLOSE} x raw, and one copy more where one is needed."]


def _rows(size: str, found: _Samples) -> list[Row]:
    large = size == "16 MiB"
    unit = "ms" if large else "µs"
    key = size.replace(" ", "")
    copy = summarize(found["memcpy"]).median

    def goal(raw: str, copies: int) -> Goal | None:
        if not large:
            return None
        limit = CLOSE * summarize(found[raw]).median + copies * copy
        text = f"<= {CLOSE} x raw" + (" + memcpy" if copies else "")
        return Goal(f"{text} = {limit * 1e3:.3g} ms", lambda value, ratio: value <= limit)

    result, push = found["raw_result"], found["raw_push"]
    return [
        sampled(f"{key}_memcpy", f"{size}: memcpy", unit, found["memcpy"]),
        sampled(f"{key}_raw_result", "  raw request and Recv", unit, result),
        sampled(
            f"{key}_lent", "  result handed over with give", unit, found["lent"], result,
            goal("raw_result", 0),
        ),
        sampled(
            f"{key}_kept", "  result that the service keeps", unit, found["kept"], result,
            goal("raw_result", 1),
        ),
        sampled(f"{key}_raw_push", "  raw Send and answer", unit, push),
        sampled(
            f"{key}_push", "  argument, blocking call", unit, found["push"], push,
            goal("raw_push", 0),
        ),
        sampled(
            f"{key}_push_futures", "  argument, future", unit, found["push_futures"], push,
            goal("raw_push", 1),
        ),
    ]  # fmt: skip
