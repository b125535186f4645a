"""Ray: calls of the driver to one actor. Run by ``mpiml bench --peers``; see peers/__init__.py."""

import json
import os
from collections import deque
from time import perf_counter
from typing import Any

import numpy as np
import ray

__all__ = ["Echo", "main"]


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


def main() -> None:
    """Print samples."""
    plan = json.loads(os.environ["BENCH_PLAN"])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=512 << 20,
    )
    actor = ray.remote(Echo).remote()
    found: dict[str, Any] = {"version": ray.__version__}
    if plan["what"] == "rpc":
        found["small"] = _small(actor, plan)
        found["flight"] = [_flight(actor, plan) for _ in range(5)]
    else:
        found["small_array"] = _array(actor, 1 << 10, plan)
        found["array"] = _array(actor, 16 << 20, plan)
    print("BENCH RESULT " + json.dumps(found), flush=True)
    ray.shutdown()


def _small(actor: Any, plan: dict[str, Any]) -> list[float]:
    """Return seconds of calls one after the other."""
    took = []
    for _ in range(plan["warm"] + plan["calls"]):
        began = perf_counter()
        ray.get(actor.echo.remote(1, 2, "a"))
        took.append(perf_counter() - began)
    return took[plan["warm"] :]


def _flight(actor: Any, plan: dict[str, Any]) -> float:
    """Return calls per second with many in flight."""
    flying = deque(actor.echo.remote(1, 2, "a") for _ in range(plan["deep"]))
    began = perf_counter()
    for _ in range(plan["flights"]):
        ray.get(flying.popleft())
        flying.append(actor.echo.remote(1, 2, "a"))
    rate = plan["flights"] / (perf_counter() - began)
    ray.get(list(flying))
    return float(rate)


def _array(actor: Any, nbytes: int, plan: dict[str, Any]) -> list[float]:
    """Return seconds of calls that return an array."""
    took = []
    for i in range(3 + plan["repeats"]):
        began = perf_counter()
        result = ray.get(actor.array.remote(nbytes, i))
        took.append(perf_counter() - began)
        assert result[-1] == i
        del result
    return took[3:]


if __name__ == "__main__":
    main()
