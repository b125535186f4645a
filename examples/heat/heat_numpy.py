"""The heat equation on the unit square in NumPy: the reference for heat.c and heat.f90.

Ranks share the rows of the grid and exchange those at their edges. It does what the others do,
number for number; as a node in Python it is given what they ask mpiml for.
"""

import numpy as np
from mpi4py import MPI

import mpiml

OMEGA = 8 * np.pi  # of the exact solution, 1/s
RATIO = 0.2  # dt / h**2; the scheme is stable up to 0.25


def exact(x, y, t):
    """Two damped waves that cross: a solution of u_t = u_xx + u_yy, of any shape."""
    k = np.sqrt(OMEGA / 2)
    p = np.cos(0.5) * x + np.sin(0.5) * y
    q = np.cos(2.2) * x + np.sin(2.2) * y + 0.6
    return np.exp(-k * p) * np.cos(OMEGA * t - k * p) + 0.6 * np.exp(-k * q) * np.cos(
        OMEGA * t - k * q
    )


def solve(fields, surrogate):
    """Run the simulation; the boundary is known for `learn` steps, and then asked for."""
    comm = mpiml.context().comm
    cells, steps, learn, every = (int(n) for n in surrogate.settings())
    h = 1 / (cells + 1)
    dt = RATIO * h * h
    first, last = (cells * r // comm.size for r in (comm.rank, comm.rank + 1))
    up = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    down = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL

    x = np.arange(first, last + 2) * h  # (rows + 2,): one more at each edge
    y = np.arange(cells + 2) * h
    i, j = np.indices((len(x), len(y)))
    mine = slice(0 if up == MPI.PROC_NULL else 1, len(x) if down == MPI.PROC_NULL else -1)
    edge = np.zeros(i.shape, bool)  # points of the boundary
    edge[mine, 0] = edge[mine, -1] = True
    edge[0] |= up == MPI.PROC_NULL
    edge[-1] |= down == MPI.PROC_NULL
    i, j = i[edge], j[edge]
    ahead = np.empty((every, len(i), 3))  # points of the next steps: x, y, t
    ahead[:, :, 0], ahead[:, :, 1] = x[i], y[j]

    u = exact(x[:, None], y, 0.0)  # (rows + 2, cells + 2)
    for step in range(1, steps + 1):
        comm.Sendrecv(u[1], up, recvbuf=u[-1], source=down)
        comm.Sendrecv(u[-2], down, recvbuf=u[0], source=up)
        around = (u[:-2, 1:-1] + u[2:, 1:-1]) + (u[1:-1, :-2] + u[1:-1, 2:])
        u[1:-1, 1:-1] += RATIO * (around - 4 * u[1:-1, 1:-1])
        if step <= learn:
            u[i, j] = exact(x[i], y[j], step * dt)
        else:
            which = (step - learn - 1) % every
            if which == 0:
                ahead[:, :, 2] = (np.arange(step, step + every) * dt)[:, None]
                values = surrogate.predict(ahead.reshape(-1, 3)).reshape(every, -1)
            u[i, j] = values[which]
        if step % every == 0:
            fields.put(u[mine])
