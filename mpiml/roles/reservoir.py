"""`Reservoir`: a buffer between producers and learners, a uniform sample of all that was put.

Producers may be simulations that run once and write nothing to disk: what does not fit is
forgotten at random, so early states are met as often as late ones. Watermarks couple the speeds.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mpiml.alarms import Alarm
from mpiml.context import context
from mpiml.errors import DeadlineError, ServiceGoneError, UsageError
from mpiml.real import finite_number
from mpiml.roles.reservoir_policy import Slots, Watermarks
from mpiml.scope import current_scope
from mpiml.seconds import timeout_seconds
from mpiml.waits import Wait
from mpiml.whole import whole_number

__all__ = ["Reservoir"]

_PATIENCE: Final = 2.0  # s after the stop, for those whose call cannot be answered


class Reservoir:
    """A service that holds a uniform sample of all items that were put (algorithm R).

    Local: who holds its handle puts and samples when it likes. Add it as
    ``ServiceNode(mpiml.roles.Reservoir, 10_000, low=500)``. An item is an array, or several, of
    the same dtypes and shapes in each item; an external code puts by ``mpiml_call``.

    Parameters
    ----------
    capacity : int
        How many items it holds, >= 1.
    low : int, default 1
        `sample` waits until so many have been put, at most `capacity`.
    high : int, optional
        `put` waits while producers are this many items ahead of the learners: back-pressure.
        None: it never waits.
    per_item : float, default 1.0
        How often an item is to be sampled, on average. With `high`, producers are ahead by what
        was put beyond `low`, less the number of samples over `per_item`.
    reuse : float, optional
        `sample` waits while items have been sampled this often, on average; at least `per_item`.
        None: learners may go on with what there is.
    timeout : float, default 600.0
        Seconds that a call waits at most. None: no limit.
    seed : int, optional
        Of its random choices; by default that of the node.

    Raises
    ------
    UsageError
        A parameter is out of its range.
    """

    def __init__(
        self,
        capacity: int,
        low: int = 1,
        high: int | None = None,
        per_item: float = 1.0,
        reuse: float | None = None,
        timeout: float | None = 600.0,
        seed: int | None = None,
    ) -> None:
        node = context()._node
        self._title = node.title
        self._engine = node.runtime.engine
        where = "Reservoir"
        capacity = whole_number(f"{where}: capacity", capacity, 1)
        low = whole_number(f"{where}: low", low, 1, capacity)
        if high is not None:
            high = whole_number(f"{where}: high", high, 1)
        rate = finite_number(f"{where}: per_item", per_item, "a number > 0")
        if rate <= 0:
            raise UsageError(f"{where}: per_item: expected a number > 0, got {per_item!r}")
        if reuse is not None:
            reuse = finite_number(
                f"{where}: reuse", reuse, f"a number >= per_item ({rate:g})", rate
            )
        self._timeout = timeout_seconds(where, timeout)
        if seed is None:
            rng = context().rng
        else:
            import numpy as np

            rng = np.random.default_rng(whole_number(f"{where}: seed", seed, 0))
        self._slots = Slots(capacity, rng)
        self._marks = Watermarks(low, high, rate, reuse)
        self._arrays: list[Any] = []  # of each array of an item: (capacity, *shape)
        self._many = True  # whether items are tuples
        self._lock = threading.Lock()
        self._waits: list[tuple[Callable[[], bool], Wait]] = []
        self._waited = {"put": 0.0, "sample": 0.0}
        self._open = True  # producers are to come
        self._over = False
        self._watched = False  # whether a thread waits for the stop

    def put(self, *arrays: Any) -> None:
        """Put one item: an array, or several; wait first where producers are too far ahead.

        Raises
        ------
        UsageError
            Its arrays have other dtypes or shapes than those of the items before.
        DeadlineError
            Learners have sampled too little for as long as the reservoir's timeout.
        """
        import numpy as np

        self._add("put", [np.asarray(x)[None] for x in arrays])

    def extend(self, *arrays: Any) -> None:
        """Put many items at once: the rows of an array, or of several of equal length.

        Raises
        ------
        UsageError
            As `put`; or they are of different lengths, or 0-d.
        DeadlineError
            As `put`.
        """
        import numpy as np

        batch = [np.asarray(x) for x in arrays]
        if any(x.ndim == 0 for x in batch) or len({len(x) for x in batch}) > 1:
            raise UsageError(
                f"{self._title}.extend: expected arrays of as many rows as there are items, got "
                f"shapes {', '.join(str(x.shape) for x in batch)}"
            )
        self._add("extend", batch)

    def sample(self, count: int = 1) -> Any:
        """Return items drawn from all that were put, each with the same probability.

        They are drawn one by one, so an item may come more than once. Waits until `low` items
        have been put, and where `reuse` says so for more; no longer than until `close`.

        Parameters
        ----------
        count : int
            How many, >= 1.

        Returns
        -------
        items : array (count, ...) or tuple of such arrays
            As they were put: an array, or several.

        Raises
        ------
        DeadlineError
            Too little was put for as long as the reservoir's timeout.
        ServiceGoneError
            Nothing was put, and nothing will be.
        """
        count = whole_number(f"{self._title}.sample: count", count, 1)
        self._wait(
            "sample",
            self._marks.may_sample,
            self._about_items,
        )
        with self._lock:
            if not self._slots.held:
                raise ServiceGoneError(f"{self._title}.sample: nothing was put, nor will be")
            slots = self._slots.draw(count)
            items = tuple(array[slots] for array in self._arrays)  # (count, ...) each
            self._marks.sampled += count
            self._wake()
        return items if self._many else items[0]

    def close(self) -> None:
        """Tell that producers or learners have ended: nobody waits for them any more."""
        with self._lock:
            self._open = False
            self._wake()

    def statistics(self) -> dict[str, float]:
        """Return what was put and sampled, what is held, and how long calls waited.

        Returns
        -------
        dict
            ``put``, ``sampled``, ``held``: items. ``ahead``: items that producers are ahead.
            ``put_waited_s``, ``sample_waited_s``: seconds, of all calls. ``bytes``: held.
        """
        with self._lock:
            return {
                "put": self._marks.put,
                "sampled": self._marks.sampled,
                "held": self._slots.held,
                "ahead": self._marks.ahead,
                "put_waited_s": self._waited["put"],
                "sample_waited_s": self._waited["sample"],
                "bytes": sum(array[: self._slots.held].nbytes for array in self._arrays),
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the items that are held, the counts, and the state of the random choices."""
        with self._lock:
            return {
                "items": [array[: self._slots.held].copy() for array in self._arrays],
                "many": self._many,
                "put": self._marks.put,
                "sampled": self._marks.sampled,
                "rng": self._slots.rng.bit_generator.state,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these items and counts, in place of those there are.

        Raises
        ------
        UsageError
            They come from a reservoir of another capacity.
        """
        import numpy as np

        capacity, items = self._slots.capacity, state["items"]
        held = min(state["put"], capacity)
        if any(len(array) != held for array in items):
            raise UsageError(
                f"{self._title}.load_state_dict: expected {held} items ({state['put']} put, "
                f"capacity {capacity}), got {len(items[0])}"
            )
        with self._lock:
            self._arrays = [np.empty((capacity, *x.shape[1:]), x.dtype) for x in items]
            for array, x in zip(self._arrays, items, strict=True):
                array[:held] = x
            self._many = state["many"]
            self._marks.put = self._slots.seen = state["put"]
            self._marks.sampled = state["sampled"]
            self._slots.rng.bit_generator.state = state["rng"]
            self._wake()

    def _about_items(self) -> str:
        marks = self._marks
        expected = f"{marks.low} items put"
        if marks.put >= marks.low:
            expected = f"less than {marks.reuse:g} samples of an item, on average"
        return (
            f"expected {expected}, got {marks.put} items and {marks.sampled} samples. Let "
            "producers call put, or close() when they have ended"
        )

    def _add(self, method: str, batch: list[Any]) -> None:
        """Put the rows of arrays, once there is room for more."""
        where = f"{self._title}.{method}"
        with self._lock:
            self._check(where, batch)
        self._wait(
            "put",
            self._marks.may_put,
            lambda: (
                f"expected less than {self._marks.high} items ahead of the learners, got "
                f"{self._marks.ahead:g}. Sample more, raise high, or close() when learners have ended"
            ),
        )
        with self._lock:
            self._check(where, batch)  # another may have been the first meanwhile
            if not self._arrays:
                self._make(batch)
            slots = self._slots.place(len(batch[0]))
            kept = slots >= 0
            for array, x in zip(self._arrays, batch, strict=True):
                array[slots[kept]] = x[kept]
            self._marks.put += len(slots)
            self._wake()

    def _check(self, where: str, batch: list[Any]) -> None:
        got = [(x.dtype.str, x.shape[1:]) for x in batch]
        if not got:
            raise UsageError(f"{where}: expected at least one array")
        if any(x.dtype.hasobject for x in batch):
            raise UsageError(f"{where}: expected arrays of numbers, got {got}")
        expected = [(x.dtype.str, x.shape[1:]) for x in self._arrays] or got
        if got != expected:
            raise UsageError(
                f"{where}: expected items of {_described(expected)}, as the first was; got "
                f"{_described(got)}"
            )

    def _make(self, batch: list[Any]) -> None:
        import numpy as np

        capacity = self._slots.capacity
        self._arrays = [np.empty((capacity, *x.shape[1:]), x.dtype) for x in batch]
        self._many = len(batch) > 1

    def _wait(self, what: str, ready: Callable[[], bool], about: Callable[[], str]) -> None:
        """Wait until `ready` is true, or nobody is to be waited for any more."""
        start = time.monotonic()
        deadline = None if self._timeout is None else start + self._timeout
        while True:
            with self._lock:
                if self._goes(ready):
                    self._waited[what] += time.monotonic() - start
                    return
                wait = Wait(f"{self._title}.{what}")
                self._waits.append((ready, wait))
            try:
                self._watch()
                in_time = self._engine.wait(wait, deadline, current_scope(required=False))
            finally:
                with self._lock:
                    self._waits = [one for one in self._waits if one[1] is not wait]
            if not in_time:
                raise DeadlineError(f"{wait.about}: {about()}, within {self._timeout:g} s")

    def _goes(self, ready: Callable[[], bool]) -> bool:
        """Tell whether one goes on; the lock is held."""
        return ready() or not self._open or self._over

    def _wake(self) -> None:
        """Let those look who may go on; the lock is held."""
        for ready, wait in self._waits:
            if self._goes(ready):
                self._engine.fulfil(wait)

    def _watch(self) -> None:
        """Once somebody waits: see to it that the stop ends that.

        By a thread, since the node's own may be the one that waits.
        """
        with self._lock:
            if self._watched:
                return
            self._watched = True
        name = f"mpiml stop of {self._title}"
        bound = context().bind(self._wait_for_stop)
        threading.Thread(target=bound, name=name, daemon=True).start()

    def _wait_for_stop(self) -> None:
        try:
            context().wait_for_stop()
        except ServiceGoneError:
            return  # the program has ended
        with self._lock:
            if self._slots.held:
                self._end()
                return
        # Bodies leave by the stop itself; an error that comes first would be taken for theirs.
        Alarm(_PATIENCE, self._end_late, "mpiml-reservoir")

    def _end_late(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._over = True
        self._wake()


def _described(items: list[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in items)
