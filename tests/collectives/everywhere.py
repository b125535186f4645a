"""Runs a body as every member of a collective: nodes of a role, or the ranks of mpiexec."""

import pytest

import mpiml

__all__ = ["everywhere", "modes"]

modes = pytest.mark.parametrize(
    "mode", [1, 2, 3, 4, pytest.param("mpi", marks=pytest.mark.mpi(min_size=2))]
)


def everywhere(mode, body):
    """Call ``body(comm)`` on all members: so many threads, or all ranks.

    Asserts stand in the body: what it raises on one member fails the test on all.
    """
    if mode == "mpi":
        from mpi4py import MPI

        error = None
        try:
            body(MPI.COMM_WORLD)
        except Exception as caught:
            error = caught
        failed = MPI.COMM_WORLD.allgather(error is not None)
        if error is not None:
            raise error
        assert not any(failed), f"failed on the ranks {[i for i, f in enumerate(failed) if f]}"
        return
    program = mpiml.Program("everywhere")
    program.add_node(mpiml.PyNode(body, None), label="member", replicas=mode)
    mpiml.launch(program)
