"""The program whose memory ``mpiml bench startup`` looks at: both ranks say what they hold.

Run as a script, it is the other side: a rank of plain mpi4py that says the same.
"""

import sys
from typing import Any

__all__ = ["MARK", "Holder", "build", "look", "resident"]

MARK = "resident bytes:"


def resident() -> tuple[int, int]:
    """Return the resident memory of this process in bytes: all of it, and what is not a file's."""
    sizes = {"Rss:": 0, "Anonymous:": 0}
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            words = line.split()
            if words[0] in sizes:
                sizes[words[0]] = int(words[1]) << 10
    return sizes["Rss:"], sizes["Anonymous:"]


class Holder:
    """A service that says how much memory its process holds."""

    def held(self) -> tuple[int, int]:
        """Return resident and anonymous bytes."""
        return resident()


def look(holder: Holder) -> None:
    """Print the memory of both processes, after a few calls."""
    for _ in range(100):
        holder.held()
    for rss, anonymous in (holder.held(), resident()):
        print(MARK, rss, anonymous)


def build() -> Any:
    """Return the graph: a service and who asks it. The other side does not import mpiml."""
    import mpiml

    program = mpiml.Program("resident")
    holder = program.add_node(mpiml.ServiceNode(Holder), label="holder")
    program.add_node(mpiml.PyNode(look, holder), label="asker")
    return program


if __name__ == "__main__":
    import numpy as np  # noqa: F401 - its memory counts
    from mpi4py import MPI

    sys.stdout.write(f"{MARK} {' '.join(map(str, resident()))}\n")
    sys.stdout.flush()
    MPI.COMM_WORLD.Barrier()
