"""On the ranks of two hosts: allreduce over both, ours and MPI's, and the bytes on the link."""

import time
from typing import Any

import numpy as np

from mpiml.bench.allreduce_rounds import SIZES, Way, in_turn, way_of
from mpiml.bench.several_hosts import link_bytes
from mpiml.collectives import Bucket

__all__ = ["apart", "houses"]

_Plan = dict[str, Any]


def apart(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time all ways at each size, and count what passes the link.

    Collective over `comm`.

    Parameters
    ----------
    comm
        The communicator, of ranks on two hosts.
    plan
        ``sizes``: name -> ``[rounds, repeats, warm]``; ``counted``: operations whose bytes
        are counted.

    Returns
    -------
    dict
        ``sizes``: name -> way -> seconds; ``bytes``: name -> way -> bytes on the link, of one
        operation.
    """
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = comm.Split(0 if local.rank == 0 else 1, comm.rank)
    found: dict[str, Any] = {"sizes": {}, "bytes": {}}
    try:
        for size, (rounds, repeats, warm) in plan["sizes"].items():
            like = {"x": np.broadcast_to(np.float32(0), SIZES[size] // 4)}
            with Bucket(comm, like) as bucket:
                ways = _ways(comm, local, leaders, bucket)
                found["sizes"][size] = in_turn(comm, ways, rounds, repeats, warm)
                found["bytes"][size] = {
                    name: _count(comm, way, plan["counted"]) for name, way in ways.items()
                }
    finally:
        leaders.Free()
        local.Free()
    return found


def houses(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Return ``sizes``, the ranks that each host has, as MPI splits them. Collective."""
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    firsts = comm.allgather(local.size if local.rank == 0 else 0)
    local.Free()
    return {"sizes": [size for size in firsts if size]}


def _ways(comm: Any, local: Any, leaders: Any, bucket: Any) -> dict[str, Way]:
    from mpi4py import MPI

    x = bucket["x"]
    a, b = np.zeros_like(x), np.zeros_like(x)
    among = way_of(
        "Allreduce among leaders", leaders, a, lambda: leaders.Allreduce(MPI.IN_PLACE, a),
        lambda: a,
    )  # fmt: skip
    if local.rank != 0:  # the others only wait at the barrier
        among = among._replace(run=lambda: None, check=lambda i, whole: None)
    return {
        "mpi": way_of("Allreduce(a, b)", comm, a, lambda: comm.Allreduce(a, b), lambda: b),
        "mpi_in_place": way_of(
            "Allreduce(IN_PLACE, a)", comm, a, lambda: comm.Allreduce(MPI.IN_PLACE, a),
            lambda: a,
        ),
        "leaders": among,
        "bucket": way_of("Bucket", comm, x, bucket.allreduce, lambda: x),
    }  # fmt: skip


def _count(comm: Any, way: Way, operations: int) -> float:
    """Return the bytes on the link of one operation, on rank 0's side, both directions."""
    way.refill(0)
    before = _quiet(comm)
    for _ in range(operations):
        way.run()
    return (_quiet(comm) - before) / operations


def _quiet(comm: Any) -> int:
    """Return the counter once nothing is under way, late acknowledgements included."""
    comm.Barrier()
    time.sleep(0.05)
    count = link_bytes()
    comm.Barrier()
    return count
