"""How many threads the libraries below NumPy start on a rank.

They read ``OMP_NUM_THREADS`` once, when they are loaded, so `share_cores` comes before NumPy,
when MPI has not told yet who else is on the host: it takes the launcher's word, and where ranks
are bound to different cores errs on the side of fewer. `settle_cores` corrects that later, for
what is loaded later, and for what is loaded already where threadpoolctl is installed.
"""

import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import TypeVar

from mpiml.config import Config
from mpiml.hosts import Facts, cores_available, local_facts
from mpiml.machine import affinity, assume, read_text

__all__ = ["keeping_cores", "settle_cores", "share_cores", "start_notes"]

T = TypeVar("T")

LOSSY = (
    "this MPICH, by UCX, has been seen to lose messages between hosts that have several ranks, "
    "and a program then stands still. Set MPIR_CVAR_CH4_NETMOD=ofi in the environment of the "
    "ranks; `mpiexec ... python -m mpiml.doctor`, started the same way, tries whether it does."
)
_OPENMP = ("libgomp", "libiomp5", "libomp")

_said: set[str] = set()  # notes, each of which is said once in a process
_ours: list[str] = []  # the value that we set, if the user did not


def share_cores(config: Config, environ: MutableMapping[str, str] | None = None) -> int | None:
    """Set ``OMP_NUM_THREADS`` to the cores of this rank, unless it is set.

    Local: no MPI. Without a launcher all cores belong to this process, and nothing is set.

    Returns
    -------
    int or None
        What was set.
    """
    environ = os.environ if environ is None else environ
    if config.launcher is None or config.omp_set:
        return None
    facts = local_facts(config)
    cores = cores_available(len(facts.cores), facts.quota)
    share = facts.given or max(1, cores // (config.local_size_hint or 1))
    _set(min(share, cores), environ)
    return min(share, cores)


def settle_cores(threads: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Replace what `share_cores` set, now that the table of hosts is known. Local."""
    environ = os.environ if environ is None else environ
    if not _ours or environ.get("OMP_NUM_THREADS") != _ours[0] or _ours[0] == str(threads):
        return
    _set(threads, environ)
    from importlib import import_module

    try:
        import_module("threadpoolctl").threadpool_limits(threads)
    except ImportError:
        return


def _set(threads: int, environ: MutableMapping[str, str]) -> None:
    environ["OMP_NUM_THREADS"] = str(threads)
    _ours[:] = [str(threads)]


def start_notes(facts: Sequence[Facts], library: str, whole: bool) -> list[str]:
    """Return what is said at the start: how ranks are bound, and what their MPI loses. Local.

    Parameters
    ----------
    facts
        Of each rank.
    library
        What the MPI library says of itself.
    whole
        These are all ranks that the launcher started.

    Returns
    -------
    list of str
        Without those of earlier programs in this process.
    """
    from mpiml.binding import binding_notes
    from mpiml.vendors import loses_between_hosts

    config = Config.read_foreign()
    notes = binding_notes(facts, config.launcher, bool(_ours), whole)
    hosts = {(fact.name, fact.machine) for fact in facts}
    if 1 < len(hosts) < len(facts) and config.mpich_netmod != "ofi":
        notes += [LOSSY] if loses_between_hosts(library) else []
    new = [note for note in notes if note not in _said]
    _said.update(new)
    return new


def keeping_cores(load: Callable[[], T], config: Config) -> Callable[[], T]:
    """Wrap `load`, which imports the user's file, so that its imports take no cores away.

    Local. Some builds of OpenMP bind the thread that loads them to one core (``import torch``
    after NumPy has been seen to), and with it every thread that starts later, mpiml's too. The
    mask is put back, and one rank says so. Where the user asks OpenMP to bind, its threads have
    the other cores, and nothing is changed. A file that sets its own mask keeps it.
    """

    def keeping() -> T:
        before = affinity()
        try:
            return load()
        finally:
            now = affinity()
            if now < before:
                _put_back(before, now, config)

    return keeping


def _put_back(before: frozenset[int], now: frozenset[int], config: Config) -> None:
    loaded = read_text("/proc/self/maps") or ""
    library = next((name for name in _OPENMP if name in loaded), None)
    if library is None:
        return
    if config.omp_bind:
        assume(before)
        return
    os.sched_setaffinity(0, before)
    if config.rank_hint in (None, 0):
        cores = "1 core" if len(now) == 1 else f"{len(now)} cores"
        sys.stderr.write(
            f"mpiml: importing the program bound it to {cores} of {len(before)} ({library} does "
            "so in some builds); its mask is put back. OMP_PROC_BIND=true keeps the binding.\n"
        )
