"""Dask: calls of a task to an actor on another worker. Run by ``mpiml bench --peers``."""

import json
import os
from collections import deque
from time import perf_counter
from typing import Any

import distributed
import numpy as np

__all__ = ["Echo", "drive", "main"]


class Echo:
    """Answers with its arguments, or with an array."""

    def __init__(self) -> None:
        self.arrays = {n: np.zeros(n // 8) for n in (1 << 10, 16 << 20)}

    def echo(self, a: int, b: int, c: str) -> tuple[int, int, str]:
        """Return the arguments."""
        return a, b, c

    def array(self, nbytes: int, value: float) -> Any:
        """Return a refilled array, which the actor keeps."""
        self.arrays[nbytes].fill(value)
        return self.arrays[nbytes]


def drive(actor: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """Return samples; runs in the other worker."""
    if plan["what"] != "rpc":
        return {
            "small_array": _array(actor, 1 << 10, plan),
            "array": _array(actor, 16 << 20, plan),
        }
    took = []
    for _ in range(plan["warm"] + plan["calls"]):
        began = perf_counter()
        actor.echo(1, 2, "a").result()
        took.append(perf_counter() - began)
    rates = [_flight(actor, plan) for _ in range(3)]
    return {"small": took[plan["warm"] :], "flight": rates}


def _flight(actor: Any, plan: dict[str, Any]) -> float:
    flying = deque(actor.echo(1, 2, "a") for _ in range(plan["deep"]))
    began = perf_counter()
    for _ in range(plan["flights"]):
        flying.popleft().result()
        flying.append(actor.echo(1, 2, "a"))
    rate = plan["flights"] / (perf_counter() - began)
    for future in flying:
        future.result()
    return float(rate)


def _array(actor: Any, nbytes: int, plan: dict[str, Any]) -> list[float]:
    took = []
    for i in range(3 + plan["repeats"]):
        began = perf_counter()
        result = actor.array(nbytes, i).result()
        took.append(perf_counter() - began)
        assert result[-1] == i
    return took[3:]


def main() -> None:
    """Print samples."""
    plan = json.loads(os.environ["BENCH_PLAN"])
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        first, second = client.scheduler_info()["workers"]
        actor = client.submit(Echo, actor=True, workers=[first]).result()
        found = client.submit(drive, actor, plan, workers=[second]).result()
        found["version"] = distributed.__version__
        print("BENCH RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
