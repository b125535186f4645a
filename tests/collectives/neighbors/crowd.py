"""Runs a body as every member, in each way in which members may live."""

import pytest

import mpiml
from tests.collectives.everywhere import everywhere

__all__ = ["places", "played"]

mpi = pytest.mark.mpi(min_size=2)
places = pytest.mark.parametrize(
    "place",
    [
        1,
        2,
        3,
        4,
        pytest.param("ranks", marks=mpi),
        pytest.param("nodes on ranks", marks=mpi),
        pytest.param("two on each of two ranks", marks=mpi),
        pytest.param("two on each of two hosts", marks=mpi),
        pytest.param("hosts of one rank", marks=mpi),
        pytest.param("hosts of two ranks", marks=mpi),
    ],
)


def played(place, body, monkeypatch=None):
    """Call ``body(comm)`` on all members; asserts stand in it, and fail the test on all ranks.

    Parameters
    ----------
    place : int or str
        One of `places`; a number: so many threads.
    monkeypatch : pytest.MonkeyPatch
        Pretends the hosts.
    """
    if str(place).startswith("hosts"):
        monkeypatch.setenv("MPIML_HOST_SIZE", "1" if "one" in place else "2")
        place = "ranks"
        body = _apart(body)
    if isinstance(place, int) or place == "ranks":
        everywhere("mpi" if place == "ranks" else place, body)
        return
    if "two hosts" in place:
        monkeypatch.setenv("MPIML_HOST_SIZE", "1")
    from mpi4py import MPI

    world, two = MPI.COMM_WORLD, "two" in place
    here = world.rank < 2 or not two
    comm = world.Split(0 if here else MPI.UNDEFINED, world.rank)
    if not here:
        return
    program = mpiml.Program("played")
    replicas = 4 if two else comm.size
    program.add_node(mpiml.PyNode(body, None), label="member", replicas=replicas)
    mpiml.launch(program, comm)
    comm.Free()


def _apart(body):
    """A team is made once for a communicator: one of its own sees the pretended hosts."""

    def run(comm):
        own = comm.Dup()
        body(own)
        own.Free()

    return run
