"""Program and hosts in, the rank of every node out: a pure function.

A program's rows come as `Ask`, one for each role; what comes back is a `Plan`. The same asks
and hosts give the same plan on every rank, so nothing about it has to be sent.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpiml.errors import PlacementError
from mpiml.hosts import Hosts
from mpiml.roles.asks import Ask, read_replicas, read_role, refused
from mpiml.roles.packing import Counts, Item, Role, pack

__all__ = ["Ask", "Plan", "place", "render"]


class Plan(NamedTuple):
    """Where everything goes.

    Attributes
    ----------
    replicas
        Number of units of each ask, FILL resolved.
    ranks
        ``ranks[ask][replica]`` is its rank; never descending within an ask.
    spares
        Ranks that hold nothing.
    gpus
        Device numbers of ``(ask, replica)``, only for those that asked.
    notes
        Lines to tell the user: what was folded.
    """

    replicas: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    spares: tuple[int, ...]
    gpus: dict[tuple[int, int], tuple[int, ...]]
    notes: tuple[str, ...]

    def units(self, rank: int) -> list[tuple[int, int]]:
        """Return the ``(ask, replica)`` pairs of a rank."""
        return [
            (ask, replica)
            for ask, ranks in enumerate(self.ranks)
            for replica, owner in enumerate(ranks)
            if owner == rank
        ]


def place(
    asks: Sequence[Ask], hosts: Hosts, *, spares: int = 0, threads: int | None = None
) -> Plan:
    """Give every unit of a program a rank.

    Local: no MPI.

    Spares, the last ranks, are set aside first. Then units take one rank each, in order where
    that keeps each role that fits on one host together. With fewer ranks than units, roles
    are folded: units of one role share a rank, evenly, the role with most nodes for each of
    its ranks keeps the next rank. When one rank for each role is still too much, the smallest
    roles share a rank, later ones first. A role with GPUs is never folded and never shares,
    unless there is one rank in all, which holds everything. ``spread=True`` is not folded
    below one rank for each host.

    Parameters
    ----------
    asks
        The roles, in the order in which they were added.
    hosts
        The ranks and where they are.
    spares
        Ranks to set aside.
    threads
        Replicas of the FILL role when there is one rank; 1 by default.

    Raises
    ------
    PlacementError
        The program does not fit; says what was wanted, what there is and what to do.
    """
    usable = hosts.size - spares
    if spares < 0 or usable < 1:
        raise PlacementError(
            f"placement: {spares} spares of {hosts.size} ranks leave no rank for the program. "
            f"Start at least {max(spares, 0) + 1} ranks."
        )
    free = tuple(sum(rank < usable for rank in row.ranks) for row in hosts.rows)
    counts = read_replicas(asks, usable, spares, threads)
    roles = [read_role(asks, i, counts, hosts, free) for i in range(len(asks))]
    items = _items(roles, usable, free, hosts)
    ranks = _numbered(items, pack(items, free, hosts), hosts)
    _check_pairs(roles, ranks, hosts)
    return Plan(
        tuple(counts),
        tuple(ranks[role.number] for role in roles),
        tuple(range(usable, hosts.size)),
        _devices(roles, ranks, hosts),
        _notes(roles, items, usable, ranks),
    )


def _items(roles: Sequence[Role], usable: int, free: Counts, hosts: Hosts) -> list[Item]:
    """Decide how many ranks each role takes, and which roles share."""
    if usable == 1:
        return [Item(tuple(roles), 1)]
    if sum(role.least for role in roles) > usable:
        items = _shared(roles, usable)
    elif sum(role.replicas for role in roles) == usable:
        items = [Item((role,), role.replicas) for role in roles]
    else:
        items = _folded(roles, usable, free)
    for item in items:
        role = item.roles[0]
        names = ", ".join(hosts.rows[h].name for h in sorted(role.allowed))
        if item.slots > role.most:
            raise refused(
                role.label,
                f"{item.slots} ranks with {role.wish}",
                f"room for {role.most} on {names}",
                f"Ask for {role.most} replicas, or start more ranks there.",
            )
    over = _overfull(items, free)
    if over:
        names = ", ".join(hosts.rows[h].name for h in sorted(over))
        inside = [item for item in items if item.allowed <= over]
        label = ", ".join(role.label for item in inside for role in item.roles)
        wanted = f"{sum(item.slots for item in inside)} ranks on {names}"
        got = f"{sum(free[h] for h in over)} ranks there"
        raise refused(label, wanted, got, "Start more ranks there, or ask for fewer of these.")
    return items


def _overfull(items: Sequence[Item], free: Counts) -> frozenset[int] | None:
    """Return a set of hosts that more ranks must use than it has."""
    for hosts in sorted({item.allowed for item in items}, key=sorted):
        need = sum(item.slots for item in items if item.allowed <= hosts)
        if need > sum(free[h] for h in hosts):
            return hosts
    return None


def _folded(roles: Sequence[Role], usable: int, free: Counts) -> list[Item]:
    """Start from the fewest ranks for each role; the one with most nodes a rank gets the next."""
    slots = [role.least for role in roles]
    # Roles that go pairwise (with_=) grow together, else replica i would lose its partner.
    left = _grow(roles, slots, usable - sum(slots), free, _pairs(roles))
    left = _grow(roles, slots, left, free, [[i] for i in range(len(roles))])
    if left:
        wishes = "; ".join(f"{role.label}: {role.wish}" for role in roles if role.wish)
        raise PlacementError(
            f"placement: {usable} ranks, but the roles may use only {usable - left} of them "
            f"({wishes}). Loosen a placement, or start fewer ranks elsewhere."
        )
    return [Item((role,), count) for role, count in zip(roles, slots, strict=True)]


def _pairs(roles: Sequence[Role]) -> list[list[int]]:
    """Group the roles that sit beside one another with equally many replicas."""
    group = list(range(len(roles)))
    for i, role in enumerate(roles):
        if role.beside is not None and roles[role.beside].replicas == role.replicas:
            old, new = group[i], group[role.beside]
            group = [new if g == old else g for g in group]
    return [[i for i, g in enumerate(group) if g == name] for name in dict.fromkeys(group)]


def _grow(
    roles: Sequence[Role],
    slots: list[int],
    left: int,
    free: Counts,
    groups: Sequence[Sequence[int]],
) -> int:
    """Hand out ranks to groups of roles while any may take one; return how many are left."""
    growing = list(range(len(groups)))
    while left and growing:

        def load(g: int) -> tuple[float, int]:
            nodes = sum(roles[i].replicas * roles[i].weight for i in groups[g])
            return nodes / sum(slots[i] for i in groups[g]), -g

        best = max(growing, key=load)
        for i in groups[best]:
            slots[i] += 1
        trial = [Item((role,), count) for role, count in zip(roles, slots, strict=True)]
        over = any(slots[i] > roles[i].most for i in groups[best])
        if len(groups[best]) > left or over or _overfull(trial, free):
            for i in groups[best]:
                slots[i] -= 1
            growing.remove(best)
        else:
            left -= len(groups[best])
    return left


def _shared(roles: Sequence[Role], usable: int) -> list[Item]:
    """Put the smallest roles together until there are as many groups as ranks."""
    rigid = [role for role in roles if role.gpus or role.least > 1]
    groups = [[role] for role in roles if not (role.gpus or role.least > 1)]
    room = usable - sum(role.least for role in rigid)
    while len(groups) > max(room, 1) and (pair := _smallest_pair(groups)) is not None:
        kept, gone = pair
        groups[kept] += groups.pop(gone)
    if len(groups) > max(room, 0):
        least = usable - room + len(groups)
        own = ", ".join(f"{role.label} {role.least}" for role in rigid)
        raise PlacementError(
            f"placement: the program needs at least {least} ranks, got {usable}: roles with "
            f"GPUs, spread= or shards keep ranks of their own ({own or 'none'}), and roles on "
            f"different hosts cannot share. Start at least {least} ranks."
        )
    if room < 0:
        own = ", ".join(f"{role.label} {role.least}" for role in rigid)
        raise PlacementError(
            f"placement: roles with GPUs, spread= or shards keep ranks of their own: wanted "
            f"{usable - room} ({own}), got {usable} ranks. Start at least {usable - room} ranks."
        )
    items = [Item(tuple(sorted(group)), 1) for group in groups]
    items += [Item((role,), role.least) for role in rigid]
    return sorted(items, key=lambda item: item.roles[0].number)


def _smallest_pair(groups: Sequence[Sequence[Role]]) -> tuple[int, int] | None:
    """Return the two groups with the fewest nodes that may share, later ones first."""
    sizes = [sum(role.replicas * role.weight for role in group) for group in groups]
    hosts = [frozenset.intersection(*(role.allowed for role in group)) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: (sizes[i], -i))
    for place_b, second in enumerate(order):
        for first in order[:place_b]:
            if hosts[first] & hosts[second]:
                return min(first, second), max(first, second)
    return None


def _numbered(
    items: Sequence[Item], table: Sequence[Counts], hosts: Hosts
) -> dict[int, tuple[int, ...]]:
    """Hand out the ranks of every host in program order; units of a role take them in order."""
    # Spares are the last ranks, so the counts of a host never reach its own.
    waiting = [iter(row.ranks) for row in hosts.rows]
    ranks: dict[int, tuple[int, ...]] = {}
    for item, counts in zip(items, table, strict=True):
        mine = sorted(next(waiting[h]) for h, count in enumerate(counts) for _ in range(count))
        for role in item.roles:
            n = role.replicas
            ranks[role.number] = tuple(mine[k * item.slots // n] for k in range(n))
    return ranks


def _check_pairs(
    roles: Sequence[Role], ranks: Mapping[int, Sequence[int]], hosts: Hosts
) -> None:
    """Refuse a ``with_=`` whose replicas did not come out pairwise."""
    for role in roles:
        if role.beside is None or roles[role.beside].replicas != role.replicas:
            continue
        pairs = zip(ranks[role.number], ranks[role.beside], strict=True)
        for replica, (mine, theirs) in enumerate(pairs):
            if hosts.host_of(mine) != hosts.host_of(theirs):
                raise refused(
                    role.label,
                    f"replica {replica} with_={roles[role.beside].label!r} on one host",
                    f"ranks {mine} on {hosts.name_of(mine)} and {theirs} on "
                    f"{hosts.name_of(theirs)}",
                    "Start enough ranks for all nodes, and fill one host after the other.",
                )


def _devices(
    roles: Sequence[Role], ranks: Mapping[int, Sequence[int]], hosts: Hosts
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Deal the devices of every host out, none of them twice."""
    units = sorted(
        (rank, role.number, replica)
        for role in roles
        if role.gpus
        for replica, rank in enumerate(ranks[role.number])
    )
    taken: dict[int, set[tuple[int, int]]] = {}
    gpus: dict[tuple[int, int], tuple[int, ...]] = {}
    for rank, index, replica in units:
        used = taken.setdefault(hosts.host_of(rank), set())
        left = [key for key in hosts.devices(rank) if key not in used]
        amount = roles[index].gpus
        if len(left) < amount:
            raise refused(
                roles[index].label,
                f"num_gpus={amount} on rank {rank}",
                f"{len(left)} free of the {len(hosts.devices(rank))} it sees",
                "Show every rank of the host all its GPUs, or ask for fewer.",
            )
        used.update(left[:amount])
        gpus[index, replica] = tuple(number for _, number in left[:amount])
    return gpus


def _notes(
    roles: Sequence[Role],
    items: Sequence[Item],
    usable: int,
    ranks: Mapping[int, Sequence[int]],
) -> tuple[str, ...]:
    """Say in one line what was folded, if anything."""
    units = sum(role.replicas for role in roles)
    if units <= usable:
        return ()
    if usable == 1:
        return (f"1 rank for {units} nodes: all are threads of it",)
    parts = []
    for item in items:
        names = " and ".join(
            role.label if role.replicas == 1 else f"{role.label} ({role.replicas})"
            for role in item.roles
        )
        if len(item.roles) > 1:
            parts.append(f"{names} share rank {ranks[item.roles[0].number][0]}")
        elif item.roles[0].replicas > item.slots:
            many = f"{item.slots} ranks" if item.slots > 1 else "1 rank"
            parts.append(f"{names} on {many}")
    return (f"{usable} ranks for {units} nodes, as threads: {'; '.join(parts)}",)


def render(asks: Sequence[Ask], plan: Plan, hosts: Hosts) -> str:
    """Return a plan as a table in plain text, one line for each rank.

    Local: no MPI.
    """
    lines = [("rank", "host", "nodes", "gpus")]
    held: list[list[tuple[int, int]]] = [[] for _ in range(hosts.size)]
    for index, ranks in enumerate(plan.ranks):
        for replica, rank in enumerate(ranks):
            held[rank].append((index, replica))
    for rank, units in enumerate(held):
        gpus = " ".join(str(g) for unit in units for g in plan.gpus.get(unit, ()))
        nodes = _spans(asks, units) or "(spare)"
        lines.append((str(rank), hosts.name_of(rank), nodes, gpus or "-"))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*table, *plan.notes]) + "\n"


def _spans(asks: Sequence[Ask], units: Sequence[tuple[int, int]]) -> str:
    """Write units as ``role/0 other/2-5``."""
    spans: dict[int, list[int]] = {}
    for index, replica in units:
        spans.setdefault(index, [replica, replica])[1] = replica
    return " ".join(
        f"{asks[index].label}/{low}" if low == high else f"{asks[index].label}/{low}-{high}"
        for index, (low, high) in spans.items()
    )
