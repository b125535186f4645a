"""``python -m mpiml.bench NAME``: what mpiml costs on this machine, beside raw mpi4py.

One file per claim: `rpc`, `arrays`, `startup`, `idle`. The process that measures starts the
ranks itself and never loads MPI.
"""

from mpiml.bench.command import main

__all__ = ["main"]
