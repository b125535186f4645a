"""The program that ``mpiml bench startup`` starts: a counter, and workers that call it once."""

import mpiml

__all__ = ["Counter", "build", "work"]


class Counter:
    """Counts."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, n: int) -> int:
        """Add `n` and return the total."""
        self._total += n
        return self._total


def work(counter: Counter) -> int:
    """Call the counter once."""
    return counter.add(1)


def build() -> mpiml.Program:
    """Return the graph: one counter, workers on all other ranks."""
    program = mpiml.Program("hello")
    counter = program.add_node(mpiml.ServiceNode(Counter), label="counter")
    program.add_node(mpiml.PyNode(work, counter), label="worker", replicas=mpiml.FILL)
    return program
