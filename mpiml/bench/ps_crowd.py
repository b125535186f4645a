"""On the ranks: updates per second of several workers on several servers, asynchronous.

A worker pulls all parameters and pushes a gradient of all, acknowledged, again and again.
"""

import time
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

import mpiml
from mpiml.bench.ps_inside import idle_until_all, pulls
from mpiml.optim import SGD

__all__ = ["apart", "crowd", "together", "within"]

PATIENCE = 30.0  # s, until all workers are there
TRIES = 10  # of a round, until all workers were at work at the same time
_Plan = dict[str, Any]


def _parameters(count: int) -> dict[str, Any]:
    return {"w": np.zeros(count, np.float32)}


def _work(server: Any, count: int, seconds: float) -> dict[str, Any]:
    """Train for so long; return when that began and each update was done, and what was counted."""
    gradient = {"w": np.ones(count, np.float32)}
    server.push(gradient, server.pull()[1])
    _meet(server)
    done = [perf_counter()]
    end = done[0] + seconds
    while len(done) == 1 or done[-1] < end:
        _, version = server.pull()
        server.push(gradient, version)
        done.append(perf_counter())
    return {"done": done, "statistics": server.statistics()}


def _meet(server: Any) -> None:
    """Wait until all workers have pushed once, so that they are at work at the same time."""
    workers = mpiml.context().replicas
    limit = perf_counter() + PATIENCE
    while server.statistics()["pushes"] < workers:
        if perf_counter() > limit:
            raise AssertionError(f"expected {workers} workers within {PATIENCE:g} s")
        time.sleep(1e-3)


def together(done: list[list[float]]) -> bool:
    """Return whether there was a time when all workers were at work. Local: a pure function."""
    return max(each[0] for each in done) < min(each[-1] for each in done)


def within(done: list[list[float]]) -> float:
    """Return updates per second while all workers were at work.

    Local: a pure function.

    Parameters
    ----------
    done
        When each worker began, and when each of its updates was done, in order, in seconds of
        one clock.
    """
    begin = max(each[0] for each in done)
    end = min(each[-1] for each in done)
    if not together(done):
        raise AssertionError(f"workers were not at work at the same time: {begin}, {end}")
    count = sum(begin < at <= end for each in done for at in each)
    return count / (end - begin)


def crowd(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure updates per second for each number of workers and servers.

    Collective over `comm`.

    Parameters
    ----------
    comm
        Of ranks of which the last are workers, the first servers.
    plan
        ``nbytes`` of the parameters; ``seconds`` of a round; ``rounds``; ``cases``: pairs of
        workers and servers.

    Returns
    -------
    dict
        On rank 0: ``rates``: for each case updates per second, by round; ``staleness``: of all
        updates of the last case.
    """
    rates: list[list[float]] = [[] for _ in plan["cases"]]
    staleness: dict[int, int] = {}
    for _ in range(plan["rounds"]):
        for case, (workers, servers) in enumerate(plan["cases"]):
            found = _round(comm, workers, servers, plan)
            if comm.rank == 0:
                rates[case].append(within([each["done"] for each in found]))
                if case == len(plan["cases"]) - 1:
                    _add(staleness, found)
    return {"rates": rates, "staleness": sorted(staleness.items())}


def _round(comm: Any, workers: int, servers: int, plan: _Plan) -> list[dict[str, Any]]:
    """Return what each worker found, on rank 0; measured again where one came too late.

    Collective over `comm`. Where a core is wanted by others too, a worker may begin only when
    the short time of another is over.
    """
    from mpi4py import MPI

    mine = comm.rank < servers or comm.rank >= comm.size - workers
    found: list[dict[str, Any]] = []
    for _ in range(TRIES):
        part = comm.Split(0 if mine else MPI.UNDEFINED)
        if mine:
            result = mpiml.launch(_program(workers, servers, plan), comm=part)
            part.Free()
        if comm.rank == 0:
            found = result["worker"]
        idle_until_all(comm)
        if comm.bcast(comm.rank == 0 and together([each["done"] for each in found])):
            break
    return found


def apart(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Do `mpiml.bench.ps_inside.pulls`, and `crowd`, with a plan for each.

    Collective over `comm`, whose first ranks are on one host, the last on another.
    """
    return {"pulls": pulls(comm, plan["pulls"]), "crowd": crowd(comm, plan["crowd"])}


def _program(workers: int, servers: int, plan: _Plan) -> mpiml.Program:
    count = plan["nbytes"] // 4
    program = mpiml.Program("bench ps")
    node = mpiml.ParameterServerNode(
        partial(_parameters, count), SGD(1e-3), "async", shards=servers
    )
    server = program.add_node(node, label="server")
    work = mpiml.PyNode(_work, server, count, plan["seconds"])
    program.add_node(work, label="worker", replicas=workers)
    return program


def _add(staleness: dict[int, int], found: list[dict[str, Any]]) -> None:
    """Add what the servers counted until the last worker asked."""
    last = max((each["statistics"] for each in found), key=lambda one: one["pushes"])
    for updates, count in last["staleness"].items():
        staleness[updates] = staleness.get(updates, 0) + count
