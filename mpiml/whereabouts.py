"""Which ranks an observation is about, and whether they are whole hosts. Pure.

What goes wrong on all ranks of some hosts and on no other is most often the host's: another
file, another folder, another version.
"""

from collections.abc import Collection, Sequence

from mpiml.hosts import Facts
from mpiml.machine import GONE

__all__ = ["only_there", "place_of", "whole_hosts"]

_NAMED = 5  # ranks or hosts that a message lists


def whole_hosts(ranks: Collection[int], names: Sequence[str]) -> list[str]:
    """Return the hosts whose ranks all are among `ranks`, if these are no others. Local.

    Parameters
    ----------
    ranks
        The odd ones.
    names
        Host of each rank.

    Returns
    -------
    list of str
        Empty where a host has ranks of both kinds, and where there is only one host.
    """
    odd = frozenset(ranks)
    hosts = {names[rank] for rank in odd}
    if len(hosts) == len(set(names)):
        return []
    if any(name in hosts and rank not in odd for rank, name in enumerate(names)):
        return []
    return sorted(hosts)


def place_of(ranks: Sequence[int], names: Sequence[str] = ()) -> str:
    """Return ``ranks 2 and 3 (host b)``; the hosts only where they are whole ones. Local."""
    text = f"{'rank' if len(ranks) == 1 else 'ranks'} {_list([str(r) for r in ranks])}"
    hosts = whole_hosts(ranks, names) if names else []
    if not hosts:
        return text
    return f"{text} ({'host' if len(hosts) == 1 else 'hosts'} {_list(hosts)})"


def only_there(failed: Sequence[int], facts: Sequence[Facts], files: bool = True) -> str:
    """Return a sentence on what sets the ranks apart that could not build; "" for all ranks.

    Local.

    Parameters
    ----------
    failed
        Ranks with an error.
    facts
        Of each rank.
    files
        The error may come of a file that is missing there, so that the folder is worth a word.
    """
    size = len(facts)
    if not failed or len(failed) == size:
        return ""
    names = [fact.name for fact in facts]
    text = f"It is so on {place_of(failed, names)} of {size} ranks, not on the others."
    if not files:
        return text
    lost = [rank for rank in failed if facts[rank].folder == GONE]
    usual = {facts[rank].folder for rank in range(size) if rank not in set(failed)}
    if lost:
        return (
            f"{text} The working folder is missing on {place_of(lost, names)}: make it there."
        )
    theirs = {facts[rank].folder for rank in failed}
    hosts = whole_hosts(failed, names)
    if len(usual) == 1 and not usual & theirs and 0 not in usual | theirs:
        tmp = (
            ": srun goes to /tmp where a host has not the folder of the batch script"
            if hosts
            else ""
        )
        return (
            f"{text} They work in another folder than the others{tmp}. Use a folder that all "
            "hosts see."
        )
    if hosts:
        return f"{text} Put the program where all hosts see it, or the same copy on each."
    return text


def _list(words: Sequence[str]) -> str:
    if len(words) > _NAMED:
        return f"{', '.join(words[:_NAMED])} and {len(words) - _NAMED} more"
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
