"""The rows of a key range that one server holds: found by key, made when first pushed to.

Two sorted indices lead from a key to the place of its row: a large one, and a small one of what
came lately, which is merged into the large one when it has grown to about the root of its size.
So a few new keys cost a copy of the small index only. Rows stand in arrays with room to grow, in
the order in which they were made, and never move.
"""

from collections.abc import Callable
from copy import deepcopy
from math import isqrt
from typing import Any, Final

import numpy as np

from mpiml.errors import UsageError
from mpiml.optim import Optimizer
from mpiml.roles.parameter_server.keys import Keys, check_keys

__all__ = ["Table", "in_place"]

RECENT: Final = 4096  #: keys that the small index may always have
_ROOTS: Final = 32  # and otherwise, times the root of how many the large one has
_ROOM: Final = 64  # rows for which there is room at first


def in_place(returned: Any) -> None:
    """Raise where an update function has returned something: it is to change its arguments."""
    if returned is not None:
        raise UsageError(
            "update function: expected None, as it changes parameter and state in place, got "
            f"{type(returned).__qualname__}. Write parameter -= ... or parameter[:] = ..."
        )


class Table:
    """Rows of some keys, and the optimizer's state of each. Local; not safe from several threads.

    Parameters
    ----------
    keys : Keys
        The whole range.
    start, stop : int
        The keys that belong here.
    optimizer : Optimizer or function
        A function is called as ``update(parameter, gradient, state, step)``, with the rows of
        a step, (m, width). What it puts into `state` as an array of two dimensions with m
        rows is kept row by row; a row that is new has zeros there. Anything else is kept as
        it is, for all rows together.
    """

    def __init__(
        self,
        keys: Keys,
        start: int,
        stop: int,
        optimizer: Optimizer | Callable[[Any, Any, dict[str, Any], int], None],
    ) -> None:
        if not 0 <= start < stop <= keys.n:
            raise UsageError(
                f"Table: expected some keys of 0 to {keys.n}, got {start} to {stop}"
            )
        self.keys, self.start, self.stop = keys, start, stop
        self._optimizer = optimizer
        self._index = _Index()
        self._values = np.empty((0, keys.width), keys.dtype)  # (rows and room, width)
        self._columns: dict[str, Any] = {}  # state by row: (rows and room, ...)
        self._rest: dict[str, Any] = {}  # what a function keeps for all rows
        if isinstance(optimizer, Optimizer):
            self._columns = dict(
                zip(optimizer.states, optimizer.init(self._values), strict=True)
            )

    @property
    def rows(self) -> int:
        """How many exist."""
        return len(self._index)

    def read(self, keys: Any) -> Any:
        """Return rows, as a copy; those that do not exist are not made.

        Parameters
        ----------
        keys : array_like of int
            (m,), of the whole range; in any order, repeated or not.

        Returns
        -------
        ndarray
            (m, width)

        Raises
        ------
        UsageError
            A key is no whole number, or not in [start, stop).
        """
        keys = check_keys(keys, self.start, self.stop, "pull")
        places = self._index.find(keys)
        known = places >= 0
        if known.all():
            return self._values[places]  # (m,) -> (m, width)
        found = np.empty((len(places), self.keys.width), self.keys.dtype)
        found[known] = self._values[places[known]]
        found[~known] = self.keys.filled(keys[~known])
        return found

    def apply(
        self, keys: Any, values: Any, step: int, scale: float = 1.0, rate: float = 1.0
    ) -> None:
        """Step the rows of some keys, each once; what does not exist yet is made.

        Parameters
        ----------
        keys : array_like of int
            (m,), of the whole range; the values of one that is repeated are added up first.
        values : array of floating point
            (m, width): the gradient; (m,) too where the width is 1.
        step : int
            Number of this step, from 1.
        scale, rate : float
            What the gradient is multiplied with; and an optimizer's learning rate.

        Raises
        ------
        UsageError
            As for `read`; the values do not fit. Nothing has changed then.
        """
        keys, gradient = _added_up(*self.check(keys, values))
        if not len(keys):
            return
        if scale != 1:
            gradient = np.multiply(gradient, scale, dtype=self.keys.dtype)
        places = self._index.find(keys)
        new = places < 0
        if new.any():
            places[new] = self._make(keys[new])
        self._step(places, gradient, step, rate)

    def check(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Return keys and values as `apply` takes them, (m,) int64 and (m, width).

        Raises
        ------
        UsageError
            They do not fit.
        """
        keys = check_keys(keys, self.start, self.stop, "push")
        count = len(keys)
        array = np.asarray(values)
        width = self.keys.width
        if (array.shape == (count,) and width == 1) or array.size == 0 == count:
            array = array.reshape(count, width)
        floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
        if array.shape != (count, width) or not floating:
            raise UsageError(
                f"push: values: expected floating-point numbers of shape {(count, width)}, a row "
                f"for each key, got {array.dtype}{array.shape}"
            )
        return keys, array.astype(self.keys.dtype, copy=False)

    def _make(self, keys: Any) -> Any:
        """Make the rows of sorted keys; return their places."""
        rows = self.keys.filled(keys)  # it may raise, before anything has changed
        first = len(self._index)
        places = self._index.add(keys)
        end = first + len(keys)
        self._values = _with_room(self._values, end)
        self._columns = {name: _with_room(c, end) for name, c in self._columns.items()}
        self._values[first:end] = rows
        if isinstance(self._optimizer, Optimizer):
            fresh = self._optimizer.init(self._values[first:end])
            for column, begin in zip(self._columns.values(), fresh, strict=True):
                column[first:end] = begin
        return places

    def _step(self, places: Any, gradient: Any, step: int, rate: float) -> None:
        """Take rows out, step them, and put them back."""
        some = self._values[places]  # (m,) -> (m, width)
        state = {name: column[places] for name, column in self._columns.items()}
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.apply(some, gradient, tuple(state.values()), step, rate)
            for name, part in state.items():
                self._columns[name][places] = part
        else:
            state = {**self._rest, **state}
            in_place(self._optimizer(some, gradient, state, step))
            self._keep(places, state)
        self._values[places] = some

    def _keep(self, places: Any, state: dict[str, Any]) -> None:
        """Take over what a function has left in its state."""
        rest = {}
        for name, value in state.items():
            column = self._columns.get(name)
            rowwise = isinstance(value, np.ndarray) and value.ndim == 2
            rowwise = rowwise and len(value) == len(places)
            if column is not None:
                if not rowwise or value.shape[1] != column.shape[1]:
                    raise UsageError(
                        f"update function: state {name!r}: expected an array of shape "
                        f"{(len(places), *column.shape[1:])}, as it was before, got "
                        f"{getattr(value, 'shape', value)!r}"
                    )
                column[places] = value
            elif isinstance(value, np.ndarray) and value.shape == (len(places),) != (1,):
                raise UsageError(
                    f"update function: state {name!r}: expected an array of shape "
                    f"{(len(places), 1)} to keep a number for each row, got {value.shape}; or "
                    "something else, to keep it for all rows"
                )
            elif rowwise and name not in self._rest:
                column = np.zeros((len(self._values), value.shape[1]), value.dtype)
                column[places] = value
                self._columns[name] = column
            else:
                rest[name] = value
        self._columns = {name: c for name, c in self._columns.items() if name in state}
        self._rest = rest

    def state_dict(self) -> dict[str, Any]:
        """Return copies of keys and rows, sorted by key, and of the state of each row."""
        keys, places = self._index.items()
        return {
            "start": self.start,
            "stop": self.stop,
            "keys": keys.copy(),
            "values": self._values[places],
            "states": {name: column[places] for name, column in self._columns.items()},
            "rest": deepcopy(self._rest),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned, of a table of the same keys.

        Raises
        ------
        UsageError
            It is of other keys, another width or another optimizer.
        """
        self.check_state(state)
        keys = np.array(check_keys(state["keys"], self.start, self.stop, "load_state_dict"))
        self._index = _Index(keys)
        self._values = np.array(state["values"], self.keys.dtype)
        self._columns = {name: np.array(rows) for name, rows in state["states"].items()}
        self._rest = dict(state["rest"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a UsageError unless a state can be loaded here."""
        expected = (self.start, self.stop, self.keys.width)
        width = np.shape(state["values"])[1]
        got = (state["start"], state["stop"], width)
        if got != expected:
            raise UsageError(
                f"load_state_dict: expected keys {expected[0]} to {expected[1]}, {expected[2]} "
                f"wide, got {got[0]} to {got[1]}, {got[2]} wide. Load it with as many shards as "
                "it was saved with."
            )
        if isinstance(self._optimizer, Optimizer):
            names, found = list(self._optimizer.states), list(state["states"])
            if names != found:
                raise UsageError(
                    f"load_state_dict: expected the state of {self._optimizer.name}, {names}, "
                    f"got {found}"
                )
        keys = state["keys"]
        if len(keys) != len(state["values"]) or (np.diff(keys) <= 0).any():
            raise UsageError(
                f"load_state_dict: expected sorted keys, one for each of "
                f"{len(state['values'])} rows, got {len(keys)}"
            )


class _Index:
    """Where the row of a key is: rows are numbered as their keys come."""

    def __init__(self, keys: Any = ()) -> None:
        self._keys = np.asarray(keys, np.int64)  # sorted
        self._places = np.arange(len(self._keys))
        self._new = np.empty(0, np.int64)  # sorted, and none of them in _keys
        self._new_places = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._keys) + len(self._new)

    def find(self, keys: Any) -> Any:
        """Return the place of each key, -1 where it has none."""
        places = _look_up(keys, self._keys, self._places)
        if len(self._new):
            np.maximum(places, _look_up(keys, self._new, self._new_places), out=places)
        return places

    def add(self, keys: Any) -> Any:
        """Give places to sorted keys that have none; return the places."""
        places = np.arange(len(self), len(self) + len(keys))
        self._new, self._new_places = _merged(self._new, self._new_places, keys, places)
        if len(self._new) > max(RECENT, _ROOTS * isqrt(len(self._keys))):
            self.items()
        return places

    def items(self) -> tuple[Any, Any]:
        """Return all keys, sorted, and their places; not to be changed."""
        if len(self._new):
            self._keys, self._places = _merged(
                self._keys, self._places, self._new, self._new_places
            )
            self._new = self._new_places = np.empty(0, np.int64)
        return self._keys, self._places


def _look_up(keys: Any, known: Any, places: Any) -> Any:
    if not len(known):
        return np.full(len(keys), -1)
    at = np.searchsorted(known, keys)
    at[at == len(known)] = 0  # larger than all: compared with a wrong one below
    return np.where(known[at] == keys, places[at], -1)


def _merged(keys: Any, places: Any, more: Any, more_places: Any) -> tuple[Any, Any]:
    """Merge sorted keys, no one of which is in both, and what belongs to them."""
    at = np.searchsorted(keys, more) + np.arange(len(more))
    old = np.ones(len(keys) + len(more), bool)
    old[at] = False
    both, both_places = np.empty(len(old), np.int64), np.empty(len(old), np.int64)
    both[at], both[old] = more, keys
    both_places[at], both_places[old] = more_places, places
    return both, both_places


def _added_up(keys: Any, values: Any) -> tuple[Any, Any]:
    """Return the keys sorted, each once, and the sums of their values in the order they came."""
    steps = np.diff(keys)
    if (steps > 0).all():
        return keys, values
    if not (steps >= 0).all():
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
        steps = np.diff(keys)
    first = np.flatnonzero(np.concatenate([[True], steps > 0]))
    if len(first) == len(keys):
        return keys, values
    return keys[first], np.add.reduceat(values, first, axis=0)  # (m, width) -> (keys, width)


def _with_room(array: Any, rows: int) -> Any:
    """Return the array, or a longer copy with zeros behind it, half as long again at least."""
    if rows <= len(array):
        return array
    longer = np.zeros((max(rows, len(array) * 3 // 2, _ROOM), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
