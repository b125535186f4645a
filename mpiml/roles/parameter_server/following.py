"""What a server does that is not the first: what the first one has decided, in its order.

The first server of a parameter server decides, for all of them, which gradients are applied in
which order. So all go through the same versions, and a pull can be answered with parts of one
version. Gradients, and requests for parts, come to every server from the workers, and what is to
be done with them from the first server; either may come before the other.

Pure: gradients and requests are opaque.
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
    rate: float = 1.0  #: what the step is multiplied with


class Drop(NamedTuple):
    """A gradient that is not used."""

    key: Hashable


class Mark(NamedTuple):
    """A pull wants the parameters as they are here, by a request of this key."""

    key: Hashable


Entry = Apply | Drop | Mark


class Step(NamedTuple):
    """Something to be done now, with the gradients of an `Apply`, the request of a `Mark`."""

    entry: Apply | Mark
    found: tuple[Any, ...]


class Following:
    """The entries, and what they are of, that have come. Local; not safe from several threads."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._came: dict[Hashable, Any] = {}
        self._dropped: set[Hashable] = set()  # whose gradient has not come yet

    def arrive(self, key: Hashable, gradient: Any) -> list[Step]:
        """Take a gradient or a request in; return what is to be done now, in this order."""
        if key in self._dropped:
            self._dropped.discard(key)
            return []
        self._came[key] = gradient
        return self._ripe()

    def follow(self, entries: Sequence[Entry]) -> list[Step]:
        """Take decisions in, in the order of the first server; return what is to be done now."""
        for entry in entries:
            if not isinstance(entry, Drop):
                self._entries.append(entry)
            elif self._came.pop(entry.key, self) is self:
                self._dropped.add(entry.key)
        return self._ripe()

    def _ripe(self) -> list[Step]:
        steps = []
        while self._entries:
            entry = self._entries[0]
            assert not isinstance(entry, Drop)
            keys = entry.keys if isinstance(entry, Apply) else (entry.key,)
            if not all(key in self._came for key in keys):
                break
            steps.append(Step(entry, tuple([self._came.pop(key) for key in keys])))
            self._entries.popleft()
        return steps

    def __len__(self) -> int:
        """Return how many entries, gradients and requests wait for each other."""
        return len(self._entries) + len(self._came) + len(self._dropped)
