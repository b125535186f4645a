"""On the ranks: averages with neighbours, ours and by raw messages, and steps beside a slow rank.

Raw: ``Irecv`` into buffers that are there, ``Isend`` of the array itself, ``Waitall``, and the
weighted sum by NumPy into an array that is there. Ours writes into such an array too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from mpiml import optim, topology
from mpiml.bench.allreduce_rounds import SIZES, Way, fill_value, in_turn
from mpiml.collectives import allreduce, neighbor_allreduce
from mpiml.collectives.neighbors import ADPSGD

__all__ = ["sizes", "slow"]

_Plan = dict[str, Any]
_TAG = 7
_EDGE = 128  # of the square matrices of a piece of work


def sizes(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time all ways at each size.

    Collective over `comm`.

    Parameters
    ----------
    comm
        Of two ranks or more.
    plan
        ``sizes``: name -> ``[rounds, repeats, warm]``.

    Returns
    -------
    dict
        Name of a size -> way -> seconds on the slowest rank.
    """
    ring = topology.ring(comm.size)
    one_peer = topology.one_peer_exponential(comm.size)
    found = {}
    for size, (rounds, repeats, warm) in plan["sizes"].items():
        count = max(SIZES[size] // 4, 1)
        x, out = (np.zeros(count, np.float32) for _ in range(2))
        graphs = {"ring": [ring], "one_peer": list(one_peer.topologies)}
        ways = {}
        for name, steps in graphs.items():
            ways[f"raw_{name}"] = _averaging(
                comm, x, out, steps, [_Raw(comm, x, out, t) for t in steps]
            )
            ours = [partial(neighbor_allreduce, x, t, comm, out=out) for t in steps]
            ways[name] = _averaging(comm, x, out, steps, ours)
        everyone = [topology.complete(comm.size)]
        ways["mpi"] = _averaging(comm, x, out, everyone, [partial(_mpi_mean, comm, x, out)])
        mean = partial(allreduce, x, "mean", comm, out=out)
        ways["allreduce"] = _averaging(comm, x, out, everyone, [mean])
        found[size] = in_turn(comm, ways, rounds, repeats, warm)
    return found


def _mpi_mean(comm: Any, x: Any, out: Any) -> None:
    comm.Allreduce(x, out)
    np.divide(out, comm.size, out=out)


def _averaging(
    comm: Any, x: Any, out: Any, steps: Sequence[Any], runs: Sequence[Callable[[], Any]]
) -> Way:
    """Return a way that goes through the topologies of `steps` in turn."""
    rows = [t.matrix()[comm.rank] for t in steps]
    at = [0]

    def run() -> None:
        runs[at[0] % len(runs)]()

    def check(i: int, whole: bool) -> None:
        row = rows[at[0] % len(rows)]
        at[0] += 1
        expected = sum(w * fill_value(i, j) for j, w in enumerate(row))
        if not np.allclose(out if whole else out[[0, -1]], expected, rtol=1e-5):
            raise AssertionError(
                f"rank {comm.rank}, repetition {i}: expected {expected} everywhere, got "
                f"{out[0]} .. {out[-1]}"
            )

    return Way(lambda i: x.fill(fill_value(i, comm.rank)), run, check)


class _Raw:
    """A round of averaging as one writes it with MPI and NumPy."""

    def __init__(self, comm: Any, x: Any, out: Any, graph: Any) -> None:
        from mpi4py import MPI

        self.wait = MPI.Request.Waitall
        self.comm, self.x, self.out = comm, x, out
        self.own = graph.own(comm.rank)
        self.sources = [(s, w, np.empty_like(x)) for s, w in graph.receives(comm.rank).items()]
        self.targets = list(graph.sends(comm.rank))

    def __call__(self) -> None:
        comm, x, out = self.comm, self.x, self.out
        requests = [comm.Irecv(buffer, s, _TAG) for s, _, buffer in self.sources]
        requests += [comm.Isend(x, t, _TAG) for t in self.targets]
        self.wait(requests)
        np.multiply(x, self.own, out=out)
        for _, weight, buffer in self.sources:
            np.multiply(buffer, weight, out=buffer)
            np.add(out, buffer, out=out)


# -- one slow rank -----------------------------------------------------------------------------


def slow(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time the steps of the others, while the last rank does more work in each step.

    Collective over `comm`. A step is a piece of work and an average; the pieces are the same
    number of matrix products each time.

    Parameters
    ----------
    comm
        Of two ranks or more.
    plan
        ``count``: float32 that are averaged; ``work``: seconds of a piece, about;
        ``pieces``: those of the slow rank in a step; ``steps``, ``rounds``.

    Returns
    -------
    dict
        ``took``: way -> seconds of a step, the mean of a round, of the slowest of the others;
        ``work``: a piece alone, on all ranks at once.
    """
    from mpi4py import MPI

    products = comm.bcast(_products(plan["work"]))
    pieces = plan["pieces"] if comm.rank == comm.size - 1 else 1
    work = partial(_work, products)
    took: dict[str, list[float]] = {name: [] for name in ("work", *_STEPS)}
    for _ in range(plan["rounds"]):
        for name in took:
            step, end = _STEPS.get(name, _alone)(comm, plan["count"])
            comm.Barrier()
            begun = perf_counter()
            for number in range(plan["steps"]):
                for _ in range(1 if name == "work" else pieces):
                    work()
                step(number)
            mine = (perf_counter() - begun) / plan["steps"]
            end()
            others = mine if comm.rank < comm.size - 1 else 0.0
            took[name].append(comm.allreduce(others, MPI.MAX))
    return took


_Made = tuple[Callable[[int], Any], Callable[[], Any]]


def _nothing(*_: Any) -> None:
    pass


def _alone(comm: Any, count: int) -> _Made:
    return _nothing, _nothing


def _all(comm: Any, count: int) -> _Made:
    x = np.ones(count, np.float32)
    return lambda number: allreduce(x, "mean", comm, out=x), _nothing


def _neighbours(comm: Any, count: int) -> _Made:
    x, graph = np.ones(count, np.float32), topology.ring(comm.size)
    return lambda number: neighbor_allreduce(x, graph, comm, out=x), _nothing


def _asynchronous(comm: Any, count: int) -> _Made:
    x, gradient = np.ones(count, np.float32), np.zeros(count, np.float32)
    model = ADPSGD(x, optim.SGD(0.1), topology.bipartite(comm.size), comm)

    def end() -> None:
        model.finish()
        model.close()

    return lambda number: model.step(gradient), end


_STEPS: dict[str, Callable[[Any, int], _Made]] = {
    "all": _all, "neighbours": _neighbours, "adpsgd": _asynchronous,
}  # fmt: skip


def _work(products: int) -> None:
    a = np.full((_EDGE, _EDGE), 0.5, np.float32)
    for _ in range(products):
        a @ a


def _products(seconds: float) -> int:
    """Return how many products take so long here, by the fastest of some."""
    best = np.inf
    for _ in range(20):
        begun = perf_counter()
        _work(4)
        best = min(best, (perf_counter() - begun) / 4)
    return max(1, round(seconds / best))
