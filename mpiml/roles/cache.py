"""Which cached answer may be given, which is to be asked for again, and which goes. Pure.

The clock is passed in. An answer's age counts from when it was asked for, not from when it came:
it tells of the target as it was at some time in between, so it is at most that old.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Asked", "Cache"]


class Asked:
    """One question to the target, under way or answered.

    Attributes
    ----------
    key : bytes
        The method and its arguments.
    made : float
        When it was asked, in seconds.
    tried : float
        When it was asked last, by a question that came to nothing too.
    reads : int
        By how many readers since, the one it was made for left out.
    renews : bool
        Whether it was made for no reader, but to renew an answer.
    """

    def __init__(self, key: bytes, made: float, renews: bool = False) -> None:
        self.key = key
        self.made = self.tried = made
        self.reads = 0
        self.renews = renews


_Asked = TypeVar("_Asked", bound=Asked)


class Cache(Generic[_Asked]):
    """What is kept of the answers of a target, and what is under way.

    Parameters
    ----------
    stale : float
        Seconds, > 0: a reader gets no answer that was asked for earlier than this before it came.
    refresh : float, optional
        Seconds, < `stale`: answers that are read again are asked for anew at this age.
    most : int
        How many answers are kept; the ones not read for longest go.
    """

    def __init__(self, stale: float, refresh: float | None = None, most: int = 1024) -> None:
        self.stale = stale
        self.refresh = refresh
        self.most = most
        self._kept: OrderedDict[bytes, _Asked] = OrderedDict()  # not read for longest, first
        self._came: OrderedDict[bytes, None] = OrderedDict()  # the same keys: came first, first
        self._under_way: dict[bytes, _Asked] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, key: bytes, now: float) -> _Asked | None:
        """Return what answers a reader that comes now; None where it has to be asked for.

        It may be under way: readers that come meanwhile share one call.
        """
        self._purge(now)
        kept = self._kept.get(key)
        if kept is not None and now - kept.made > self.stale:
            kept = None
            self._forget(key)
        elif kept is not None:
            self._kept.move_to_end(key)
        found = kept or self._under_way.get(key)
        if found is None or now - found.made > self.stale:  # a slow call, for those before
            return None
        found.reads += 1
        return found

    def begin(self, asked: _Asked) -> None:
        """Note a question: it is made now."""
        self._purge(asked.made)
        self._under_way[asked.key] = asked

    def finish(self, asked: _Asked, good: bool) -> None:
        """Note that a question was answered; what is no good answer is not kept."""
        key = asked.key
        if self._under_way.get(key) is asked:
            del self._under_way[key]
        kept = self._kept.get(key)
        if kept is not None and kept.made > asked.made:
            return
        if not good:
            if kept is not None:
                kept.tried = asked.made
            return
        if kept is None and asked.renews and not asked.reads:
            return  # it has gone meanwhile, since others are read more
        self._kept[key] = asked
        self._came[key] = None
        self._came.move_to_end(key)
        while len(self._kept) > self.most:
            self._forget(next(iter(self._kept)))

    def drop(self, asked: _Asked) -> None:
        """Keep this answer no longer."""
        if self._kept.get(asked.key) is asked:
            self._forget(asked.key)

    def due(self, now: float) -> list[_Asked]:
        """Return what is to be asked for again now; stale answers go."""
        for asked in [a for a in self._kept.values() if now - a.made > self.stale]:
            self._forget(asked.key)
        return [asked for at, asked in self._times() if at <= now]

    def next_due(self) -> float | None:
        """Return when `due` will have something, as things stand; None: not without readers."""
        return min((at for at, _ in self._times()), default=None)

    def _purge(self, now: float) -> None:
        """Let stale answers go, which nobody may read again; looks at one that stays, at most.

        One that took long may be stale behind one that is not: it goes with that one.
        """
        while self._came:
            key = next(iter(self._came))
            if now - self._kept[key].made <= self.stale:
                return
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        del self._kept[key], self._came[key]

    def _times(self) -> list[tuple[float, _Asked]]:
        if self.refresh is None:
            return []
        return [
            (asked.tried + self.refresh, asked)
            for key, asked in self._kept.items()
            if asked.reads and key not in self._under_way
        ]
