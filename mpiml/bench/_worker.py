"""What the ranks of a benchmark run: ``python -m mpiml.bench._worker module:function PLAN OUT``."""

import json
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

__all__ = ["main"]


def main(argv: Sequence[str]) -> None:
    """Run a scenario and write what it found on rank 0.

    Collective over COMM_WORLD; a rank that raises ends them all.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    module, _, function = argv[0].partition(":")
    try:
        scenario = getattr(import_module(f"mpiml.bench.{module}"), function)
        found = scenario(comm, json.loads(argv[1]))
        if comm.rank == 0:
            library = MPI.Get_library_version().strip("\0\n ").splitlines()[0]
            found["library"] = library.split(", package")[0]
            Path(argv[2]).write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)


if __name__ == "__main__":
    main(sys.argv[1:])
