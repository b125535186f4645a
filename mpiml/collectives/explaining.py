"""`explain`: which way an allreduce takes, in words."""

from typing import Any

from mpiml.collectives.fusion import messages
from mpiml.collectives.labels import Label
from mpiml.collectives.loose import loose_of
from mpiml.collectives.members import team_of
from mpiml.collectives.ops import op_name
from mpiml.collectives.regions import specs_of
from mpiml.collectives.trees import flatten

__all__ = ["explain"]


def explain(x: Any, op: Any = "sum", comm: Any = None) -> str:
    """Say how ``allreduce(x, op, comm)`` would work, and by which rule.

    Collective over the members.

    Parameters
    ----------
    x : array or tree of arrays
        As for `allreduce`, in host memory.
    op, comm
        As for `allreduce`.

    Returns
    -------
    str
        One line: members and hosts, messages after small arrays were joined, the way.
    """
    known = op_name(op, "explain")
    leaves, _, paths = flatten(x, "explain")
    specs = specs_of(leaves, paths)
    team = team_of(comm, "explain")
    sizes = [int(leaf.nbytes) for leaf in leaves]
    groups = messages([spec.dtype_name for spec in specs], sizes)
    loose = loose_of(team, Label("explain"))
    fused = sum(len(group) > 1 for group in groups)
    return (
        f"allreduce(op={known!r}) of {_count(len(leaves), 'array')}, {sum(sizes):,} bytes, among "
        f"{_count(team.size, 'member')} on {_count(len(set(team.hosts)), 'host')}: "
        f"{_count(len(groups), 'message')} ({fused} of several arrays), {loose.way}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
