"""Where one thread makes all calls of MPI: a turn of `mpiml.poll`, and small calls, at two levels."""

from typing import Any

import mpiml
from mpiml.bench.measure import Row, batches, ratio_at_most, sampled
from mpiml.bench.rpc_calls import ARGUMENTS, Echo
from mpiml.bench.spawn import Options, Ranks, only_two

__all__ = ["measure", "turns"]

PLANS = {
    False: {"rounds": 5, "batches": 200, "warm": 300},
    True: {"rounds": 1, "batches": 10, "warm": 50},
}
LEVELS = ("multiple", "funneled")

_Plan = dict[str, Any]


def _drive(echo: Any, plan: _Plan) -> dict[str, list[float]]:
    """Make small calls; then polls and tests with nothing to do, a batch of each in turn."""
    from mpi4py import MPI

    method = echo.echo
    found = {"small": batches(lambda: method(*ARGUMENTS), plan["batches"], plan["warm"])}
    memory = bytearray(8)
    request = MPI.COMM_SELF.Recv_init([memory, MPI.BYTE], MPI.ANY_SOURCE, 0)
    request.Start()
    found["poll"], found["test"] = [], []
    for _ in range(plan["batches"]):
        found["test"] += batches(request.Test, 1, 1)
        found["poll"] += batches(mpiml.poll, 1, 1)
    request.Cancel()
    request.Wait()
    request.Free()
    return found


def _program(plan: _Plan) -> mpiml.Program:
    program = mpiml.Program("bench poll")
    echo = program.add_node(mpiml.ServiceNode(Echo), label="echo")
    program.add_node(mpiml.PyNode(_drive, echo, plan), label="driver")
    return program


def turns(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure polls and small calls at the thread level MPI has.

    Collective over `comm`, of two ranks.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``; ``batches`` of a round; ``warm`` calls before each.

    Returns
    -------
    dict
        On rank 0: ``small``, ``poll`` and ``test``, in seconds.
    """
    found: dict[str, list[float]] = {"small": [], "poll": [], "test": []}
    for _ in range(plan["rounds"]):
        result = mpiml.launch(_program(plan), comm=comm)
        if comm.rank == 0:
            for key, values in result["driver"][0].items():
                found[key] += values
    return found


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench poll``.

    Local: starts ranks; no MPI in this process.
    """
    only_two(options)
    rows: list[Row] = []
    full: dict[str, Any] = {}
    for level in LEVELS:
        environ = {"MPI4PY_RC_THREAD_LEVEL": level}
        found = ranks.scenario("poll:turns", 2, PLANS[options.quick], environ=environ)
        full = full or found
        name = f"MPI_THREAD_{level.upper()}"
        base = found["test"]
        rows += [
            sampled(f"test_{level}", f"{name}: MPI_Test, nothing there", "µs", base),
            sampled(
                f"poll_{level}", "  mpiml.poll(), nothing to do", "µs", found["poll"], base,
                ratio_at_most(3),
            ),
            sampled(
                f"small_{level}", "  blocking call, small arguments", "µs", found["small"],
                full["small"],
            ),
        ]  # fmt: skip
    return rows, [
        "A call below MULTIPLE goes to a thread of the service and back, since the main one drives."
    ]
