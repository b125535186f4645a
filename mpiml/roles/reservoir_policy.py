"""Which items a full reservoir keeps, and who waits for whom beside it. Pure.

Algorithm R of J. S. Vitter, "Random sampling with a reservoir", ACM Trans. Math. Software 11(1),
1985: the first `capacity` items fill the slots; item number t after them is kept with
probability capacity/t, in a slot chosen at random. So at any time the slots hold a uniform random
subset of all items so far, however many there were.
"""

from typing import Any

__all__ = ["Slots", "Watermarks"]


class Slots:
    """Where items go; what stands there is a uniform sample of all that were placed.

    Parameters
    ----------
    capacity : int
        Number of slots, >= 1.
    rng : numpy.random.Generator
        Decides.
    """

    def __init__(self, capacity: int, rng: Any) -> None:
        self.capacity = capacity
        self.rng = rng
        self.seen = 0  # items placed, kept or not

    @property
    def held(self) -> int:
        """Number of slots that hold an item."""
        return min(self.seen, self.capacity)

    def place(self, count: int) -> Any:
        """Return the slot of each of the next items; -1: it is not kept.

        Where a slot stands there twice, the later item is the one that stays.

        Returns
        -------
        slots : (count,) int64
        """
        import numpy as np

        numbers = np.arange(self.seen, self.seen + count)  # items before each of them
        slots = numbers.copy()
        late = numbers >= self.capacity
        slots[late] = self.rng.integers(0, numbers[late] + 1)
        slots[slots >= self.capacity] = -1
        self.seen += count
        return slots

    def draw(self, count: int) -> Any:
        """Return the slots of `count` items, each drawn from all that are held.

        Returns
        -------
        slots : (count,) int64
        """
        return self.rng.integers(0, self.held, size=count)


class Watermarks:
    """Whether producers or learners have to wait.

    Parameters
    ----------
    low : int
        Learners wait until so many items have been put, >= 1.
    high : int, optional
        Producers wait while they are this many items ahead, >= 1; None: they never wait. How far
        they are ahead is what has been put beyond `low`, less what learners have sampled.
    per_item : float
        How many times an item is to be sampled, on average, > 0: that many samples make up for
        one item.
    reuse : float, optional
        Learners wait for more items while they have sampled each this many times, on average; at
        least `per_item`, so that one of the two may always go on. None: they never wait for that.
    """

    def __init__(
        self, low: int, high: int | None, per_item: float = 1.0, reuse: float | None = None
    ) -> None:
        self.low = low
        self.high = high
        self.per_item = per_item
        self.reuse = reuse
        self.put = 0
        self.sampled = 0

    @property
    def ahead(self) -> float:
        """How many items the producers are ahead; negative where learners used more."""
        return self.put - self.low - self.sampled / self.per_item

    def may_put(self) -> bool:
        """Tell whether a producer may go on now; one call may then put any number of items."""
        return self.high is None or self.put < self.low or self.ahead < self.high

    def may_sample(self) -> bool:
        """Tell whether a learner may go on now."""
        return self.put >= self.low and (
            self.reuse is None or self.sampled < self.reuse * self.put
        )
