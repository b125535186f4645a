"""charm4py: calls of the main chare to a chare on the other process.

Run by ``mpiml bench --peers`` under ``charmrun +p2 ++local``.
"""

import json
import os
from collections import deque
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np
from charm4py import Chare, charm

__all__ = ["Echo", "main"]


class Echo(Chare):  # type: ignore[misc]
    """Answers with its arguments, or with an array."""

    def __init__(self) -> None:
        self.arrays = {n: np.zeros(n // 8) for n in (1 << 10, 16 << 20)}

    def echo(self, a: int, b: int, c: str) -> tuple[int, int, str]:
        """Return the arguments."""
        return a, b, c

    def array(self, nbytes: int, value: float) -> Any:
        """Return a refilled array, which the chare keeps."""
        self.arrays[nbytes].fill(value)
        return self.arrays[nbytes]


def main(args: list[str]) -> None:
    """Print samples; a coroutine of charm4py."""
    plan = json.loads(os.environ["BENCH_PLAN"])
    chare = Chare(Echo, onPE=1)
    found: dict[str, Any] = {"version": version("charm4py")}
    if plan["what"] == "rpc":
        took = []
        for _ in range(plan["warm"] + plan["calls"]):
            began = perf_counter()
            chare.echo(1, 2, "a", ret=True).get()
            took.append(perf_counter() - began)
        found["small"] = took[plan["warm"] :]
        found["flight"] = [_flight(chare, plan) for _ in range(5)]
    else:
        found["small_array"] = _array(chare, 1 << 10, plan)
        found["array"] = _array(chare, 16 << 20, plan)
    print("BENCH RESULT " + json.dumps(found), flush=True)
    charm.exit()


def _flight(chare: Any, plan: dict[str, Any]) -> float:
    flying = deque(chare.echo(1, 2, "a", ret=True) for _ in range(plan["deep"]))
    began = perf_counter()
    for _ in range(plan["flights"]):
        flying.popleft().get()
        flying.append(chare.echo(1, 2, "a", ret=True))
    rate = plan["flights"] / (perf_counter() - began)
    while flying:
        flying.popleft().get()
    return float(rate)


def _array(chare: Any, nbytes: int, plan: dict[str, Any]) -> list[float]:
    took = []
    for i in range(3 + plan["repeats"]):
        began = perf_counter()
        result = chare.array(nbytes, i, ret=True).get()
        took.append(perf_counter() - began)
        assert result[-1] == i
    return took[3:]


if __name__ == "__main__":
    charm.start(main)
