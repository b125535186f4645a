"""On the ranks: pulls and pushes of one worker and one server, beside copies and raw mpi4py.

Before each pull the worker pushes one number, so that it never gets a version that it has. The
same processes copy memory, and send without mpiml, in blocks that alternate with ours.
"""

import time
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

import mpiml
from mpiml.bench.measure import BATCH, batches, timed
from mpiml.optim import SGD

__all__ = ["alone", "idle_until_all", "pulls", "pushes"]

_Plan = dict[str, Any]
_Samples = dict[str, list[float]]
SMALL = 256  # float32: 1 KiB


def _parameters(count: int) -> dict[str, Any]:
    """Return arrays of `count` float32 and of one, all 0."""
    return {"step": np.zeros(1, np.float32), "w": np.zeros(count, np.float32)}


def idle_until_all(comm: Any) -> None:
    """Wait for all ranks, and leave the cores to those that are at work. Collective over `comm`."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def _pull(server: Any, count: int, repeats: int, warm: int) -> _Samples:
    """Time pulls, and copies of an array of the same size to memory that is there.

    Each is after a push: who has waited for an answer copies slower, from caches gone cold.
    """
    source, target = np.ones(count, np.float32), np.ones(count, np.float32)
    one = {"step": np.ones(1, np.float32)}
    took: _Samples = {"pull": [], "memcpy": []}
    _, version = server.pull()
    for _ in range(warm + repeats):
        server.push(one, version, names=["step"])
        took["memcpy"].append(timed(lambda: np.copyto(target, source))[0])
        server.push(one, version + 1, names=["step"])
        seconds, (tree, now) = timed(server.pull)
        if now != version + 2 or tree["step"][0] != -now or tree["w"].size != count:
            raise AssertionError(f"expected version {version + 2}, got {now}: {tree['step']}")
        del tree
        version = now
        took["pull"].append(seconds)
    return {way: seconds[warm:] for way, seconds in took.items()}


def _raw_pull(comm: Any, count: int, repeats: int, warm: int) -> list[float]:
    """Ask rank 0 for an array with one byte; it sends it into memory that is there."""
    data, token = np.ones(count, np.float32), np.zeros(1, "u1")
    took = []
    for _ in range(warm + repeats):
        if comm.rank == 0:
            comm.Recv(token, 1)
            comm.Send(data, 1)
            continue
        began = perf_counter()
        comm.Send(token, 0)
        comm.Recv(data, 0)
        took.append(perf_counter() - began)
    return took[warm:]


def _program(init: Any, body: Callable[..., Any], *args: Any) -> mpiml.Program:
    program = mpiml.Program("bench ps")
    node = mpiml.ParameterServerNode(init, SGD(1.0))
    server = program.add_node(node, label="server")
    program.add_node(mpiml.PyNode(body, server, *args), label="worker")
    return program


def _ends(comm: Any) -> Any:
    """Return a communicator of the first and the last rank; None on the others."""
    from mpi4py import MPI

    mine = comm.rank in (0, comm.size - 1)
    both = comm.Split(0 if mine else MPI.UNDEFINED)
    return both if mine else None


def pulls(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure pulls of the last rank from rank 0, copies, and raw messages, in turn.

    Collective over `comm`.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``; ``warm``; ``sizes``: name -> bytes, repetitions of a round.

    Returns
    -------
    dict
        On rank 0: size -> ``pull``, ``memcpy`` and ``raw`` in seconds.
    """
    found: dict[str, _Samples] = {size: {} for size in plan["sizes"]}
    both = _ends(comm)
    if both is None:
        idle_until_all(comm)
        return found
    warm = plan["warm"]
    for _ in range(plan["rounds"]):
        for size, (nbytes, repeats) in plan["sizes"].items():
            count = nbytes // 4
            raw = both.bcast(_raw_pull(both, count, repeats, warm), root=1)
            program = _program(partial(_parameters, count), _pull, count, repeats, warm)
            result = mpiml.launch(program, comm=both)
            if both.rank == 0:
                for way, took in {"raw": raw, **result["worker"][0]}.items():
                    found[size].setdefault(way, []).extend(took)
    both.Free()
    idle_until_all(comm)
    return found


def _push(server: Any, plan: _Plan) -> _Samples:
    """Time acknowledged pushes, pulls of as much, and both at once."""
    tree, version = server.pull()
    gradient = {"w": np.ones_like(tree["w"])}

    def push() -> None:
        nonlocal version
        if not server.push(gradient, version):
            raise AssertionError(f"expected a push of version {version} to be used")
        version += 1  # the only worker knows it without a pull

    def push_pull() -> None:
        nonlocal version
        _, version = server.push_pull(gradient, version)

    count, warm = plan["batches"], plan["warm"]
    took = {
        "push": batches(push, count, warm),
        "pull": batches(server.pull, count, warm),
        "push_pull": batches(push_pull, count, warm),
    }
    if server.pull()[1] != version:
        raise AssertionError(f"expected version {version}, got {server.pull()[1]}")
    return took


def _raw_push(comm: Any, plan: _Plan) -> list[float]:
    """Send a gradient, pickled, and receive True."""
    gradient = {"w": np.ones(SMALL, np.float32)}
    if comm.rank == 0:
        for _ in range(plan["warm"] + BATCH * plan["batches"]):
            comm.recv(source=1)
            comm.send(True, 1)
        return []

    def call() -> None:
        comm.send(gradient, 0)
        comm.recv(source=0)

    return batches(call, plan["batches"], plan["warm"])


def _small() -> dict[str, Any]:
    return {"w": np.zeros(SMALL, np.float32)}


def pushes(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure small pushes of the last rank to rank 0, and raw round trips, in turn.

    Collective over `comm`, of two ranks.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``; ``batches`` of a round; ``warm``.

    Returns
    -------
    dict
        On rank 0: ``raw``, ``push``, ``pull`` and ``push_pull`` in seconds.
    """
    found: _Samples = {}
    for _ in range(plan["rounds"]):
        raw = comm.bcast(_raw_push(comm, plan), root=1)
        result = mpiml.launch(_program(_small, _push, plan), comm=comm)
        if comm.rank == 0:
            for way, took in {"raw": raw, **result["worker"][0]}.items():
                found.setdefault(way, []).extend(took)
    return found


def alone(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Do `pulls`, and `pushes`, with a plan for each. Collective over `comm`, of two ranks."""
    return {"pulls": pulls(comm, plan["pulls"]), "pushes": pushes(comm, plan["pushes"])}
