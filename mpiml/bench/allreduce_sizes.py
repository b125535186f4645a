"""On the ranks: allreduce of float32 from 8 B to 256 MiB, ours and MPI's, beside a stream copy."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import mpiml._native as native
from mpiml.bench.allreduce_rounds import KIB, MIB, SIZES, Way, fill_value, in_turn, way_of
from mpiml.collectives import Bucket, allreduce

__all__ = ["STREAMED", "fits", "needed", "sizes"]

#: From here on in bytes the memory is the bound, and a stream copy is timed with the rest.
STREAMED = 64 * MIB

_Plan = dict[str, Any]


def needed(nbytes: int, ranks: int) -> tuple[int, int]:
    """Return the bytes of /dev/shm and of all memory that a size takes. Local: no MPI."""
    shared = (2 * ranks + 1) * nbytes  # a bucket, and one with a shared result
    return shared, shared + 5 * ranks * nbytes


def fits(nbytes: int, ranks: int) -> bool:
    """Tell whether a size fits into the memory that is free now. Local: reads /proc."""
    shared, everything = needed(nbytes, ranks)
    room = os.statvfs("/dev/shm")
    if room.f_bavail * room.f_frsize < 1.1 * shared:
        return False
    with open("/proc/meminfo") as lines:
        sizes = {line.partition(":")[0]: line.split()[1] for line in lines}
    return int(sizes["MemAvailable"]) * KIB > 1.2 * everything


def sizes(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Time all ways at each size.

    Collective over `comm`, whose ranks share a host.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``sizes``: name -> ``[rounds, repeats, warm]``.

    Returns
    -------
    dict
        Name of a size -> way -> seconds; a size that does not fit is missing.
    """
    found: dict[str, Any] = {}
    for size, (rounds, repeats, warm) in plan["sizes"].items():
        nbytes = SIZES[size]
        if comm.bcast(fits(nbytes, comm.size)):
            found[size] = _one(comm, nbytes, rounds, repeats, warm)
    return found


def _one(comm: Any, nbytes: int, rounds: int, repeats: int, warm: int) -> dict[str, Any]:
    count = nbytes // 4
    like = {"x": np.broadcast_to(np.float32(0), count)}  # no memory of its own
    a, b = (np.zeros(count, np.float32) for _ in range(2))
    with Bucket(comm, like) as bucket, Bucket(comm, like, result="shared") as shared:
        x, y, z = bucket["x"], shared["x"], shared.result["x"]
        ways = _raw(comm, a, b) | _copying(comm, a)
        ways["bucket"] = way_of("Bucket", comm, x, bucket.allreduce, lambda: x)
        ways["shared"] = way_of("shared result", comm, y, shared.allreduce, lambda: z)
        if nbytes >= STREAMED:
            ways["copy"] = _stream(comm, a, b)
        return in_turn(comm, ways, rounds, repeats, warm)


def _raw(comm: Any, a: Any, b: Any) -> dict[str, Way]:
    from mpi4py import MPI

    def new(x: Any) -> Any:
        y = np.empty_like(x)
        comm.Allreduce(x, y)
        return y

    return {
        "mpi": way_of("Allreduce(a, b)", comm, a, lambda: comm.Allreduce(a, b), lambda: b),
        "mpi_in_place": way_of(
            "Allreduce(IN_PLACE, a)", comm, a, lambda: comm.Allreduce(MPI.IN_PLACE, a),
            lambda: a,
        ),
        "mpi_new": _new("Allreduce(a, new)", comm, a, new),
    }  # fmt: skip


def _copying(comm: Any, a: Any) -> dict[str, Way]:
    return {
        "outside": way_of(
            "allreduce(x, out=x)", comm, a, lambda: allreduce(a, comm=comm, out=a), lambda: a
        ),
        "new": _new("allreduce(x)", comm, a, lambda x: allreduce(x, comm=comm)),
    }


def _new(name: str, comm: Any, a: Any, function: Callable[[Any], Any]) -> Way:
    """Time a function that returns a new array; the one before is given back untimed."""
    held: list[Any] = []
    way = way_of(name, comm, a, lambda: held.append(function(a)), lambda: held[0])

    def refill(i: int) -> None:
        held.clear()
        way.refill(i)

    return way._replace(refill=refill)


def _stream(comm: Any, a: Any, b: Any) -> Way:
    """Copy on all ranks at once: S bytes read and S written by each, as the sum does it."""

    def check(i: int, whole: bool) -> None:
        value = fill_value(i, comm.rank)
        if b[-1] != value or (whole and not (b == value).all()):
            raise AssertionError(f"copy: expected {value}, got {b[0]} .. {b[-1]}")

    return Way(lambda i: a.fill(fill_value(i, comm.rank)), lambda: native.copy(b, a), check)
