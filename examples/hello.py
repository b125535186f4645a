"""A counter on one rank, workers on all others.

$ python -m mpiml.run -n 4 examples/hello.py
[worker/0] 10 calls, the counter stood at ...
[worker/1] 10 calls, the counter stood at ...
[worker/2] 10 calls, the counter stood at ...

Without MPI, every node a thread of one process, and one worker unless --threads tells:

$ python -m mpiml.run examples/hello.py --steps 3
[worker/0] 3 calls, the counter stood at 8
"""

import mpiml


class Counter:
    def __init__(self, start=0):
        self.total = start

    def add(self, n):
        self.total += n
        return self.total


def work(counter, steps):
    totals = [counter.add(1) for _ in range(steps)]
    print(f"{steps} calls, the counter stood at {totals[-1]}")
    return totals


def build(workers: int = mpiml.FILL, steps: int = 10) -> mpiml.Program:
    program = mpiml.Program("hello")
    counter = program.add_node(mpiml.ServiceNode(Counter, start=5), label="counter")
    program.add_node(mpiml.PyNode(work, counter, steps), label="worker", replicas=workers)
    return program


if __name__ == "__main__":
    mpiml.launch(build)
