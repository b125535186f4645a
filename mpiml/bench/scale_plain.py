"""What ``mpiml bench scale`` compares with: plain mpi4py that makes the same communicators.

Run as a script. With an argument each rank also says how much memory it holds.
"""

import sys

from mpiml.bench.scale_memory import MARK, held

__all__ = ["main"]


def main(tell: bool) -> None:
    """Start as mpi4py does, make communicators, meet. Collective over COMM_WORLD."""
    import numpy as np  # noqa: F401 - its import counts
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    world.Split(0 if world.rank else MPI.UNDEFINED, world.rank)
    world.Split_type(MPI.COMM_TYPE_SHARED)
    world.Barrier()
    if tell:
        sys.stdout.write(f"{MARK} {' '.join(map(str, held()))}\n")
        sys.stdout.flush()
        world.Barrier()


if __name__ == "__main__":
    main(len(sys.argv) > 1)
