"""torch.distributed with gloo: all_reduce in place. Run by ``mpiml bench allreduce --peers``.

Given ``deepspeed`` on the command line, DeepSpeed's operation on shared memory instead.
"""

import json
import os
import socket
import sys
from time import perf_counter
from typing import Any

import torch
from torch import distributed, multiprocessing

__all__ = ["main", "run"]


def run(rank: int, size: int, port: int, name: str) -> None:
    """Be one of the ranks; rank 0 prints."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(size),
    }  # fmt: skip
    plan = json.loads(os.environ["BENCH_PLAN"])
    reduce, version = _deepspeed() if name == "deepspeed" else _gloo()
    found: dict[str, Any] = {"version": version}
    for key, (nbytes, repeats) in plan["sizes"].items():
        x = torch.zeros(nbytes // 4, dtype=torch.float32)
        found[key] = []
        for _ in range(plan["rounds"]):
            found[key] += _block(reduce, x, rank, size, repeats, plan["warm"])
    if rank == 0:
        print("BENCH RESULT " + json.dumps(found), flush=True)
    distributed.destroy_process_group()


def _gloo() -> tuple[Any, str]:
    distributed.init_process_group("gloo")
    return distributed.all_reduce, torch.__version__


def _deepspeed() -> tuple[Any, str]:
    import deepspeed
    from deepspeed import comm

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if getattr(comm.comm.cdb, "shm_comm_op", None) is None:
        raise RuntimeError("its operation on shared memory could not be built")
    return comm.inference_all_reduce, deepspeed.__version__


def _block(reduce: Any, x: Any, rank: int, size: int, repeats: int, warm: int) -> list[float]:
    took = torch.zeros(warm + repeats, dtype=torch.float64)
    for i in range(warm + repeats):
        x.fill_(i % 16 + rank + 1)
        distributed.barrier()
        began = perf_counter()
        reduce(x)
        took[i] = perf_counter() - began
        assert x[-1] == sum(i % 16 + other + 1 for other in range(size)), x
    distributed.all_reduce(took, op=distributed.ReduceOp.MAX)
    return took[warm:].tolist()


def main() -> None:
    """Start all ranks."""
    size = json.loads(os.environ["BENCH_PLAN"])["ranks"]
    name = sys.argv[1] if len(sys.argv) > 1 else "gloo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, args=(size, port, name), nprocs=size)  # type: ignore[attr-defined, no-untyped-call, unused-ignore]


if __name__ == "__main__":
    main()
