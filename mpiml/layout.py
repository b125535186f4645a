"""Where a program's nodes go, and which communicators that makes: pure, the same everywhere."""

from collections.abc import Sequence
from typing import Any

from mpiml.errors import PlacementError, UsageError
from mpiml.external.crowd import Crowd, keepers, widened
from mpiml.hosts import Facts, Hosts
from mpiml.program import Program
from mpiml.roles.placement import Ask, Plan, place
from mpiml.settings import FILL
from mpiml.threads import MULTIPLE, name

__all__ = ["check_levels", "lay_out", "split_layers"]


def lay_out(
    program: Program,
    facts: Sequence[Facts],
    attached: Sequence[int | None],
    threads: int | None = None,
    host_size: int | None = None,
    crowd: Crowd | None = None,
) -> tuple[Plan, Hosts]:
    """Place the units of a program; ranks whose own code is a body keep that one.

    Local: no MPI, the same on every rank.

    Parameters
    ----------
    program
        The program, checked.
    facts
        What each rank says of its host, in rank order.
    attached
        For each rank the index of the role whose body its own code is, or None.
    threads
        With one rank: replicas of the role that has ``FILL``.
    host_size
        For tests: pretend that a host has at most so many ranks.
    crowd
        Which ranks of other programs attach; a node that is one of them is placed on the rank
        that speaks to it for the program.

    Raises
    ------
    PlacementError
        The program does not fit the ranks.
    UsageError
        More or fewer ranks attach to a role than it has replicas.
    """
    hosts = Hosts(facts, host_size)
    outside = keepers(program, crowd)
    units = [(i, unit) for i, unit in enumerate(program.units) if i not in outside]
    asks = [
        Ask(
            unit.label,
            None if unit.replicas is FILL else unit.replicas,
            unit.placement,
            len(unit.roles),
            tuple(program.roles[i].label for i in unit.roles),
            any(m.node.spread for i in unit.roles for m in program.roles[i].members),
        )
        for _, unit in units
    ]
    inside = [i for i, _ in units]
    held: dict[int, list[int]] = {}
    for rank, role in enumerate(attached):
        if role is not None:
            held.setdefault(inside.index(program.roles[role].unit), []).append(rank)
    try:
        if not held or (hosts.size == 1 and _fits(asks, held)):
            plan = _placed(asks, hosts, facts, threads)
        else:
            plan = _around(asks, held, facts, host_size)
    except PlacementError as error:
        if crowd is None:
            raise
        raise PlacementError(
            f"{error} These are the ranks that run Python; beside them attach {crowd.told}."
        ) from None
    return (widened(plan, inside, outside) if outside else plan), hosts


def _placed(
    asks: Sequence[Ask], hosts: Hosts, facts: Sequence[Facts], threads: int | None = None
) -> Plan:
    """Place, and say of GPUs that are missing why they are."""
    try:
        return place(asks, hosts, threads=threads)
    except PlacementError as error:
        from mpiml.gpus import why_too_few

        why = why_too_few(facts) if "GPU" in str(error) or "num_gpus" in str(error) else ""
        if not why:
            raise
        raise PlacementError(f"{error} {why}") from None


def _fits(asks: Sequence[Ask], held: dict[int, list[int]]) -> bool:
    """Tell whether one rank, which holds every node anyhow, may attach to what it does."""
    return all(asks[unit].replicas in (None, 1) for unit in held)


def _around(
    asks: Sequence[Ask],
    held: dict[int, list[int]],
    facts: Sequence[Facts],
    host_size: int | None,
) -> Plan:
    """Place units around those whose ranks are given."""
    for unit, ranks in held.items():
        wanted = asks[unit].replicas
        if wanted is not None and wanted != len(ranks):
            raise UsageError(
                f"mpiml.attach(label={asks[unit].label!r}): expected {wanted} ranks to attach, "
                f"one for each replica, got {len(ranks)} (ranks "
                f"{', '.join(map(str, ranks))}). Let the others call mpiml.launch."
            )
    taken = {rank for ranks in held.values() for rank in ranks}
    free = [rank for rank in range(len(facts)) if rank not in taken]
    rest = [i for i in range(len(asks)) if i not in held]
    if bool(rest) != bool(free):
        raise UsageError(
            f"mpiml.attach: expected ranks for {', '.join(asks[i].label for i in rest)} too, but "
            f"all {len(facts)} attach. Let some call mpiml.launch."
            if rest
            else f"mpiml.attach: expected all {len(facts)} ranks to attach, since every role is "
            f"attached to, but {len(free)} called mpiml.launch. Use a smaller communicator."
        )
    placed: list[tuple[int, ...]] = [tuple(held.get(i, ())) for i in range(len(asks))]
    gpus: dict[tuple[int, int], tuple[int, ...]] = {}
    notes: tuple[str, ...] = ()
    if rest:
        there = [facts[rank] for rank in free]
        plan = _placed([asks[i] for i in rest], Hosts(there, host_size), there)
        for position, unit in enumerate(rest):
            placed[unit] = tuple(free[r] for r in plan.ranks[position])
        gpus = {(rest[unit], replica): ids for (unit, replica), ids in plan.gpus.items()}
        notes = plan.notes
    return Plan(tuple(map(len, placed)), tuple(placed), (), gpus, notes)


def split_layers(
    vertices: Sequence[Any], ranks: Sequence[int], me: int
) -> list[tuple[int, int, int, bool]]:
    """Return the splits that make a communicator for each role that several ranks hold.

    Local. Roles that share no rank share a split, so one is enough for most programs. It has
    one rank for each replica; where replicas share ranks, one for each of these, in the order
    of the first replica there. A role on a single rank has one only if it has one replica.

    Returns
    -------
    list of (role, colour, key, folded)
        What rank `me` gives to each split; a role and colour of -1 takes no part. `folded`:
        replicas of the role share ranks.
    """
    replicas: dict[int, int] = {}
    members: dict[int, dict[int, None]] = {}  # by role its ranks, each once, in their order
    for vertex in vertices:
        if vertex.node.outside:
            continue
        replicas[vertex.role_index] = replicas.get(vertex.role_index, 0) + 1
        members.setdefault(vertex.role_index, {})[ranks[vertex.id]] = None
    layers: list[tuple[set[int], list[int]]] = []
    for role, held in sorted(members.items()):
        if len(held) == 1 < replicas[role]:
            continue  # threads of one process need none
        for taken, roles in layers:
            if taken.isdisjoint(held):
                taken.update(held)
                roles.append(role)
                break
        else:
            layers.append((set(held), [role]))
    splits = []
    for _, roles in layers:
        mine = next((role for role in roles if me in members[role]), -1)
        if mine < 0:
            splits.append((-1, -1, 0, False))
        else:
            held = members[mine]
            key = next(place for place, rank in enumerate(held) if rank == me)
            splits.append((mine, mine, key, len(held) < replicas[mine]))
    return splits


def check_levels(
    vertices: Sequence[Any], ranks: Sequence[int], levels: Sequence[int], hosts: Hosts
) -> None:
    """Refuse a role whose ranks run MPI with full thread support here and without it there.

    Local, the same on every rank. Where one thread calls MPI, a role agrees where it stops and
    makes its collectives in another way.

    Parameters
    ----------
    vertices, ranks
        The nodes, and the rank of each.
    levels
        Thread level of each rank, as in `mpiml.threads`.
    hosts
        Where ranks are.

    Raises
    ------
    UsageError
        The first such role.
    """
    full = [level == MULTIPLE for level in levels]
    if all(full) or not any(full):
        return
    first: dict[int, int] = {}  # by role, the first of its ranks
    for vertex in vertices:
        if vertex.node.outside:
            continue
        rank = ranks[vertex.id]
        one = first.setdefault(vertex.role_index, rank)
        if full[rank] != full[one]:
            said = " and ".join(
                f"{name(levels[r])} on rank {r} ({hosts.name_of(r)})"
                for r in sorted((one, rank))
            )
            raise UsageError(
                f"role {vertex.role!r}: expected MPI_THREAD_MULTIPLE on all its ranks or on none, "
                f"got {said}. Ask for the same level in each program that calls MPI_Init_thread, "
                "as by MPI4PY_RC_THREAD_LEVEL, or place the role on ranks of one level."
            )
