"""On the ranks: memory of another host, ours and MPI's windows, in turn.

The last rank measures, rank 0 is at home; both keep one core busy, the home with tests of a
request, as a rank does that waits in MPI. Other ranks sleep.
"""

import time
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from mpiml.collectives import SharedModel, Window

__all__ = ["COUNT", "apart"]

_Plan = dict[str, Any]
COUNT = 1 << 18  # float32: 1 MiB


def apart(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time pushes and pulls of the last rank to and from rank 0.

    Collective over `comm`.

    Parameters
    ----------
    comm
        Of ranks of which the last is on another host than rank 0.
    plan
        ``rounds``, and ``repeats``: group -> repetitions of a block.

    Returns
    -------
    dict
        ``took``: way -> seconds of one repetition, the mean of a block; ``way``: how
        memory is read; ``hosts``: how many there are.
    """
    raw = _Raw(comm)
    model = SharedModel(comm, np.zeros(COUNT, np.float32))
    small = SharedModel(comm, np.zeros(1, np.float32))
    window = Window(comm, np.zeros(COUNT, np.float32))
    found: dict[str, Any] = {}
    request = None
    if comm.rank == comm.size - 1:
        took = _in_turn(_ways(raw, model, small, window), plan)
        statistics = model.statistics()
        found = {"took": took, "way": statistics["way"], "hosts": statistics["hosts"]}
        request = comm.Ibarrier()
    else:
        request = comm.Ibarrier()
        while not request.Test():
            if comm.rank:
                time.sleep(0.02)
    request.Wait()
    for thing in (model, small, window):
        thing.barrier()
    if comm.rank == 0 and not (model.tree[5] > 0 and raw.memory[5] > 0):
        raise AssertionError(f"expected what was added at home, got {model.tree[5]}")
    for thing in (model, small, window):
        thing.close()
    raw.free()
    return dict(comm.bcast(found, comm.size - 1))


class _Raw:
    """MPI's windows over memory that MPI made, and over memory that it was given."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.windows = [
            MPI.Win.Allocate(4 * COUNT, 4, comm=comm),
            MPI.Win.Create(np.zeros(COUNT, np.float32), 4, comm=comm),
        ]
        for window in self.windows:
            window.Lock_all(MPI.MODE_NOCHECK)
        self.memory = np.asarray(self.windows[0]).view(np.float32)
        self.memory[:] = 0
        comm.Barrier()
        self.sum = MPI.SUM

    def free(self) -> None:
        for window in self.windows:
            window.Unlock_all()
            window.Free()


def _ways(raw: _Raw, model: Any, small: Any, window: Any) -> dict[str, Callable[[], Any]]:
    one, at = np.ones(1, np.float32), np.array([5], np.int64)
    big = np.ones(COUNT, np.float32)
    made, given = raw.windows

    def accumulate(win: Any, what: Any, first: int) -> None:
        win.Accumulate(what, 0, first, raw.sum)
        win.Flush(0)

    def get(win: Any, what: Any, first: int) -> None:
        win.Get(what, 0, first)
        win.Flush(0)

    def put() -> None:
        made.Put(one, 0, 5)
        made.Flush(0)

    def push() -> None:
        model.add_at(None, at, one)
        model.flush()

    def window_put() -> None:
        window.accumulate_at(0, None, at, one)
        window.flush()

    return {
        "accumulate": lambda: accumulate(made, one, 5),
        "accumulate_given": lambda: accumulate(given, one, 5),
        "push": lambda: model.add_at(None, at, one),
        "flushed": model.flush,  # so that none is left for the next way to wait for
        "push_flush": push,
        "window_flush": window_put,
        "put": put,
        "get": lambda: get(made, one, 5),
        "get_given": lambda: get(given, one, 5),
        "pull": lambda: model.pull(None, 5),
        "window_get": lambda: window.get(0),
        "snapshot": small.snapshot,
        "get_1MiB": lambda: get(made, big, 0),
        "get_1MiB_given": lambda: get(given, big, 0),
        "pull_1MiB": model.pull,
        "snapshot_1MiB": model.snapshot,
        "accumulate_1MiB": lambda: accumulate(made, big, 0),
        "push_1MiB": lambda: model.add(big),
    }


def _in_turn(ways: Mapping[str, Callable[[], Any]], plan: _Plan) -> dict[str, list[float]]:
    """Time all ways in blocks that alternate; the mean of each block is a sample."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(plan["rounds"]):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            large = "MiB" in name or name == "window_get"
            repeats = plan["repeats"]["large" if large else "small"]
            run = ways[name]
            for _ in range(max(1, repeats // 10)):
                run()
            begun = perf_counter()
            for _ in range(repeats):
                run()
            took[name].append((perf_counter() - begun) / repeats)
    return took
