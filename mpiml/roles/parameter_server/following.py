"""What a server does that is not the first: what the first one has decided, in its order.

The first server of a parameter server decides, for all of them, which gradients are applied in
which order. So all go through the same versions, and a pull can be answered with parts of one
version. Each gradient comes to every server from its worker, and what is to be done with it from
the first server; either may come before the other.

Pure: gradients are opaque.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

__all__ = ["Apply", "Drop", "Entry", "Following", "Mark", "Step"]


class Apply(NamedTuple):
    """One step with the mean of these gradients."""

    keys: tuple[Hashable, ...]
    workers: tuple[int, ...]
    versions: tuple[int, ...]  #: of the parameters that each was computed from
    factors: tuple[float, ...] | None  #: what each is multiplied by


class Drop(NamedTuple):
    """A gradient that is not used."""

    key: Hashable


class Mark(NamedTuple):
    """A pull wants the parameters as they are here."""

    ticket: Hashable
    worker: int | None  #: whose the pull is; None: of a reader


Entry = Apply | Drop | Mark


class Step(NamedTuple):
    """Something to be done now."""

    entry: Apply | Mark
    gradients: tuple[Any, ...]


class Following:
    """The entries and gradients that have come. Local; not safe from several threads."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._gradients: dict[Hashable, Any] = {}
        self._dropped: set[Hashable] = set()  # whose gradient has not come yet

    def arrive(self, key: Hashable, gradient: Any) -> list[Step]:
        """Take a gradient in; return what is to be done now, in this order."""
        if key in self._dropped:
            self._dropped.discard(key)
            return []
        self._gradients[key] = gradient
        return self._ripe()

    def follow(self, entries: Sequence[Entry]) -> list[Step]:
        """Take decisions in, in the order of the first server; return what is to be done now."""
        for entry in entries:
            if not isinstance(entry, Drop):
                self._entries.append(entry)
            elif self._gradients.pop(entry.key, self) is self:
                self._dropped.add(entry.key)
        return self._ripe()

    def _ripe(self) -> list[Step]:
        steps = []
        while self._entries:
            entry = self._entries[0]
            if isinstance(entry, Mark):
                steps.append(Step(entry, ()))
            elif isinstance(entry, Apply):
                if not all(key in self._gradients for key in entry.keys):
                    break
                found = tuple(self._gradients.pop(key) for key in entry.keys)
                steps.append(Step(entry, found))
            self._entries.popleft()
        return steps

    def __len__(self) -> int:
        """Return how many entries and gradients wait for each other."""
        return len(self._entries) + len(self._gradients) + len(self._dropped)
