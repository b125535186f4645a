"""Monarch: calls to the endpoints of an actor in another process.

Run by ``mpiml bench --peers``.
"""

import json
import os
from collections import deque
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np
from monarch.actor import Actor, endpoint, this_host

__all__ = ["Echo", "main"]


class Echo(Actor):  # type: ignore[misc]
    """Answers with its arguments, or with an array."""

    def __init__(self) -> None:
        self.arrays = {n: np.zeros(n // 8) for n in (1 << 10, 16 << 20)}

    @endpoint  # type: ignore[untyped-decorator]
    async def echo(self, a: int, b: int, c: str) -> tuple[int, int, str]:
        """Return the arguments."""
        return a, b, c

    @endpoint  # type: ignore[untyped-decorator]
    async def array(self, nbytes: int, value: float) -> Any:
        """Return a refilled array, which the actor keeps."""
        self.arrays[nbytes].fill(value)
        return self.arrays[nbytes]


def main() -> None:
    """Print samples."""
    plan = json.loads(os.environ["BENCH_PLAN"])
    actor = this_host().spawn_procs(per_host={"procs": 1}).spawn("echo", Echo)
    found: dict[str, Any] = {"version": version("torchmonarch")}
    if plan["what"] == "rpc":
        took = []
        for _ in range(plan["warm"] + plan["calls"]):
            began = perf_counter()
            actor.echo.call_one(1, 2, "a").get()
            took.append(perf_counter() - began)
        found["small"] = took[plan["warm"] :]
        found["flight"] = [_flight(actor, plan) for _ in range(3)]
    else:
        found["small_array"] = _array(actor, 1 << 10, plan)
        found["array"] = _array(actor, 16 << 20, plan)
    print("BENCH RESULT " + json.dumps(found), flush=True)
    # its threads would hold the interpreter for a while
    os._exit(0)


def _flight(actor: Any, plan: dict[str, Any]) -> float:
    flying = deque(actor.echo.call_one(1, 2, "a") for _ in range(plan["deep"]))
    began = perf_counter()
    for _ in range(plan["flights"]):
        flying.popleft().get()
        flying.append(actor.echo.call_one(1, 2, "a"))
    rate = plan["flights"] / (perf_counter() - began)
    while flying:
        flying.popleft().get()
    return float(rate)


def _array(actor: Any, nbytes: int, plan: dict[str, Any]) -> list[float]:
    took = []
    for i in range(3 + plan["repeats"]):
        began = perf_counter()
        result = actor.array.call_one(nbytes, i).get()
        took.append(perf_counter() - began)
        assert result[-1] == i
    return took[3:]


if __name__ == "__main__":
    main()
