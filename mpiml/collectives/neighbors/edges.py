"""Whom a member hears from and sends to in one call, and with what weights. Pure."""

import math
import pickle
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from mpiml.errors import UsageError
from mpiml.topology import Schedule, Topology

__all__ = ["Edges", "call_edges", "edges_of", "pair_edges", "topology_at"]

_TOLERANCE = 1e-9


class Edges:
    """One member's part in one round of averaging.

    Local: no MPI. Not changed once it is made.

    Attributes
    ----------
    own : float
        Weight of its own value.
    receives : dict of int to float
        Weight of each source.
    sources : tuple of int
        They, ascending.
    sends : dict of int to float
        Factor for each target that goes with the message.
    text : str
        What members compare of it.
    rows : bool
        Whether weights are to sum to 1 with the factors that come.
    unheard : tuple of int
        The sources that nothing is sent to.
    calls : dict
        What has been prepared for calls that come again.
    """

    __slots__ = ("calls", "own", "receives", "rows", "sends", "sources", "text", "unheard")

    def __init__(
        self,
        own: float,
        receives: Mapping[int, float],
        sends: Mapping[int, float],
        text: str,
        rows: bool = False,
    ) -> None:
        self.own = own
        self.receives = receives
        self.sources = tuple(sorted(receives))
        self.sends = sends
        self.text = text
        self.rows = rows
        self.unheard = tuple([source for source in receives if source not in sends])
        self.calls: dict[Any, Any] = {}


def topology_at(topology: Any, step: int | None, size: int, where: str) -> Topology:
    """Return the topology of a step, for so many members.

    Raises
    ------
    UsageError
        It is none, has another number of members, or `step` is missing.
    """
    if isinstance(topology, Schedule):
        if step is None:
            raise UsageError(
                f"{where}: step: expected the number of the step, since {topology!r} is a "
                "schedule. Pass step=0, 1, 2 and so on, the same on all members."
            )
        topology = topology[step]
    if not isinstance(topology, Topology):
        raise UsageError(
            f"{where}: topology: expected a Topology or Schedule of mpiml.topology, got "
            f"{topology!r}"
        )
    if topology.n != size:
        raise UsageError(
            f"{where}: topology: expected one of {size} members, as many as there are, got "
            f"{topology!r}"
        )
    return topology


def edges_of(topology: Topology, member: int, kind: Any, where: str) -> Edges:
    """Return a member's edges in a topology whose weights sum to 1 as `kind` says.

    Raises
    ------
    UsageError
        They do not.
    """
    topology.require(kind, where)
    digest = blake2b(pickle.dumps(topology), digest_size=4).hexdigest()
    text = f"topology={topology.name or 'unnamed'} of {topology.n} ({digest})"
    sends = dict.fromkeys(topology.sends(member), 1.0)
    return Edges(topology.own(member), topology.receives(member), sends, text)


def pair_edges(partner: int | None, text: str) -> Edges:
    """Return the edges of a member that takes the mean with another, or rests."""
    if partner is None:
        return Edges(1.0, {}, {}, text)
    return Edges(0.5, {partner: 0.5}, {partner: 1.0}, text)


def call_edges(
    base: Topology | None,
    member: int,
    size: int,
    own: float | None,
    receives: Mapping[int, float] | None,
    sends: Mapping[int, float] | None,
    where: str,
) -> Edges:
    """Return a member's edges where a call gives weights of its own.

    Parameters
    ----------
    base : Topology or None
        Whose edges they are of; None: the weights say which edges there are.
    member, size : int
        The member, and how many there are.
    own, receives, sends
        What the user gave; None: as `base` has it.
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        The weights are not those of the edges; or sum neither over what is received nor over
        what is sent to 1, so that they do not average.
    """
    if base is None and (own is None or receives is None or sends is None):
        raise UsageError(
            f"{where}: expected a topology, or all of self_weight, receive_weights and "
            "send_weights"
        )
    known_in = None if base is None else base.receives(member)
    known_out = None if base is None else base.sends(member)
    heard = _checked(receives, known_in, member, size, f"{where}: receive_weights")
    given = _checked(sends, known_out, member, size, f"{where}: send_weights")
    if own is None:
        own = 0.0 if base is None else base.own(member)
    if not (isinstance(own, int | float | np.floating) and 0 <= own < math.inf):
        raise UsageError(f"{where}: self_weight: expected a number >= 0, got {own!r}")
    own = float(own)
    if heard is None:
        assert base is not None
        heard = (
            base.receives(member)
            if sends is None
            else dict.fromkeys(base.receives(member), 1.0)
        )
    if given is None:
        assert base is not None
        given = dict.fromkeys(base.sends(member), 1.0)
    text = (
        f"topology={'of the call' if base is None else base.name or 'unnamed'}, weights given"
    )
    pushes = sends is not None and all(weight == 1.0 for weight in heard.values())
    if pushes and abs(math.fsum([own, *given.values()]) - 1) <= _TOLERANCE:
        return Edges(float(own), heard, given, text)  # columns sum to 1: push-sum
    total = math.fsum([own, *heard.values()])
    if sends is None and abs(total - 1) > _TOLERANCE:
        raise UsageError(
            f"{where}: expected self_weight and receive_weights to sum to 1 within "
            f"{_TOLERANCE}, got {total!r} on member {member}. Divide each by the sum."
        )
    return Edges(float(own), heard, given, text, rows=True)


def _checked(
    weights: Any, known: Mapping[int, float] | None, member: int, size: int, where: str
) -> dict[int, float] | None:
    """Return weights in ascending order of their members."""
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise UsageError(f"{where}: expected a dict of members and weights, got {weights!r}")
    allowed = set(range(size)) - {member} if known is None else set(known)
    strange = [m for m in weights if m not in allowed]
    lacking = sorted(set(() if known is None else known) - set(weights))
    if strange or lacking:
        which = f"got {strange[0]!r}" if strange else f"member {lacking[0]} is missing"
        raise UsageError(
            f"{where}: expected weights for {sorted(allowed)}, the neighbours of member "
            f"{member}; {which}"
        )
    for other, weight in weights.items():
        if not (isinstance(weight, int | float | np.floating) and 0 <= weight < math.inf):
            raise UsageError(
                f"{where}[{other}]: expected a number >= 0 and finite, got {weight!r}"
            )
    return {int(m): float(weights[m]) for m in sorted(weights)}
