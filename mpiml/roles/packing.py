"""Which host takes how many ranks of each role: a small search, pure and deterministic.

Ranks in program order are tried first, since they are what a user expects to see. Where that
breaks a wish, or cuts a role in two that fits on one host, hosts are searched best fit first,
with backtracking, for the layout that cuts the fewest roles. The search is bounded: with very
many roles the layout may cut one more than needed, but every wish still holds.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpiml.errors import PlacementError
from mpiml.hosts import Hosts

__all__ = ["Counts", "Item", "Role", "pack"]

_BUDGET = 3000
"""Layouts of single items that one search looks at before it settles for less."""

_LAST_BUDGET = 20_000
"""The same for the search that decides between a layout and a refusal."""

Counts = tuple[int, ...]
"""Ranks of every host, in the order of the table of hosts."""


class Role(NamedTuple):
    """An ask, read and checked.

    Attributes
    ----------
    number, label, replicas, weight
        Index of the ask, and what it says, FILL already resolved.
    allowed
        Hosts that the role may use.
    spread
        Replicas are spread evenly over the allowed hosts.
    gpus, cpus
        Devices and cores of one replica, 0 for none.
    beside
        Index of the role on whose hosts this one sits, or None.
    least, most
        Bounds on the ranks it may take.
    wish
        The placement as the user wrote it, for messages.
    """

    number: int
    label: str
    replicas: int
    weight: int
    allowed: frozenset[int]
    spread: bool
    gpus: int
    cpus: float
    beside: int | None
    least: int
    most: int
    wish: str


class Item(NamedTuple):
    """Roles that share their ranks, nearly always a single one, and how many ranks they take."""

    roles: tuple[Role, ...]
    slots: int

    @property
    def allowed(self) -> frozenset[int]:
        """Hosts that every role of the item may use."""
        return frozenset.intersection(*(role.allowed for role in self.roles))

    @property
    def gpus(self) -> int:
        """Devices that one rank of the item needs."""
        return sum(role.gpus * -(-role.replicas // self.slots) for role in self.roles)

    @property
    def cpus(self) -> float:
        """Cores that one rank of the item needs."""
        return sum(role.cpus * -(-role.replicas // self.slots) for role in self.roles)

    @property
    def spread(self) -> bool:
        """Whether its ranks are spread evenly over its hosts."""
        return any(role.spread for role in self.roles)


def pack(items: Sequence[Item], free: Counts, hosts: Hosts) -> list[Counts]:
    """Return how many ranks of each host every item takes.

    Local: no MPI.

    Parameters
    ----------
    items
        What to place, in program order; their slots add up to the free ranks.
    free
        Ranks of each host that may be used.
    hosts
        The table of hosts.

    Raises
    ------
    PlacementError
        A wish cannot be honoured; names the role, what it wants and what is left.
    """
    natural = _natural(items, free, hosts)
    worst = _Search(items, free, hosts).cuts(natural) if natural else len(items)
    level = 0
    while level < worst:
        found = _Search(items, free, hosts).run(level, _BUDGET)
        if found:
            return _tidy(found, items, free, hosts)
        level = level * 2 + 1
    if natural:
        return natural
    search = _Search(items, free, hosts)
    found = search.run(len(items), _LAST_BUDGET)
    if not found:
        raise PlacementError(search.refusal())
    return _tidy(found, items, free, hosts)


def _tidy(
    table: Sequence[Counts], items: Sequence[Item], free: Counts, hosts: Hosts
) -> list[Counts]:
    """Exchange hosts that are alike, so that earlier roles stand on earlier hosts."""
    wishes = {item.allowed for item in items}
    alike: dict[tuple[object, ...], list[int]] = {}
    for h, row in enumerate(hosts.rows):
        kind = (free[h], row.gpus, row.cores, frozenset(w for w in wishes if h in w))
        alike.setdefault(kind, []).append(h)
    source = list(range(len(free)))
    for group in alike.values():
        filled = sorted(group, key=lambda h: [-counts[h] for counts in table])
        for h, old in zip(group, filled, strict=True):
            source[h] = old
    return [tuple(counts[h] for h in source) for counts in table]


def _natural(items: Sequence[Item], free: Counts, hosts: Hosts) -> list[Counts] | None:
    """Deal the ranks out in order; None where a wish forbids it."""
    order = sorted(
        (rank, h) for h, row in enumerate(hosts.rows) for rank in row.ranks[: free[h]]
    )
    search = _Search(items, free, hosts)
    start = 0
    for index, item in enumerate(items):
        counts = [0] * len(free)
        for _, host in order[start : start + item.slots]:
            counts[host] += 1
        start += item.slots
        if not search.fits(index, tuple(counts)):
            return None
        search.put(index, tuple(counts))
    return search.table()


class _Search:
    """Free room of every host, and the items placed so far."""

    def __init__(self, items: Sequence[Item], free: Counts, hosts: Hosts) -> None:
        self.items = items
        self.hosts = hosts
        self.whole = free
        self.free = list(free)
        self.gpus = [row.gpus for row in hosts.rows]
        self.cores: list[float] = [row.cores for row in hosts.rows]
        self.placed: dict[int, Counts] = {}
        self.needs = [(item.allowed, item.gpus, item.cpus, item.spread) for item in items]
        self.home = {role.number: i for i, item in enumerate(items) for role in item.roles}
        self.links = [
            (self.home[role.number], self.home[role.beside], role.number, role.beside)
            for item in items
            for role in item.roles
            if role.beside is not None
        ]
        self.linked = {i for link in self.links for i in link[:2]}
        self.followers = {link[0] for link in self.links}
        self.whole_fits = [self._fits_whole(i) for i in range(len(items))]
        self.stuck: tuple[int, str] = (-1, "")

    def _fits_whole(self, index: int) -> bool:
        slots = self.items[index].slots
        allowed, gpus, cpus, spread = self.needs[index]
        return not spread and any(
            self.free[h] >= slots
            and self.gpus[h] >= gpus * slots
            and self.cores[h] >= cpus * slots
            for h in allowed
        )

    def table(self) -> list[Counts]:
        """Return the counts of every item, in program order."""
        return [self.placed[i] for i in range(len(self.items))]

    def cut(self, index: int, counts: Counts) -> bool:
        """Tell whether these counts cut an item that would fit on one host."""
        return (
            self.whole_fits[index]
            and index not in self.followers
            and sum(count > 0 for count in counts) > 1
        )

    def cuts(self, table: Sequence[Counts]) -> int:
        """Return how many items a whole layout cuts."""
        return sum(self.cut(i, counts) for i, counts in enumerate(table))

    def put(self, index: int, counts: Counts, sign: int = 1) -> None:
        """Place an item, or take it away again with ``sign=-1``."""
        _, gpus, cpus, _ = self.needs[index]
        for host, count in enumerate(counts):
            if count:
                self.free[host] -= sign * count
                self.gpus[host] -= sign * count * gpus
                self.cores[host] -= sign * count * cpus
        if sign > 0:
            self.placed[index] = counts
        else:
            del self.placed[index]

    def fits(self, index: int, counts: Counts) -> bool:
        """Tell whether an item may sit so, beside all that is placed."""
        allowed, gpus, cpus, spread = self.needs[index]
        for host, count in enumerate(counts):
            if count and (
                host not in allowed
                or count > self.free[host]
                or count * gpus > self.gpus[host]
                or (cpus and count * cpus > self.cores[host] + 1e-9)
            ):
                return False
        if spread:
            inside = [counts[host] for host in allowed]
            if max(inside) - min(inside) > 1:
                return False
        return index not in self.linked or self._beside(index, counts)

    def _beside(self, index: int, counts: Counts) -> bool:
        for follower, root, *roles in self.links:
            if index not in (follower, root):
                continue
            mine = counts if index == follower else self.placed.get(follower)
            theirs = counts if index == root else self.placed.get(root)
            if mine is None or theirs is None:
                continue
            if any(m and not t for m, t in zip(mine, theirs, strict=True)):
                return False
            if self._twins(follower, root, roles) and mine != theirs:
                return False
        return True

    def _twins(self, follower: int, root: int, roles: Sequence[int]) -> bool:
        """Tell whether the two roles go pairwise: as many replicas on as many ranks."""
        replicas = {r.number: r.replicas for i in (follower, root) for r in self.items[i].roles}
        same = replicas[roles[0]] == replicas[roles[1]]
        return same and self.items[follower].slots == self.items[root].slots

    def order(self) -> list[int]:
        """Return the items, the hard to please first and those that fill any gap last."""

        def key(index: int) -> tuple[bool, int, int, bool, bool, bool, int, int]:
            allowed, gpus, cpus, spread = self.needs[index]
            plain = len(allowed) == len(self.whole) and not (gpus or cpus or spread)
            return (
                plain and index not in self.linked,
                len(allowed),
                -gpus,
                not spread,
                index in self.followers,
                not self.whole_fits[index],
                -self.items[index].slots,
                index,
            )

        return sorted(range(len(self.items)), key=key)

    def candidates(self, index: int, cuts_left: int) -> Iterator[Counts]:
        """Yield the layouts of an item that fit, the best first."""
        slots = self.items[index].slots
        allowed, _, _, spread = self.needs[index]
        roots = [self.placed[r] for f, r, *_ in self.links if f == index and r in self.placed]
        yield from (counts for counts in roots if sum(counts) == slots)
        usable = [h for h in allowed if all(root[h] for root in roots)]
        roomy = sorted(usable, key=lambda h: (-self.free[h], h))
        if spread:
            base, extra = divmod(slots, len(allowed))
            if all(self.free[h] >= base for h in allowed):
                tight = sorted(allowed, key=lambda h: (-self.free[h], h))
                caps = [min(1, self.free[h] - base) for h in tight]
                for more in _splits(extra, caps):
                    yield self._counts(tight, [base + count for count in more])
            return
        for host in sorted(usable, key=lambda h: (self.free[h], h)):
            if self.free[host] >= slots:
                yield self._counts([host], [slots])
        if index in self.followers or not self.whole_fits[index] or cuts_left > 0:
            for split in _splits(slots, [self._room(index, h) for h in roomy]):
                yield self._counts(roomy, split)

    def _room(self, index: int, host: int) -> int:
        _, gpus, cpus, _ = self.needs[index]
        room = self.free[host]
        if gpus:
            room = min(room, self.gpus[host] // gpus)
        if cpus:
            room = min(room, int((self.cores[host] + 1e-9) / cpus))
        return room

    def _counts(self, order: Sequence[int], values: Sequence[int]) -> Counts:
        counts = [0] * len(self.whole)
        for host, value in zip(order, values, strict=True):
            counts[host] = value
        return tuple(counts)

    def run(self, cuts: int, budget: int) -> list[Counts] | None:
        """Search for a layout with at most so many cuts; None if none was found in time."""
        order = self.order()
        stack = [self.candidates(order[0], cuts)]
        used = [0] * (len(order) + 1)  # cuts spent before each depth
        while stack and budget > 0:
            depth = len(stack) - 1
            index = order[depth]
            if index in self.placed:
                self.put(index, self.placed[index], -1)
            for counts in stack[-1]:
                budget -= 1
                spent = used[depth] + self.cut(index, counts)
                if spent <= cuts and self.fits(index, counts):
                    break
                if budget <= 0:
                    return None
            else:
                self._remember(depth, index)
                stack.pop()
                continue
            self.put(index, counts)
            if depth + 1 == len(order):
                return self.table()
            used[depth + 1] = spent
            stack.append(self.candidates(order[depth + 1], cuts - spent))
        return None

    def _remember(self, depth: int, index: int) -> None:
        """Keep the words for the item that stopped the search deepest in."""
        if depth <= self.stuck[0]:
            return
        allowed, gpus, cpus, _ = self.needs[index]
        left = [
            f"{self.hosts.rows[h].name} {self.free[h]} ranks"
            + (f", {self.gpus[h]} GPUs" if gpus else "")
            + (f", {self.cores[h]:g} cores" if cpus else "")
            for h in sorted(allowed)
        ]
        item = self.items[index]
        names = ", ".join(repr(role.label) for role in item.roles)
        wish = "; ".join(role.wish for role in item.roles if role.wish) or "no placement"
        shown = "; ".join(left[:8]) + (" ..." if len(left) > 8 else "")
        self.stuck = (
            depth,
            f"placement of {names}: wanted {item.slots} ranks with {wish}; "
            f"got what the other roles leave: {shown}. Ask for fewer replicas or less of each, "
            "or start with ranks on more hosts.",
        )

    def refusal(self) -> str:
        """Return why no layout was found."""
        return self.stuck[1] or (
            "placement: no layout that honours every placement= was found for "
            f"{len(self.items)} roles on {len(self.whole)} hosts. Ask for less."
        )


def _splits(total: int, caps: Sequence[int]) -> Iterator[list[int]]:
    """Yield every way to split a total under caps, the first places filled first."""
    split = [0] * len(caps)

    def fill(start: int, rest: int) -> int:
        for i in range(start, len(caps)):
            split[i] = min(rest, caps[i])
            rest -= split[i]
        return rest

    if fill(0, total):
        return
    while True:
        yield list(split)
        room = rest = 0
        for i in range(len(caps) - 1, -1, -1):
            if split[i] and room > rest:
                split[i] -= 1
                fill(i + 1, rest + 1)
                break
            room += caps[i]
            rest += split[i]
        else:
            return
