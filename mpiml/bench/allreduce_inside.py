"""On the ranks: buckets of many arrays, without the check, of half precision; their memory."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from mpiml.bench.allreduce_rounds import MIB, SIZES, Way, in_turn, way_of
from mpiml.bench.allreduce_steps import steps
from mpiml.collectives import Bucket

__all__ = ["ARRAYS", "arena_bytes", "inside", "many_like"]

ARRAYS = 500

_Plan = dict[str, Any]
_Samples = dict[str, list[float]]


def inside(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure all parts.

    Collective over `comm`, whose ranks share a host.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``many``: size -> ``[rounds, repeats, warm]``; ``check``, ``halves``, ``fused``: the
        same three; ``memory``: bytes of each rank.

    Returns
    -------
    dict
        For each key of `plan` way -> seconds, with the size or optimizer above where there are
        several; ``memory``: way -> bytes of the arena over the
        bytes of the data of all ranks.
    """
    return {
        "many": {size: _many(comm, SIZES[size], how) for size, how in plan["many"].items()},
        "check": _check(comm, plan["check"]),
        "halves": _halves(comm, plan["halves"]),
        "fused": steps(comm, SIZES["64 MiB"], plan["fused"]),
        "memory": _memory(comm, plan["memory"]),
    }


def many_like(count: int, arrays: int = ARRAYS) -> dict[str, Any]:
    """Return a tree of arrays of different length, `count` float32 in all. Local."""
    ends = np.linspace(0, 1, arrays + 1) ** 1.5 * (count - arrays) + np.arange(arrays + 1)
    lengths = np.diff(ends.astype(np.int64))
    return {f"p{i}": np.broadcast_to(np.float32(0), int(n)) for i, n in enumerate(lengths)}


def _many(comm: Any, nbytes: int, how: list[int]) -> _Samples:
    one = {"x": np.broadcast_to(np.float32(0), nbytes // 4)}
    return _buckets(comm, {"one": {"like": one}, "many": {"like": many_like(nbytes // 4)}}, how)


def _check(comm: Any, how: list[int]) -> _Samples:
    like = {"x": np.broadcast_to(np.float32(0), MIB // 4)}
    return _buckets(
        comm, {"off": {"like": like, "check": False}, "on": {"like": like, "check": True}}, how
    )


def _halves(comm: Any, how: list[int]) -> _Samples:
    dtypes: dict[str, Any] = {"float32": np.dtype("f4"), "float16": np.dtype("f2")}
    try:
        import ml_dtypes
    except ImportError:
        pass
    else:
        dtypes["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
    likes = {
        name: {"like": {"x": np.broadcast_to(np.zeros((), dtype), 4 * MIB)}}
        for name, dtype in dtypes.items()
    }
    return _buckets(comm, likes, how)


def _buckets(comm: Any, arguments: dict[str, dict[str, Any]], how: list[int]) -> _Samples:
    """Time the allreduce in place of buckets that differ in their arguments."""
    with ExitStack() as stack:
        ways = {}
        for name, keywords in arguments.items():
            bucket = stack.enter_context(Bucket(comm, **keywords))
            ways[name] = _way(name, comm, bucket)
        return in_turn(comm, ways, *how)


def _way(name: str, comm: Any, bucket: Any) -> Way:
    flat, run = bucket.flat[0], bucket.allreduce
    return way_of(name, comm, flat, run, lambda: flat)


def _memory(comm: Any, nbytes: int) -> dict[str, float]:
    """Return the bytes that the arenas of buckets take once they are used, over the data's."""
    like = {"x": np.broadcast_to(np.float32(0), nbytes // 4)}
    found = {}
    for result in ("own", "shared"):
        before = _used(comm)
        with Bucket(comm, like, result=result) as bucket:
            bucket.flat[0].fill(1)
            bucket.allreduce()
            found[result] = (_used(comm) - before) / comm.size / nbytes
        del bucket  # whose memory stays while there are views of it
    return found


def _used(comm: Any) -> int:
    """Return the bytes of all arenas of these ranks, each page counted once."""
    comm.Barrier()
    with open("/proc/self/smaps") as lines:
        mine = arena_bytes(lines)
    used: int = comm.allreduce(mine)
    return used


def arena_bytes(smaps: Iterable[str]) -> int:
    """Return this process's share of arenas: a page that n processes map counts 1/n. Local.

    Parameters
    ----------
    smaps
        The lines of ``/proc/self/smaps``.
    """
    total, inside = 0, False
    for line in smaps:
        words = line.split()
        if not words[0].endswith(":"):
            inside = any(word.startswith("/dev/shm/mpiml-") for word in words)
        elif inside and words[0] == "Pss:":
            total += int(words[1]) << 10
    return total
