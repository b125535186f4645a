"""An mpi4py stencil code with halo exchange, which asks MPI for FUNNELED, in an mpiml program.

The code's own loop is the body of the solvers: it exchanges rows with its neighbours, relaxes the
plate, and lets mpiml do its part by `mpiml.poll()`. A monitor on the last rank, in Python, hears
how much the plate still changes, and stops all solvers after the same step.

$ mpiexec -n 3 python examples/halo_solver.py
[monitor/0] step ...: change ...
...
[monitor/0] settled at step ...
[solver/0] ... steps on 2 ranks; the middle column has ... degrees

$ mpiexec -n 4 python examples/halo_solver.py --size 48
[monitor/0] step ...: change ...
...
[solver/0] ... steps on 3 ranks; the middle column has ... degrees
"""

import argparse

import mpi4py

mpi4py.rc.thread_level = "funneled"  # the code's choice: only its main thread calls MPI

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpiml  # noqa: E402

EVERY, SETTLED = 100, 1e-3  # steps between two reports; degrees a step


class Monitor:
    """Hears from all solvers; stops them once the plate no longer changes."""

    def __init__(self, solvers):
        self.solvers = solvers
        self.changes = {}
        self.settled = False

    def hear(self, step, change):
        changes = self.changes.setdefault(step, [])
        changes.append(change)
        if len(changes) < self.solvers or self.settled:
            return
        change = max(self.changes.pop(step))
        if step % (5 * EVERY) == 0:
            print(f"step {step}: change {change:.1e}")
        if change < SETTLED:
            self.settled = True
            print(f"settled at step {step}")
            mpiml.context().stop()


def exchange_halos(comm, plate):
    """Give the neighbours the outermost own rows, and take theirs: (rows + 2, columns)."""
    above = comm.rank - 1 if comm.rank else MPI.PROC_NULL
    below = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    comm.Sendrecv(plate[1], above, 0, plate[-1], below, 0)
    comm.Sendrecv(plate[-2], below, 1, plate[0], above, 1)


def relax(plate):
    """Make one step of Jacobi's method; return the largest change, in degrees."""
    middle = plate[1:-1, 1:-1]
    new = (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]) / 4
    change = float(abs(new - middle).max())
    middle[...] = new
    return change


def solve(me, size):
    """Relax a square plate of `size` rows, 100 degrees at its upper edge, until all stop."""
    comm = me.comm  # of the solvers alone; the code may as well split its own
    rows = len(np.array_split(np.arange(size), comm.size)[comm.rank])
    plate = np.zeros((rows + 2, size + 2))
    if comm.rank == 0:
        plate[0] = 100.0
    monitor = me.clients["monitor"]
    step = 0
    while not me.agree_stop():
        exchange_halos(comm, plate)
        change = relax(plate)
        step += 1
        if step % EVERY == 0:
            monitor.futures.hear(step, change)
        mpiml.poll()
    middle = comm.reduce(plate[1:-1, size // 2].sum())
    if me.index == 0:
        degrees = middle / size
        print(f"{step} steps on {comm.size} ranks; the middle column has {degrees:.1f} degrees")


def build(solvers):
    program = mpiml.Program("halo")
    monitor = program.add_node(mpiml.ServiceNode(Monitor, solvers), label="monitor")
    program.add_node(mpiml.PyNode(solve, monitor, 0), label="solver", replicas=solvers)
    return program


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=32, help="rows of the plate")
    size = parser.parse_args().size
    comm = MPI.COMM_WORLD
    program = build(comm.size - 1)
    if comm.rank == comm.size - 1:
        mpiml.launch(program, comm)
    else:
        with mpiml.attach(program, comm, label="solver") as me:
            solve(me, size)
