"""torch.distributed.rpc: calls between two processes. Run by ``mpiml bench --peers``."""

import json
import os
import socket
from collections import deque
from time import perf_counter
from typing import Any

import torch
from torch import multiprocessing
from torch.distributed import rpc

__all__ = ["array", "echo", "main", "run"]

ARRAYS = {n: torch.zeros(n // 8, dtype=torch.float64) for n in (1 << 10, 16 << 20)}


def echo(a: int, b: int, c: str) -> tuple[int, int, str]:
    """Return the arguments."""
    return a, b, c


def array(nbytes: int, value: float) -> Any:
    """Return a refilled tensor, which the server keeps."""
    return ARRAYS[nbytes].fill_(value)


def run(rank: int, port: int) -> None:
    """Be the server, or measure it."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)  # type: ignore[no-untyped-call, unused-ignore]
    if rank == 1:
        plan = json.loads(os.environ["BENCH_PLAN"])
        found: dict[str, Any] = {"version": torch.__version__}
        if plan["what"] == "rpc":
            found["small"] = _small(plan)
            found["flight"] = [_flight(plan) for _ in range(3)]
        else:
            found["small_array"] = _array(1 << 10, plan)
            found["array"] = _array(16 << 20, plan)
        print("BENCH RESULT " + json.dumps(found), flush=True)
    rpc.shutdown()


def _small(plan: dict[str, Any]) -> list[float]:
    took = []
    for _ in range(plan["warm"] + plan["calls"]):
        began = perf_counter()
        rpc.rpc_sync("rank0", echo, (1, 2, "a"))
        took.append(perf_counter() - began)
    return took[plan["warm"] :]


def _flight(plan: dict[str, Any]) -> float:
    flying = deque(rpc.rpc_async("rank0", echo, (1, 2, "a")) for _ in range(plan["deep"]))
    began = perf_counter()
    for _ in range(plan["flights"]):
        flying.popleft().wait()
        flying.append(rpc.rpc_async("rank0", echo, (1, 2, "a")))
    rate = plan["flights"] / (perf_counter() - began)
    for future in flying:
        future.wait()
    return float(rate)


def _array(nbytes: int, plan: dict[str, Any]) -> list[float]:
    took = []
    for i in range(3 + plan["repeats"]):
        began = perf_counter()
        result = rpc.rpc_sync("rank0", array, (nbytes, i))
        took.append(perf_counter() - began)
        assert result[-1] == i
    return took[3:]


def main() -> None:
    """Start both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, args=(port,), nprocs=2)  # type: ignore[attr-defined, no-untyped-call, unused-ignore]


if __name__ == "__main__":
    main()
