"""Where the members of a collective that are threads of one process meet.

A meeting is one round: each brings a value, the last to come makes something of all of them,
and everyone leaves with that. No MPI: what is made may involve other processes.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["SLICE", "Room"]

#: seconds between two looks at whether the wait is to end
SLICE = 0.05


class Room:
    """A meeting point for a fixed number of threads.

    Parameters
    ----------
    size : int
        How many meet each time.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.shared: dict[Any, Any] = {}  # what the members of this process hold together
        self._ready = threading.Condition()
        self._values: dict[int, Any] = {}
        self._round = 0
        self._made: Any = None
        self._error: BaseException | None = None

    def meet(
        self,
        slot: int,
        value: Any,
        make: Callable[[Sequence[Any]], Any],
        waiting: Callable[[Sequence[int]], None],
    ) -> Any:
        """Bring a value; return what `make` made of all values, the same object for all.

        Collective over the threads.

        Parameters
        ----------
        slot : int
            Which of the `size` places this thread takes.
        value
            What it brings.
        make : function
            Called once, by the last to come, with the values in the order of the places.
            What it raises is raised in all.
        waiting : function
            Called every `SLICE` seconds with the places that are empty; ends the wait by
            raising. The place is given up then.
        """
        with self._ready:
            round_ = self._round
            self._values[slot] = value
            if len(self._values) == self.size:
                return self._finish(make)
            while self._round == round_:
                if self._ready.wait(SLICE) or self._round != round_:
                    continue
                try:
                    waiting([i for i in range(self.size) if i not in self._values])
                except BaseException:
                    self._values.pop(slot, None)
                    raise
            if self._error is not None:
                raise self._error
            return self._made

    def _finish(self, make: Callable[[Sequence[Any]], Any]) -> Any:
        """Make it and let all go; the lock is held, so the next round cannot begin before."""
        values = [self._values[i] for i in range(self.size)]
        self._values = {}
        self._made, self._error = None, None
        try:
            self._made = make(values)
        except BaseException as error:
            self._error = error
        self._round += 1
        self._ready.notify_all()
        if self._error is not None:
            raise self._error
        return self._made
