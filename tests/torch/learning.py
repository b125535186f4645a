"""One role of learners, in threads or on the ranks of mpiexec; models and batches for them."""

import itertools

import pytest
import torch

import mpiml

__all__ = ["batch", "each", "learn", "net"]

#: In threads a test runs with 2 learners and with 4, on ranks with as many as there are.
each = pytest.mark.parametrize(
    "mode", ["threads-2", "threads-4", pytest.param("mpi", marks=pytest.mark.mpi(min_size=2))]
)

torch.set_num_threads(1)  # learners share the cores


def learn(mode, body):
    """Run `body` as a role of learners; return what each of them returns, None but on rank 0."""
    program = mpiml.Program("learn")
    count = mpiml.FILL if mode == "mpi" else int(mode.rpartition("-")[2])
    program.add_node(mpiml.PyNode(body), label="learner", replicas=count)
    comm = None
    if mode == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    result = mpiml.launch(program, comm=comm)
    return result["learner"] if comm is None or comm.rank == 0 else None


def generator(seed):
    """Return a generator of its own: torch's global one is shared by threads."""
    return torch.Generator().manual_seed(seed)


def batch(seed, rows, columns=6):
    """Return numbers from -1 to 1, the same wherever the seed is."""
    return torch.rand((rows, columns), generator=generator(seed)) * 2 - 1


def net(seed=0, sizes=(6, 16, 16, 2), dtype=torch.float32):
    """Return a small network whose values depend on the seed only."""
    layers = []
    for number, (a, b) in enumerate(itertools.pairwise(sizes)):
        layer = torch.nn.Linear(a, b)
        with torch.no_grad():
            layer.weight.copy_(batch(100 * seed + number, b, a) * 0.5)
            layer.bias.copy_(batch(100 * seed + number + 50, 1, b)[0] * 0.5)
        layers += [layer, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).to(dtype)
