"""Dragon: a request queue and a reply queue between two processes.

Run by ``mpiml bench --peers`` under ``dragon -s``.
"""

import json
import multiprocessing
import os
from importlib.metadata import version
from time import perf_counter
from typing import Any

import dragon  # noqa: F401 - adds its start method to multiprocessing
import numpy as np

__all__ = ["main", "serve"]


def serve(asked: Any, answers: Any) -> None:
    """Answer with what was asked, or with a refilled array of that many bytes."""
    arrays = {n: np.zeros(n // 8) for n in (1 << 10, 16 << 20)}
    while True:
        request = asked.get()
        if request is None:
            return
        if isinstance(request, list):
            nbytes, value = request
            arrays[nbytes].fill(value)
            answers.put(arrays[nbytes])
        else:
            answers.put(request)


def main() -> None:
    """Print samples."""
    plan = json.loads(os.environ["BENCH_PLAN"])
    multiprocessing.set_start_method("dragon")
    asked: Any = multiprocessing.Queue()
    answers: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(asked, answers))
    server.start()

    def call(request: Any) -> tuple[float, Any]:
        began = perf_counter()
        asked.put(request)
        answer = answers.get()
        return perf_counter() - began, answer

    found: dict[str, Any] = {"version": version("dragonhpc")}
    if plan["what"] == "rpc":
        took = [call((1, 2, "a"))[0] for _ in range(plan["warm"] + plan["calls"])]
        found["small"] = took[plan["warm"] :]
    else:
        for key, nbytes in (("small_array", 1 << 10), ("array", 16 << 20)):
            found[key] = []
            for i in range(3 + plan["repeats"]):
                seconds, result = call([nbytes, i])
                assert result[-1] == i
                if i >= 3:
                    found[key].append(seconds)
    print("BENCH RESULT " + json.dumps(found), flush=True)
    asked.put(None)
    server.join()


if __name__ == "__main__":
    main()
