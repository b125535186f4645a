"""Intel MPI: both forms of Allreduce by mpi4py. Run by ``mpiml bench allreduce --peers``."""

import json
import os
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["main"]


def main() -> None:
    """Time every size on all ranks; rank 0 prints."""
    comm = MPI.COMM_WORLD
    plan = json.loads(os.environ["BENCH_PLAN"])
    words = MPI.Get_library_version().split()
    found: dict[str, Any] = {"version": words[words.index("Library") + 1]}
    for size, (nbytes, repeats) in plan["sizes"].items():
        a, b = (np.zeros(nbytes // 4, np.float32) for _ in range(2))
        found |= {size: [], f"{size}_in_place": []}
        for _ in range(plan["rounds"]):
            for end, source in (("", a), ("_in_place", MPI.IN_PLACE)):
                target = b if end == "" else a
                found[size + end] += _block(comm, a, source, target, repeats, plan["warm"])
    if comm.rank == 0:
        print("BENCH RESULT " + json.dumps(found), flush=True)


def _block(comm: Any, a: Any, source: Any, target: Any, repeats: int, warm: int) -> list[float]:
    took = np.zeros(warm + repeats)
    for i in range(warm + repeats):
        a.fill(i % 16 + comm.rank + 1)
        comm.Barrier()
        began = perf_counter()
        comm.Allreduce(source, target)
        took[i] = perf_counter() - began
    comm.Allreduce(MPI.IN_PLACE, took, MPI.MAX)
    slowest: list[float] = took[warm:].tolist()
    return slowest


if __name__ == "__main__":
    main()
