"""Many ranks' findings as one report: a row for each difference, not a copy for each rank. Pure."""

import re
from collections.abc import Hashable, Mapping, Sequence

from mpiml.binding import binding_notes
from mpiml.doctor.check import Check
from mpiml.gpus import why_too_few
from mpiml.hosts import Facts, Hosts
from mpiml.whereabouts import place_of

__all__ = ["compare", "host_rows", "merge", "ranks_of"]

_VERSION_CURE = "Install the same on each host: one environment that all see, or equal ones."


def merge(
    of_hosts: Mapping[str, Sequence[Check]], ranks: Mapping[str, Sequence[int]]
) -> list[Check]:
    """Return the rows of several hosts as one list: equal rows once, others with their host.

    Local. Rows that are all right count as equal when only their numbers differ; what is
    shown then is the first host's.

    Parameters
    ----------
    of_hosts
        Rows of each host, the first host first.
    ranks
        Ranks of each host.
    """
    names = list(dict.fromkeys(check.name for checks in of_hosts.values() for check in checks))
    merged = []
    for name in names:
        groups: dict[Hashable, tuple[Check, list[str]]] = {}
        for host, checks in of_hosts.items():
            for check in checks:
                if check.name == name:
                    groups.setdefault(_alike(check), (check, []))[1].append(host)
        if all(len(hosts) == len(of_hosts) for _, hosts in groups.values()):
            merged += [check for check, _ in groups.values()]
            continue
        for check, hosts in groups.values():
            where = ranks_of(hosts, ranks)
            merged.append(check._replace(found=f"{where}: {check.found}"))
    return merged


def ranks_of(hosts: Sequence[str], ranks: Mapping[str, Sequence[int]]) -> str:
    """Return ``host b (ranks 2 and 3)``. Local."""
    numbers = sorted(rank for host in hosts for rank in ranks[host])
    title = "host" if len(hosts) == 1 else "hosts"
    more = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    return f"{title} {', '.join(hosts[:4])}{more} ({place_of(numbers)})"


def _alike(check: Check) -> Hashable:
    if check.state != "ok":
        return check
    return check.state, re.sub(r"\d+(\.\d+)?", "#", check.found)


def compare(what: str, values: Sequence[str], names: Sequence[str]) -> Check:
    """Compare a version, or a folder, of all ranks. Local.

    Parameters
    ----------
    what
        Name of the row.
    values
        What each rank has.
    names
        Host of each rank.
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    if len(groups) == 1:
        return Check(what, "ok", values[0])
    usual = max(groups, key=lambda value: len(groups[value]))
    odd = [f"{v} on {place_of(r, names)}" for v, r in groups.items() if v != usual]
    if what == "working folder":
        cure = "Use a folder that all hosts see: srun goes to /tmp where it is missing."
        return Check(what, "warn", f"{', '.join(odd)}; {usual} on the others", cure)
    return Check(what, "fail", f"{', '.join(odd)}; {usual} on the others", _VERSION_CURE)


def host_rows(facts: Sequence[Facts], launcher: str | None, ours: bool) -> list[Check]:
    """Return rows on cores, binding and GPUs of all hosts, from the facts of all ranks. Local.

    Parameters
    ----------
    facts
        Of each rank.
    launcher
        As `Config.launcher` has it.
    ours
        ``OMP_NUM_THREADS`` is not the user's.
    """
    hosts = Hosts(facts)
    kinds: dict[tuple[int, int, int], list[str]] = {}
    for row in hosts.rows:
        kinds.setdefault((len(row.ranks), row.cores, row.gpus), []).append(row.name)
    rows = []
    for (count, cores, gpus), names in kinds.items():
        many = f"host {names[0]}" if len(names) == 1 else f"{len(names)} hosts like {names[0]}"
        found = f"{many}: {count} ranks, {cores} cores, {gpus} GPUs"
        if count > cores:
            cure = (
                "It works: ranks sleep while they wait (Open MPI: OMPI_MCA_mpi_yield_when_idle"
                "=true). Start fewer for speed."
            )
            rows.append(Check("ranks and cores", "note", found, cure))
        else:
            rows.append(Check("ranks and cores", "ok", found))
    for note in binding_notes(facts, launcher, ours):
        found, _, cure = note.partition(". Start ")
        rows.append(Check("binding", "warn", found, f"Start {cure}"))
    if not any(row.name == "binding" for row in rows):
        masks = sorted({len(fact.cores) for fact in facts})
        cores_ = " or ".join(map(str, masks))
        rows.append(Check("binding", "ok", f"{cores_} cores in the mask of a rank"))
    if any(fact.gpus or fact.gpus_hidden for fact in facts):
        why = why_too_few(facts)
        found = "each rank can have a device of its own"
        rows.append(
            Check("gpus of ranks", "warn", why.partition(": ")[0], why.partition(": ")[2])
            if why
            else Check("gpus of ranks", "ok", found)
        )
    return rows
