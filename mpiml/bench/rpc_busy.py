"""On the ranks: calls to a service whose own `run` computes, and what they cost that `run`.

The yardstick is the same loop in the same process with no program running at all, before and
after each program, so that a change of clock speed meets both.
"""

import threading
import time
from time import perf_counter
from typing import Any

import mpiml

__all__ = ["Busy", "Work", "busy"]

_Plan = dict[str, Any]


class Work:
    """A piece of work of about a quarter of a millisecond, again and again.

    Parameters
    ----------
    kind
        ``"matmul"`` and ``"elementwise"`` are NumPy's and release the interpreter;
        ``"python"`` never does by itself.
    """

    def __init__(self, kind: str) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        self.done = False
        self.units = 0
        self._a = rng.random((128, 128))
        self._b = rng.random((128, 128))
        self._x = rng.random(1 << 15)
        self._c = np.empty_like(self._a)
        self._y = np.empty_like(self._x)
        self._np = np
        self._unit = {
            "matmul": self._matmul,
            "elementwise": self._elementwise,
            "python": self._python,
        }[kind]

    def _matmul(self) -> None:
        self._np.matmul(self._a, self._b, out=self._c)

    def _elementwise(self) -> None:
        np, x, y = self._np, self._x, self._y
        np.exp(x, out=y)
        np.add(y, x, out=y)
        np.multiply(y, 0.5, out=y)

    def _python(self) -> None:
        total = 0
        for i in range(4000):
            total += i * i

    def loop(self) -> None:
        """Work until `done`."""
        unit = self._unit
        while not self.done:
            unit()
            self.units += 1

    def rate(self, seconds: float) -> float:
        """Work for `seconds`; return units per second."""
        self.done, before = False, self.units
        timer = threading.Timer(seconds, self.finish)
        timer.start()
        began = perf_counter()
        self.loop()
        took = perf_counter() - began
        timer.join()
        return (self.units - before) / took

    def finish(self) -> None:
        """Let the loop end."""
        self.done = True


class Busy:
    """A service whose `run` works while it is called."""

    def __init__(self, kind: str) -> None:
        self._work = Work(kind)

    def run(self) -> None:
        """Work until `finish` is called."""
        self._work.loop()

    def echo(self, a: int, b: int, c: str) -> tuple[int, int, str]:
        """Return the arguments."""
        return a, b, c

    def mark(self) -> tuple[float, int]:
        """Return this process's clock and the units done so far."""
        return perf_counter(), self._work.units

    def finish(self) -> None:
        """Let `run` return."""
        self._work.finish()


def _rate(first: tuple[float, int], last: tuple[float, int]) -> float:
    return (last[1] - first[1]) / (last[0] - first[0])


def _drive(service: Any, plan: _Plan) -> dict[str, Any]:
    """Leave `run` alone for a while, then call back to back."""
    method = service.echo
    for _ in range(plan["warm"]):
        method(1, 2, "a")
    marks = [service.mark()]
    time.sleep(plan["quiet_s"])
    marks.append(service.mark())
    seconds = []
    for _ in range(plan["calls"]):
        began = perf_counter()
        method(1, 2, "a")
        seconds.append(perf_counter() - began)
    marks.append(service.mark())
    service.finish()
    return {
        "calls": seconds,
        "quiet_rate": _rate(marks[0], marks[1]),
        "called_rate": _rate(marks[1], marks[2]),
    }


def _service(plan: _Plan) -> mpiml.Program:
    program = mpiml.Program("bench busy service")
    service = program.add_node(mpiml.ServiceNode(Busy, plan["kind"]), label="service")
    program.add_node(mpiml.PyNode(_drive, service, plan), label="driver")
    return program


def _work_for(plan: _Plan) -> float:
    return Work(plan["kind"]).rate(plan["quiet_s"])


def _sleep_for(plan: _Plan) -> None:
    time.sleep(plan["quiet_s"])


def _bodies(plan: _Plan) -> mpiml.Program:
    program = mpiml.Program("bench busy body")
    program.add_node(mpiml.PyNode(_work_for, plan), label="body")
    program.add_node(mpiml.PyNode(_sleep_for, plan), label="sleeper")
    return program


def busy(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure calls to a computing service, and the speed of what it computes.

    Collective over `comm`, of two ranks.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``kind`` of work; ``rounds``; ``calls`` and ``warm`` calls of a round; ``quiet_s``:
        seconds without calls.

    Returns
    -------
    dict
        On rank 0: ``calls`` in seconds; ``quiet``, ``called`` and ``body``: the speed of the
        work as a share of that of the loop alone.
    """
    found: dict[str, list[float]] = {"calls": [], "quiet": [], "called": [], "body": []}
    before = _alone(comm, plan)
    for _ in range(plan["rounds"]):
        body = mpiml.launch(_bodies(plan), comm=comm)
        middle = _alone(comm, plan)
        served = mpiml.launch(_service(plan), comm=comm)
        after = _alone(comm, plan)
        if comm.rank == 0:
            seen = served["driver"][0]
            beside = (middle + after) / 2
            found["calls"] += seen["calls"]
            found["quiet"].append(seen["quiet_rate"] / beside)
            found["called"].append(seen["called_rate"] / beside)
            found["body"].append(body["body"][0] / ((before + middle) / 2))
        before = after
    return found


def _alone(comm: Any, plan: _Plan) -> float:
    """Return the speed of the loop with no program running; the other rank sleeps."""
    if comm.rank == 0:
        speed = _work_for(plan)
    else:
        _sleep_for(plan)
        speed = 0.0
    comm.Barrier()
    return speed
