"""On the ranks: many clients call one service, on fewer cores than ranks."""

import time
from time import perf_counter
from typing import Any

import mpiml

__all__ = ["Desk", "crowd"]

_Plan = dict[str, Any]


class Desk:
    """A service that all clients call; says from when on they are to count."""

    def __init__(self, plan: _Plan) -> None:
        self._warm_s = plan["warm_s"]
        self._start: float | None = None

    def start(self) -> float:
        """Return when measuring begins: on the clock that all processes of a host share."""
        if self._start is None:
            self._start = perf_counter() + self._warm_s
        return self._start

    def echo(self, a: int, b: int, c: str) -> tuple[int, int, str]:
        """Return the arguments."""
        return a, b, c


def _window(call: Any, start: float, seconds: float) -> list[float]:
    """Call back to back; return the seconds of the calls that began and ended in the window."""
    took = []
    end = start + seconds
    before = perf_counter()
    while before < end:
        call()
        after = perf_counter()
        if before >= start and after <= end:
            took.append(after - before)
        elif before < end < after:
            took.append(after - before)  # a late one must not hide behind the end
        before = after
    return took


def _drive(desk: Any, plan: _Plan) -> list[float]:
    start = desk.start()
    method = desk.echo
    return _window(lambda: method(1, 2, "a"), start, plan["seconds"])


def _program(clients: int, plan: _Plan) -> mpiml.Program:
    program = mpiml.Program("bench crowd")
    desk = program.add_node(mpiml.ServiceNode(Desk, plan), label="desk")
    program.add_node(mpiml.PyNode(_drive, desk, plan), label="client", replicas=clients)
    return program


def _raw(comm: Any, plan: _Plan) -> list[float]:
    """Let rank 0 answer all others with raw mpi4py."""
    from mpi4py import MPI

    start = comm.bcast(perf_counter() + plan["warm_s"])
    if comm.rank == 0:
        status = MPI.Status()
        left = comm.size - 1
        while left:
            asked = comm.recv(source=MPI.ANY_SOURCE, status=status)
            if asked is None:
                left -= 1
            else:
                comm.send(asked, dest=status.Get_source())
        return []

    def call() -> Any:
        comm.send((1, 2, "a"), dest=0)
        return comm.recv(source=0)

    took = _window(call, start, plan["seconds"])
    comm.send(None, dest=0)
    return took


def crowd(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure calls of all other ranks to rank 0, raw and ours.

    Collective over `comm`.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``seconds`` of measuring after ``warm_s`` seconds of calls that do not count.

    Returns
    -------
    dict
        On rank 0: ``calls`` and ``raw`` in seconds, of all clients; ``each``: calls of each
        client; ``seconds``.
    """
    raw = comm.gather(_raw(comm, plan))
    time.sleep(0.05)
    result = mpiml.launch(_program(comm.size - 1, plan), comm=comm)
    if comm.rank != 0:
        return {}
    ours = result["client"]
    return {
        "calls": [s for took in ours for s in took],
        "raw": [s for took in raw for s in took],
        "each": [len(took) for took in ours],
        "seconds": plan["seconds"],
    }
