"""How many threads the libraries below NumPy start on a rank.

They read ``OMP_NUM_THREADS`` once, when they are loaded, so `share_cores` comes before NumPy,
when MPI has not told yet who else is on the host: it takes the launcher's word, and where ranks
are bound to different cores errs on the side of fewer. `settle_cores` corrects that later, for
what is loaded later, and for what is loaded already where threadpoolctl is installed.
"""

import os
from collections.abc import MutableMapping

from mpiml.config import Config
from mpiml.hosts import cores_available, local_facts

__all__ = ["settle_cores", "share_cores"]

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
