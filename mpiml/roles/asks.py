"""From what a program asks for to checked roles: FILL resolved, every wish read."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from mpiml.errors import PlacementError
from mpiml.hosts import Hosts
from mpiml.roles.packing import Counts, Role

__all__ = ["Ask", "read_replicas", "read_role", "refused"]

_KEYS = ("host", "spread", "num_gpus", "num_cpus", "with_")


class Ask(NamedTuple):
    """One role of a program, as placement sees it.

    Attributes
    ----------
    label
        Name of the role.
    replicas
        Number of its units; None for FILL.
    placement
        None, or a mapping or object with any of ``host`` (pattern of host names, or an index
        in the table), ``spread`` (evenly over hosts), ``num_gpus`` and ``num_cpus`` (of each
        replica), ``with_`` (label of a role: on the same host).
    weight
        Nodes in one unit; more than 1 for a colocation.
    holds
        Labels of the roles inside a colocation, which ``with_`` may name too.
    apart
        Whether its units never share a rank with each other, unless there is one rank in all.
    """

    label: str
    replicas: int | None = 1
    placement: Any = None
    weight: int = 1
    holds: tuple[str, ...] = ()
    apart: bool = False


def read_replicas(
    asks: Sequence[Ask], usable: int, spares: int, threads: int | None
) -> list[int]:
    """Resolve FILL and refuse ranks that would hold nothing."""
    if not asks:
        raise PlacementError("placement: the program has no nodes. Add one with add_node.")
    for ask in asks:
        if ask.replicas is not None and ask.replicas < 1:
            raise PlacementError(
                f"placement of {ask.label!r}: expected replicas of at least 1, "
                f"got {ask.replicas}. Leave the role out of the program instead."
            )
    fills = [ask.label for ask in asks if ask.replicas is None]
    if len(fills) > 1:
        raise PlacementError(
            f"placement: expected one role with replicas=FILL, got {', '.join(fills)}. "
            "Give all but one a number."
        )
    fixed = sum(ask.replicas or 0 for ask in asks)
    rest = (threads or 1) if usable == 1 else max(1, usable - fixed)
    if not fills and fixed < usable:
        kept = f" beside {spares} spares" if spares else ""
        raise PlacementError(
            f"placement: the program needs {fixed} ranks, but there are {usable}{kept}. "
            f"Start {fixed + spares} ranks, or give one role replicas=mpiml.FILL."
        )
    return [rest if ask.replicas is None else ask.replicas for ask in asks]


def _wishes(ask: Ask) -> dict[str, Any]:
    """Read a placement, in whichever form it comes, without the keys that ask for nothing."""
    given = ask.placement
    if given is None:
        return {}
    if isinstance(given, Mapping):
        odd = sorted(set(given) - set(_KEYS))
        if odd:
            raise refused(
                ask.label, f"one of {', '.join(_KEYS)}", f"{odd[0]!r}", "Leave it out."
            )
        found = {key: given[key] for key in _KEYS if key in given}
    else:
        found = {key: getattr(given, key) for key in _KEYS if hasattr(given, key)}
    return {
        k: v for k, v in found.items() if v is not None and (k == "host" or v not in (0, ""))
    }


def refused(label: str, wanted: str, got: str, cure: str) -> PlacementError:
    """Return the error for a wish of one role, in the words all of them share."""
    return PlacementError(f"placement of {label!r}: wanted {wanted}; got {got}. {cure}")


def read_role(
    asks: Sequence[Ask], index: int, counts: Sequence[int], hosts: Hosts, free: Counts
) -> Role:
    """Check one ask against the table of hosts."""
    ask, replicas = asks[index], counts[index]
    wish = _wishes(ask)
    gpus, cpus = wish.get("num_gpus", 0), wish.get("num_cpus", 0)
    allowed = _named(ask.label, wish.get("host"), hosts, free)
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 0:
        raise refused(
            ask.label, "num_gpus as a whole number", repr(gpus), "GPUs are not shared."
        )
    if isinstance(cpus, bool) or not isinstance(cpus, (int, float)) or cpus < 0:
        raise refused(
            ask.label, "num_cpus as a number", repr(cpus), "Give the cores of a node."
        )
    if gpus:
        allowed = _with(ask.label, "num_gpus", gpus, allowed, _most_gpus(hosts), hosts)
    if cpus:
        cores = [row.cores for row in hosts.rows]
        allowed = _with(ask.label, "num_cpus", cpus, allowed, cores, hosts)
    whole = sum(free) == 1  # then all share the rank, and every bound is 1
    caps = [free[host] for host in allowed]
    spread = bool(wish.get("spread"))
    most = sum(caps)
    if spread:
        most = min(caps) * len(caps) + sum(cap > min(caps) for cap in caps)
    return Role(
        number=index,
        label=ask.label,
        replicas=replicas,
        weight=ask.weight,
        allowed=allowed,
        spread=spread,
        gpus=gpus,
        cpus=cpus,
        beside=_beside(asks, index, wish.get("with_")),
        least=_least(replicas, bool(gpus) or ask.apart, spread, caps, whole),
        most=min(replicas, most),
        wish=", ".join(f"{key}={value!r}" for key, value in wish.items()),
    )


def _least(replicas: int, apart: bool, spread: bool, caps: Sequence[int], whole: bool) -> int:
    """Return the fewest ranks for a role."""
    if apart and not whole:
        return replicas
    return min(replicas, len(caps)) if spread else 1


def _named(label: str, host: object, hosts: Hosts, free: Counts) -> frozenset[int]:
    """Return the hosts with a usable rank that a ``host=`` means."""
    there = [h for h in range(len(free)) if free[h]]
    names = [hosts.rows[h].name for h in there]
    if host is None:
        return frozenset(there)
    if isinstance(host, int) and not isinstance(host, bool):
        found = frozenset({host} & set(there))
    else:
        found = frozenset(h for h in there if fnmatchcase(hosts.rows[h].name, str(host)))
    if not found:
        known = ", ".join(f"{h}: {name}" for h, name in zip(there, names, strict=True))
        raise refused(label, f"host={host!r}", f"hosts {known}", "Name or number one of these.")
    return found


def _with(
    label: str,
    key: str,
    amount: float,
    allowed: frozenset[int],
    have: Sequence[int],
    hosts: Hosts,
) -> frozenset[int]:
    """Keep the hosts that have so much of something for a single replica."""
    found = frozenset(h for h in allowed if have[h] >= amount)
    if not found:
        got = ", ".join(f"{hosts.rows[h].name}: {have[h]}" for h in sorted(allowed))
        cure = "Ask for less of it, or start ranks on hosts that have it."
        raise refused(label, f"{key}={amount!r} on one host", got, cure)
    return found


def _most_gpus(hosts: Hosts) -> list[int]:
    return [max(len(hosts.devices(rank)) for rank in row.ranks) for row in hosts.rows]


def _beside(asks: Sequence[Ask], index: int, label: str | None) -> int | None:
    if label is None:
        return None
    for other, ask in enumerate(asks):
        if other != index and label in (ask.label, *ask.holds):
            return other
    if label in asks[index].holds:  # on the same rank already
        return None
    others = ", ".join(ask.label for i, ask in enumerate(asks) if i != index) or "no other role"
    raise refused(asks[index].label, f"with_={label!r}", others, "Name one of these.")
