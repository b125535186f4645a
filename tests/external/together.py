"""Runs a program of Python ranks and guests on the ranks of mpiexec, some as these, some as those.

    def solver(guest): ...
    result = together(build, solver, guests={0: "solver"})

The guests are `tests.external.guest.Guest`. What is returned: on a guest what `solver` returns, on
Python ranks the `Result`; errors are raised where they come up.
"""

import mpiml
from tests.external.guest import Guest

__all__ = ["caught", "together"]


def together(program, solver, guests, comm=None, **settings):
    """Run it; `program` builds the program on Python ranks. Ranks of neither kind do nothing.

    Parameters
    ----------
    guests
        Label of each guest, by its rank.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD if comm is None else comm
    label = guests.get(comm.rank)
    if label is None:
        return mpiml.launch(program(), comm, **settings)
    guest = Guest(comm, label)
    found = solver(guest)
    guest.leave()
    return found


def caught(function, *args, **kwargs):
    """Return what a call raises; fails where it returns."""
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised, got {value!r}")
