"""On the ranks: small calls one after the other, and many in flight, beside raw mpi4py.

Rank 0 answers and rank 1 asks, with mpiml and without: the same two processes, one block of
each in turn. Small calls are timed ten at a time, since reading the clock costs a twentieth of
a raw round trip.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import mpiml
from mpiml.bench.measure import BATCH, batches

__all__ = ["Echo", "calls"]

ARGUMENTS = (1, 2, "a")

_Plan = dict[str, Any]


class Echo:
    """A service without `run`: answers with what it was given."""

    def echo(self, a: int, b: int, c: str) -> tuple[int, int, str]:
        """Return the arguments."""
        return a, b, c


def _drive_small(echo: Any, plan: _Plan) -> list[float]:
    method = echo.echo
    return batches(lambda: method(*ARGUMENTS), plan["batches"], plan["warm"])


def _flight(
    submit: Callable[[], Any], take: Callable[[Any], Any], count: int, deep: int
) -> float:
    """Return calls per second with `deep` of them in flight all the time."""
    flying = deque(submit() for _ in range(deep))
    began = perf_counter()
    for _ in range(count):
        take(flying.popleft())
        flying.append(submit())
    rate = count / (perf_counter() - began)
    while flying:
        take(flying.popleft())
    return rate


def _drive_flight(echo: Any, plan: _Plan) -> float:
    method = echo.futures.echo

    def submit() -> Any:
        return method(*ARGUMENTS)

    def take(future: Any) -> Any:
        return future.result()

    _flight(submit, take, plan["warm"], plan["deep"])
    return _flight(submit, take, plan["flights"], plan["deep"])


def _program(body: Callable[..., Any], plan: _Plan) -> mpiml.Program:
    program = mpiml.Program("bench calls")
    echo = program.add_node(mpiml.ServiceNode(Echo), label="echo")
    program.add_node(mpiml.PyNode(body, echo, plan), label="driver")
    return program


def _raw_answers(comm: Any, count: int) -> None:
    for _ in range(count):
        comm.send(comm.recv(source=1), dest=1)


def _raw_small(comm: Any, plan: _Plan) -> list[float]:
    if comm.rank == 0:
        _raw_answers(comm, plan["warm"] + BATCH * plan["batches"])
        return []

    def call() -> Any:
        comm.send(ARGUMENTS, dest=0)
        return comm.recv(source=0)

    return batches(call, plan["batches"], plan["warm"])


def _raw_flight(comm: Any, plan: _Plan) -> float:
    if comm.rank == 0:
        _raw_answers(comm, plan["warm"] + plan["flights"] + 2 * plan["deep"])
        return 0.0

    def submit() -> None:
        comm.send(ARGUMENTS, dest=0)  # so small that it never waits for the receiver

    def take(_: None) -> Any:
        return comm.recv(source=0)

    _flight(submit, take, plan["warm"], plan["deep"])
    return _flight(submit, take, plan["flights"], plan["deep"])


def calls(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure small calls and calls in flight, raw and ours in turn.

    Collective over `comm`, of two ranks.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``; ``batches`` and ``flights`` of a round; ``warm`` calls before each;
        ``deep``: how many are in flight.

    Returns
    -------
    dict
        On rank 0: ``small`` and ``raw_small`` in seconds, ``flight`` and ``raw_flight`` in
        calls per second.
    """
    found: dict[str, list[float]] = {"small": [], "flight": []}
    raw: dict[str, list[float]] = {"raw_small": [], "raw_flight": []}
    for _ in range(plan["rounds"]):
        raw["raw_small"] += _raw_small(comm, plan)
        result = mpiml.launch(_program(_drive_small, plan), comm=comm)
        if comm.rank == 0:
            found["small"] += result["driver"][0]
        raw["raw_flight"].append(_raw_flight(comm, plan))
        result = mpiml.launch(_program(_drive_flight, plan), comm=comm)
        if comm.rank == 0:
            found["flight"].append(result["driver"][0])
    measured: dict[str, list[float]] = comm.bcast(raw, root=1)
    return found | measured
