"""A program inside a plain MPI code: half of the ranks run it, the other half computes.

$ mpiexec -n 4 python examples/inside_mpi.py
sampler: pi is about 3.14... after ... points
solver: the residual is ... after ... sweeps
all 4 ranks are back in MPI

`mpiml.launch` stays on the communicator it is given and leaves MPI usable.
"""

import numpy as np
from mpi4py import MPI

import mpiml


class Tally:
    def __init__(self):
        self.inside = self.points = 0

    def add(self, inside, points):
        self.inside += inside
        self.points += points

    def estimate(self):
        return 4 * self.inside / self.points, self.points


def sample(tally, rounds, size=10_000):
    rng = mpiml.context().rng
    for _ in range(rounds):
        points = rng.random((size, 2))
        tally.add(int(((points**2).sum(axis=1) <= 1).sum()), size)
    return tally.estimate()


def build(rounds: int = 100) -> mpiml.Program:
    program = mpiml.Program("inside MPI")
    tally = program.add_node(mpiml.ServiceNode(Tally), label="tally")
    program.add_node(mpiml.PyNode(sample, tally, rounds), label="sampler", replicas=mpiml.FILL)
    return program


def solve(comm, sweeps=2000, size=32):
    """Relax Laplace's equation on a rod that is 0 at one end and 1 at the other."""
    left = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    right = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    rod = np.zeros(size + 2)  # the first and the last value belong to the neighbours
    if right == MPI.PROC_NULL:
        rod[-1] = 1.0
    for _ in range(sweeps):
        comm.Sendrecv(rod[1:2], left, recvbuf=rod[-1:], source=right)
        comm.Sendrecv(rod[-2:-1], right, recvbuf=rod[:1], source=left)
        change = (rod[:-2] + rod[2:]) / 2 - rod[1:-1]  # (size,)
        rod[1:-1] += change
    return comm.allreduce(np.abs(change).max(), op=MPI.MAX), sweeps


def main():
    world = MPI.COMM_WORLD
    half = world.Split(color=world.rank % 2, key=world.rank)
    if world.rank % 2 == 0:
        result = mpiml.launch(build(), comm=half)
        text = ""
        if half.rank == 0:
            pi, points = max(result["sampler"], key=lambda reached: reached[1])
            text = f"sampler: pi is about {pi:.3f} after {points} points"
    else:
        residual, sweeps = solve(half)
        text = f"solver: the residual is {residual:.1e} after {sweeps} sweeps"
    lines = world.gather(text)
    half.Free()
    if world.rank == 0:
        print(*lines[:2], f"all {world.size} ranks are back in MPI", sep="\n")


if __name__ == "__main__":
    main()
