"""Which MPI a library is, and which ways of being started it knows, from what it says of itself.

The text is that of ``MPI_Get_library_version``, which may be asked before MPI is initialised.
"""

__all__ = ["TITLES", "family", "loses_between_hosts", "speaks_pmi", "speaks_pmix", "title"]

TITLES = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}


def family(text: str) -> str | None:
    """Return ``openmpi``, ``mpich`` or ``intel``; None where it is none of them. Local."""
    if text.startswith("Open MPI"):
        return "openmpi"
    if text.startswith("Intel(R) MPI"):
        return "intel"
    return "mpich" if "MPICH" in text[:200] else None


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
    return text.startswith("MPICH") and " 5.0" in text.split("\n")[0] and "ch4:ucx" in text


def speaks_pmi(text: str) -> bool:
    """Tell whether a library may be started by PMI-1 or PMI-2, which Open MPI 5 dropped. Local."""
    if family(text) != "openmpi":
        return True
    major = text.removeprefix("Open MPI v").partition(".")[0]
    return major.isdigit() and int(major) < 5
