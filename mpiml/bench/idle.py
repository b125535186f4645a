"""An idle service: what waiting costs, and how soon it answers then."""

import time
from time import perf_counter, process_time
from typing import Any

import mpiml
from mpiml.bench.measure import Row, at_most, sampled
from mpiml.bench.spawn import Options, Ranks, only_two

__all__ = ["Idler", "idle", "measure"]

PLANS = {False: {"rounds": 5, "seconds": 5.0}, True: {"rounds": 1, "seconds": 0.5}}

_Plan = dict[str, Any]
_Mark = tuple[float, float]


class Idler:
    """A service that nobody calls for a while."""

    def mark(self) -> _Mark:
        """Return processor time and clock of this process, in seconds."""
        return process_time(), perf_counter()


def _share(first: _Mark, last: _Mark) -> float:
    return (last[0] - first[0]) / (last[1] - first[1])


def _drive(idler: Any, plan: _Plan) -> dict[str, float]:
    """Sleep; then ask how much processor time the service has used meanwhile."""
    for _ in range(10):
        idler.mark()
    theirs, mine = idler.mark(), (process_time(), perf_counter())
    time.sleep(plan["seconds"])
    rested = (process_time(), perf_counter())
    began = perf_counter()
    after = idler.mark()
    took = perf_counter() - began
    return {"service": _share(theirs, after), "caller": _share(mine, rested), "answer": took}


def _program(plan: _Plan) -> mpiml.Program:
    program = mpiml.Program("bench idle")
    idler = program.add_node(mpiml.ServiceNode(Idler), label="idler")
    program.add_node(mpiml.PyNode(_drive, idler, plan), label="driver")
    return program


def _raw(comm: Any, plan: _Plan) -> float:
    """Return the share of a core that rank 0 uses while it waits in a raw recv."""
    if comm.rank == 1:
        time.sleep(min(plan["seconds"], 1.0))
        comm.send(None, dest=0)
        return 0.0
    first = (process_time(), perf_counter())
    comm.recv(source=1)
    return _share(first, (process_time(), perf_counter()))


def idle(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure an idle service.

    Collective over `comm`, of two ranks.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``, and ``seconds`` of silence in each.

    Returns
    -------
    dict
        On rank 0: ``service``, ``caller`` and ``raw`` as shares of a core, ``answer`` in
        seconds.
    """
    found: dict[str, list[float]] = {"service": [], "caller": [], "answer": [], "raw": []}
    for _ in range(plan["rounds"]):
        found["raw"].append(_raw(comm, plan))
        result = mpiml.launch(_program(plan), comm=comm)
        if comm.rank == 0:
            for key, value in result["driver"][0].items():
                found[key].append(value)
    return found


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench idle``.

    Local: starts ranks; no MPI in this process.
    """
    only_two(options)
    plan = PLANS[options.quick]
    found = ranks.scenario("idle:idle", 2, plan)
    rest = f"{plan['seconds']:g} s"
    return [
        sampled("raw", "rank in a raw recv: share of a core", "%", found["raw"]),
        sampled(
            "service", f"service idle for {rest}: share of a core", "%", found["service"],
            found["raw"], at_most(3, "%"),
        ),
        sampled("caller", f"caller asleep for {rest}: share of a core", "%", found["caller"]),
        sampled("answer", "first answer after it", "ms", found["answer"], None, at_most(5, "ms")),
        sampled("answer_max", "  slowest of them", "ms", [max(found["answer"])], None,
                at_most(5, "ms")),
    ], []  # fmt: skip
