"""Who attaches to a program from outside, and where that puts the nodes they are: pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from mpiml.errors import PlacementError, UsageError
from mpiml.program import Program
from mpiml.roles.placement import Plan
from mpiml.settings import FILL, Placement

__all__ = ["Crowd", "keepers", "ranges", "widened"]


class Crowd:
    """The ranks of a communicator, those that run Python and the others, called guests.

    Parameters
    ----------
    labels : sequence of str
        Of each guest.
    guests : sequence of int
        The rank of each guest in the communicator.
    pythons : sequence of int
        The ranks of the others.
    """

    def __init__(
        self, labels: Sequence[str], guests: Sequence[int], pythons: Sequence[int]
    ) -> None:
        self.guests = guests
        self.pythons = pythons
        #: by label its guests, in the order of their nodes
        self.by_label: dict[str, list[int]] = {}
        for guest, label in enumerate(labels):
            self.by_label.setdefault(label, []).append(guest)

    def keeper(self, guest: int) -> int:
        """Return the number of the Python rank that speaks to a guest for the program."""
        return guest * len(self.pythons) // len(self.guests)

    @property
    def told(self) -> str:
        """How many ranks attach with which label, for messages."""
        found = [f"{len(some)} as {label!r}" for label, some in self.by_label.items()]
        return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")


def keepers(program: Program, crowd: Crowd | None) -> dict[int, tuple[int, ...]]:
    """Return, for each unit of nodes outside Python, the Python ranks that speak for them.

    Raises
    ------
    PlacementError
        There are no guests of such a label, or more or fewer than it has replicas; or there are
        guests of a label that no such node has.
    UsageError
        Such a node shares its label or its rank with nodes in Python.
    """
    found: dict[int, tuple[int, ...]] = {}
    _refuse_strange(program, crowd)
    for position, unit in enumerate(program.units):
        nodes = [m.node for role in unit.roles for m in program.roles[role].members]
        if not any(node.outside for node in nodes):
            continue
        where = f"Program {program.name!r}, node {unit.label!r}"
        if len(nodes) > 1 or unit.placement != Placement():
            raise UsageError(
                f"{where}: an ExternalNode stands alone under its label, and where its ranks were "
                "started: expected no placement=, no Colocation and no group"
            )
        guests = [] if crowd is None else crowd.by_label.get(unit.label, [])
        if not guests or unit.replicas not in (FILL, len(guests)):
            wanted = "ranks" if unit.replicas == FILL else f"{unit.replicas} ranks"
            raise PlacementError(
                f"{where}: expected {wanted} that call mpiml_attach with this label, got "
                f"{len(guests)}{_cure(unit.replicas, crowd)}"
            )
        assert crowd is not None
        found[position] = tuple(map(crowd.keeper, guests))
    return found


def _cure(replicas: int, crowd: Crowd | None) -> str:
    if crowd is None:
        return (
            ". Start both programs together: mpirun -n 4 ./solver : -n 2 python -m mpiml.run "
            "trainer.py"
        )
    n = 4 if replicas == FILL else replicas
    also = "" if replicas == FILL else ", or give the node replicas=mpiml.FILL"
    return (
        f" (there attach {crowd.told}). Start so many ranks of the solver, mpirun -n {n} ./solver : "
        f"...{also}"
    )


def _refuse_strange(program: Program, crowd: Crowd | None) -> None:
    """Refuse guests of a label that no node outside Python has: mostly it is misspelt."""
    labels = [
        unit.label
        for unit in program.units
        if any(m.node.outside for role in unit.roles for m in program.roles[role].members)
    ]
    strange = [] if crowd is None else sorted(set(crowd.by_label) - set(labels))
    if crowd is None or not strange:
        return
    cure = "Attach with one of these, or add a node" if labels else "Add one"
    raise PlacementError(
        f"Program {program.name!r}: ranks attach as {strange[0]!r}, but the program has no "
        f"ExternalNode of this label; it has {', '.join(map(repr, labels)) or 'none'} (there attach "
        f"{crowd.told}). {cure}: program.add_node(mpiml.ExternalNode(...), label={strange[0]!r}, "
        "replicas=mpiml.FILL)"
    )


def widened(plan: Plan, inside: Sequence[int], outside: dict[int, tuple[int, ...]]) -> Plan:
    """Return the plan of all units, from that of those inside Python."""
    ranks = dict(outside)
    ranks.update({unit: plan.ranks[i] for i, unit in enumerate(inside)})
    placed = tuple(ranks[unit] for unit in range(len(ranks)))
    gpus = {(inside[unit], replica): ids for (unit, replica), ids in plan.gpus.items()}
    return Plan(tuple(map(len, placed)), placed, plan.spares, gpus, plan.notes)


def ranges(numbers: Iterable[Any]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges, first and last of each."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [(first, last) for first, last in found]
