"""Which MPI a library or a launcher is, and which ways of being started it knows, from its text.

The text is that of ``MPI_Get_library_version``, which may be asked before MPI is initialised, or
that of ``mpiexec --version``.
"""

from typing import NamedTuple

__all__ = [
    "TITLES",
    "Mpi",
    "family",
    "identify",
    "loses_between_hosts",
    "speaks_pmi",
    "speaks_pmix",
    "title",
]

TITLES = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}
_MARKS = {  # what stands before the version
    "(Open MPI)": "openmpi",
    "(OpenRTE)": "openmpi",
    "Open MPI v": "openmpi",
    "Intel(R) MPI Library": "intel",
    "MPICH version": "mpich",  # Cray's
    "MPICH Version": "mpich",
    "HYDRA build details": "mpich",
}
_DIGITS = "0123456789"


class Mpi(NamedTuple):
    """An MPI implementation: ``openmpi``, ``mpich`` or ``intel``, and its version, if it has one."""

    kind: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{TITLES[self.kind]} {'.'.join(map(str, self.version))}".rstrip()


def identify(text: str) -> Mpi | None:
    """Tell the MPI from what ``mpiexec --version`` or MPI_Get_library_version says.

    Local: no MPI.

    Returns
    -------
    Mpi or None
        None where the text is of none of the three families.
    """
    for mark, kind in _MARKS.items():
        _, found, tail = text.partition(mark)
        if found:
            return Mpi(kind, _version(tail.lstrip(": \t\n").partition("\n")[0]))
    return None


def _version(line: str) -> tuple[int, ...]:
    """Return the first version on a line, as in ``for Linux* OS, Version 2021.17 Build``."""
    word = line.lstrip("".join(set(line) - set(_DIGITS)))
    end = next((i for i, c in enumerate(word) if c not in _DIGITS + "."), len(word))
    return tuple(int(part) for part in word[:end].split(".") if part)


def family(text: str) -> str | None:
    """Return ``openmpi``, ``mpich`` or ``intel``; None where it is none of them. Local."""
    mpi = identify(text)
    return None if mpi is None else mpi.kind


def title(text: str) -> str:
    """Return name and version of a library, as short as they can be said. Local."""
    line = text.split("\n")[0].split(",")[0].strip("\0 ")
    if "CRAY MPICH" in line:
        line = line.partition(":")[
            2
        ]  # of "MPI VERSION    : CRAY MPICH version 8.1.29.21 (...)"
    return " ".join(line.replace("MPICH Version:", "MPICH").split()) or "an unknown MPI"


def speaks_pmix(text: str) -> bool:
    """Tell whether a library may be started by a PMIx server, as Open MPI's mpirun is. Local.

    MPICH says how it was configured; one that was configured without PMIx ends each process
    that finds itself under such a server, before anybody can say why.
    """
    return family(text) != "mpich" or "--with-pmix" in text


def loses_between_hosts(text: str) -> bool:
    """Tell whether a library has been seen to lose messages received from any source. Local.

    MPICH 5.0 by UCX does, where a host has several ranks and others are elsewhere.
    """
    mpi = identify(text)
    if mpi is None or mpi.kind != "mpich":
        return False
    return mpi.version[:2] == (5, 0) and "ch4:ucx" in text


def speaks_pmi(text: str) -> bool:
    """Tell whether a library may be started by PMI-1 or PMI-2, which Open MPI 5 dropped. Local."""
    mpi = identify(text)
    return mpi is None or mpi.kind != "openmpi" or () < mpi.version < (5,)
