"""Who passes a large message on to whom: once to each host, among hosts by a binomial tree.

A frame lists those it is for, so the schedule travels with the message and differs from one
message to the next: only ranks that are on the list take part. The first of a host on it passes
the message on to the others of its host, and to the hosts it was given along with its own.

Pure: ranks in, lists out.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Entry", "joined", "listed", "split"]

# rank, vertex, aux, number, turn; little endian, no padding
_LAYOUT = struct.Struct("<IIIQQ")


class Entry(NamedTuple):
    """One subscriber that a message is for.

    Attributes
    ----------
    rank, vertex : int
        Of the subscriber.
    aux : int
        Names its subscription.
    number : int
        Of the message on its link, those counted that are dropped.
    turn : int
        Of the message among those sent on the link, from 1; 0 where none can overtake another.
    """

    rank: int
    vertex: int
    aux: int
    number: int
    turn: int


def joined(entries: Iterable[Entry]) -> bytes:
    """Return a list as it stands in a frame."""
    return b"".join([_LAYOUT.pack(*entry) for entry in entries])


def listed(data: bytes | memoryview) -> list[Entry]:
    """Return the list in a frame."""
    return [Entry(*fields) for fields in _LAYOUT.iter_unpack(data)]


def split(
    rank: int, entries: Sequence[Entry], host_of: Callable[[int], int]
) -> list[tuple[int, list[Entry]]]:
    """Return to which ranks to pass a message on, and for whom each gets it.

    With k hosts to reach besides its own, a rank sends about log2(k + 1) times: to the first of
    half of them, then of half of the rest. Its own host comes last, one transfer to each rank.

    Parameters
    ----------
    rank : int
        Who has the message.
    entries : sequence of Entry
        For whom it is, all of other ranks.
    host_of : callable
        Returns the number of a rank's host.
    """
    ranks: dict[int, list[Entry]] = {}
    for entry in entries:
        ranks.setdefault(entry.rank, []).append(entry)
    near: list[tuple[int, list[Entry]]] = []
    hosts: dict[int, list[Entry]] = {}
    for other, part in ranks.items():
        host = host_of(other)
        if host == host_of(rank):
            near.append((other, part))
        else:
            hosts.setdefault(host, []).extend(part)
    far: list[tuple[int, list[Entry]]] = []
    parts = list(hosts.values())
    while parts:
        keep = len(parts) // 2
        given = [entry for part in parts[keep:] for entry in part]
        del parts[keep:]
        far.append((given[0].rank, given))
    return far + near
