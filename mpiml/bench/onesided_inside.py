"""On the ranks: additions to a model in the memory of a host, alone and racing.

Every figure is of rows: sparse updates of so many components, a block of rows in a call, as
training makes them. Ranks race between two barriers, for a fixed time of work; the slower
one's end counts.
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from mpiml._native import hogwild_add_rows
from mpiml.collectives import SharedModel
from mpiml.datasets import CSR

__all__ = ["ROWS", "alone", "racing", "rows_of", "scaling", "single"]

_Plan = dict[str, Any]
_Four = tuple[Any, Any, Any, Any]
ROWS = 512  # of a block


def rows_of(columns: int, nonzeros: int, skew: float, seed: int) -> CSR:
    """Return a block of sparse rows with columns at random, by a power law where skewed.

    Local: a pure function.

    Parameters
    ----------
    columns, nonzeros
        Of the model, and of each row.
    skew
        Exponent of Zipf's law of the columns; 0: all are alike.
    seed
        Of the generator.
    """
    rng = np.random.default_rng(seed)
    shape = (ROWS, nonzeros)
    indices: Any
    if skew == 0:
        indices = rng.integers(0, columns, shape)
    else:
        share = 1.0 / np.arange(1, columns + 1) ** skew
        indices = np.searchsorted(np.cumsum(share) / share.sum(), rng.random(shape))
        indices = np.minimum(indices, columns - 1)
    indices = np.sort(indices, axis=1).astype(np.int32)
    indptr: Any = np.arange(0, indices.size + 1, nonzeros)
    values = np.full(indices.size, 0.5, np.float32)
    labels = np.ones(ROWS, np.float32)
    return CSR(indptr, indices.reshape(-1), values, labels, (ROWS, columns))


def _seconds(comm: Any, run: Any, calls: int) -> float:
    """Time so many calls on all ranks at once; the slowest rank's seconds."""
    from mpi4py import MPI

    comm.Barrier()
    begun = perf_counter()
    for _ in range(calls):
        run()
    return float(comm.allreduce(perf_counter() - begun, MPI.MAX))


def alone(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time rows added by one rank alone: atomic, and as plain loads and stores. Collective."""
    found: dict[str, Any] = {}
    for name, (columns, nonzeros) in plan["models"].items():
        rows = rows_of(columns, nonzeros, 0.0, 1)
        with SharedModel(comm, np.zeros(columns, np.float32)) as model:
            arrays: _Four = (rows.indptr, rows.indices, rows.values, np.ones(ROWS, np.float32))
            ways: dict[str, Callable[[], None]] = {
                "model": partial(model.add_rows, None, rows),
                "racy": partial(hogwild_add_rows, model.raw, *arrays, "racy"),
            }
            took: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(plan["rounds"]):
                for way, run in ways.items():
                    seconds = _seconds(comm, run, plan["calls"])
                    took[way].append(seconds / (plan["calls"] * ROWS * nonzeros))
            found[name] = took
    return found


def racing(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time rows added by all ranks at once, by each way of adding. Collective.

    Returns for each case and way the seconds of one row of one rank, samples of a block each.
    """
    found: dict[str, Any] = {}
    for name, (columns, nonzeros, skew) in plan["cases"].items():
        rows = rows_of(columns, nonzeros, skew, 1 + comm.rank)
        like = {"w": np.zeros(columns, np.float32), "lock": np.zeros(32)}
        with SharedModel(comm, like) as model:
            arrays: _Four = (rows.indptr, rows.indices, rows.values, np.ones(ROWS, np.float32))
            lock = memoryview(model.raw["lock"]).cast("B")[:4]
            ways: dict[str, list[float]] = {how: [] for how in plan["ways"]}
            for _ in range(plan["rounds"]):
                for how, took in ways.items():
                    held = lock if how in ("spinlock", "mutex") else None

                    run = partial(hogwild_add_rows, model.raw["w"], *arrays, how, held)
                    took.append(_seconds(comm, run, plan["calls"]) / (plan["calls"] * ROWS))
            found[name] = ways
    return found


def scaling(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time rows added through a shared model and a ring model by all ranks. Collective."""
    from mpiml.collectives import RingModel

    columns, nonzeros = plan["columns"], plan["nonzeros"]
    rows = rows_of(columns, nonzeros, 0.0, 1 + comm.rank)
    found: dict[str, Any] = {"shared": []}
    like = np.zeros(columns, np.float32)
    with SharedModel(comm, like) as model:
        for _ in range(plan["rounds"]):
            seconds = _seconds(comm, lambda: model.add_rows(None, rows), plan["calls"])
            found["shared"].append(seconds / (plan["calls"] * ROWS))
    columns = plan["ring_columns"]
    rows = rows_of(columns, nonzeros, plan["ring_skew"], 1 + comm.rank)
    for key, delay in plan["delays"].items():
        found[key] = []
        zeros = np.zeros(columns, np.float32)
        with RingModel(comm, zeros, cluster_size=1, delay=delay) as ring:
            for _ in range(plan["rounds"]):
                seconds = _seconds(comm, partial(ring.add_rows, None, rows), plan["calls"])
                found[key].append(seconds / (plan["calls"] * ROWS))
            found[f"{key}_syncs"] = ring.statistics().get("syncs", 0)
    return found


def single(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time one element in the own host's memory: ours, and MPI's. Collective."""
    from mpi4py import MPI

    window = MPI.Win.Allocate(4096, 4, comm=comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    one, at = np.ones(1, np.float32), np.array([5], np.int64)
    out = np.zeros(1, np.float32)
    with SharedModel(comm, np.zeros(1024, np.float32)) as model:

        def accumulate() -> None:
            window.Accumulate(one, 0, 5, MPI.SUM)
            window.Flush(0)

        def get() -> None:
            window.Get(out, 0, 5)
            window.Flush(0)

        ways = {
            "accumulate": accumulate,
            "add_at": lambda: model.add_at(None, at, one),
            "get": get,
            "read": lambda: model.tree[5],
            "snapshot": model.snapshot,
        }
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(plan["rounds"]):
            for way, run in ways.items():
                if comm.rank == comm.size - 1:
                    begun = perf_counter()
                    for _ in range(plan["calls"]):
                        run()
                    took[way].append((perf_counter() - begun) / plan["calls"])
                request = comm.Ibarrier()
                while not request.Test():
                    pass
    window.Unlock_all()
    window.Free()
    found: dict[str, Any] = comm.bcast(took, comm.size - 1)
    return found
