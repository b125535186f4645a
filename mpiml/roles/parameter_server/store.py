"""The parameters of one server, the optimizer's state, and how gradients change them."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple

import numpy as np

from mpiml.errors import UsageError
from mpiml.optim import Optimizer
from mpiml.roles.parameter_server.keys import Keys, check_keys
from mpiml.roles.parameter_server.layout import Piece
from mpiml.roles.parameter_server.table import Table, in_place

__all__ = ["Gradient", "Sparse", "Store", "Update", "summed"]


class Sparse(NamedTuple):
    """Values at some elements of a piece; what comes twice counts twice.

    Attributes
    ----------
    indices : ndarray
        (n,) int64, from the beginning of the piece.
    values : ndarray
        (n,); of a key range (n, width).
    """

    indices: Any
    values: Any


BLOCK: Final = 1 << 15  # elements that stay in the cache, while those of all workers are added

#: Of one piece: an array like it, a `Sparse`, or None for zero; never an array of a key range.
Gradient = Any
#: ``update(parameter, gradient, state, step)``: changes the first and third in place.
Update = Callable[[Any, Any, dict[str, Any], int], None]


class Store:
    """The arrays of the pieces that a server holds. Local; not safe from several threads.

    `arrays` has one for each piece; that of a key range is a `Table`.

    Parameters
    ----------
    leaves : sequence of ndarray or Keys
        The whole tree's; float32 or float64.
    pieces : sequence of Piece
        Which parts of them.
    optimizer : Optimizer or function
        A function is called for each piece, with a dict to keep its state in; for a key range
        as `Table` describes.
    """

    def __init__(
        self, leaves: Sequence[Any], pieces: Sequence[Piece], optimizer: Optimizer | Update
    ) -> None:
        self.pieces = list(pieces)
        self.arrays = [_held(leaves[p.leaf], p, optimizer) for p in pieces]
        self._optimizer = optimizer
        self._states = [_fresh(array, optimizer) for array in self.arrays]
        self.step = 0  #: updates so far

    def take(self, i: int, indices: Any) -> Any:
        """Return copies of some elements of a piece, or rows of a key range.

        Parameters
        ----------
        i : int
            Which piece.
        indices : ndarray
            (n,) int64, from the beginning of the piece, in any order.

        Returns
        -------
        ndarray
            (n,), of a key range (n, width).
        """
        array = self.arrays[i]
        if isinstance(array, Table):
            return array.read(_keys(indices, array))
        return array[indices]

    def check(self, gradient: Sequence[Gradient]) -> None:
        """Raise a UsageError unless `apply` can take the gradient of a worker.

        It is for the moment when a gradient comes in: by the time when it is applied, together
        with those of others, nobody knows whose it was.
        """
        if len(gradient) != len(self.arrays):
            raise UsageError(
                f"push: expected gradients of {len(self.arrays)} pieces, got {len(gradient)}"
            )
        for array, term in zip(self.arrays, gradient, strict=True):
            if term is None:
                continue
            if isinstance(array, Table):
                if not isinstance(term, Sparse):
                    raise UsageError(
                        f"push: expected keys and values for a range of {array.keys.n} keys, "
                        f"got {type(term).__qualname__}"
                    )
                array.check(_keys(term.indices, array), term.values)
                continue
            expected = array.shape
            if isinstance(term, Sparse):
                expected = check_keys(term.indices, 0, array.size, "push").shape
                term = term.values
            kind = getattr(getattr(term, "dtype", None), "kind", "")
            if np.shape(term) != expected or kind != "f":
                raise UsageError(
                    f"push: expected an array of {expected} floating-point numbers, got "
                    f"{getattr(term, 'dtype', type(term).__qualname__)} {np.shape(term)}"
                )

    def apply(self, gradients: Sequence[Sequence[Gradient]], rate: float = 1.0) -> None:
        """Do one step with the mean of some gradients.

        Where all gradients of a piece are sparse, only the elements in them are stepped: the
        optimizer's state of the others stays, as in PyTorch's `SparseAdam`.

        Parameters
        ----------
        gradients : sequence of sequence of Gradient
            Of each worker, one for each piece; added in this order.
        rate : float
            What the step is multiplied with: the learning rate of an `Optimizer`; for a function,
            the gradient.

        Raises
        ------
        UsageError
            A gradient does not fit a key range: see `check`.
        """
        self.step += 1
        count = len(gradients)
        scale = 1 / count
        if not isinstance(self._optimizer, Optimizer):
            scale *= rate  # a function has its own rate, which nobody knows
        for i, array in enumerate(self.arrays):
            terms = [(g[i], scale) for g in gradients if g[i] is not None]
            if not terms:
                continue
            if isinstance(array, Table):
                self._step_rows(array, terms, rate)
            elif all(isinstance(term, Sparse) for term, _ in terms):
                self._step_at(i, *_joined(terms, array.dtype), rate)
            else:
                self._step(array, _mean(terms, array), self._states[i], rate)

    def _step_rows(self, table: Table, terms: Sequence[tuple[Any, float]], rate: float) -> None:
        """Step the rows of a key range that any of the terms has."""
        if len(terms) == 1:
            (((indices, values), scale),) = terms
        else:
            scale = 1.0  # it is in the values
            indices = np.concatenate([term.indices for term, _ in terms])
            values = np.concatenate(
                [np.multiply(term.values, s, dtype=table.keys.dtype) for term, s in terms]
            )
        table.apply(_keys(indices, table), values, self.step, scale, rate)

    def _step_at(self, i: int, indices: Any, values: Any, rate: float) -> None:
        """Step some elements of a piece; for a function, all others have a gradient of zero."""
        array, state = self.arrays[i], self._states[i]
        if not isinstance(self._optimizer, Optimizer):
            dense = np.zeros_like(array)
            dense[indices] = values
            self._step(array, dense, state, rate)
            return
        some = array[indices]
        picked = tuple(s[indices] for s in state)
        self._step(some, values, picked, rate)
        for whole, part in zip((array, *state), (some, *picked), strict=True):
            whole[indices] = part

    def _step(self, array: Any, gradient: Any, state: Any, rate: float) -> None:
        if not gradient.flags.aligned:  # an array of another dtype came before it in a message
            gradient = np.array(gradient)
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.apply(array, gradient, state, self.step, rate)
        else:
            in_place(self._optimizer(array, gradient, state, self.step))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the arrays and of the optimizer's state; of a table, what it returns."""
        states = [
            [np.array(s) for s in state] if isinstance(state, tuple) else deepcopy(state)
            for state in self._states
        ]
        arrays = [
            array.state_dict() if isinstance(array, Table) else np.array(array)
            for array in self.arrays
        ]
        return {"arrays": arrays, "states": states, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned, of a server with the same pieces.

        Raises
        ------
        UsageError
            It is of other pieces.
        """
        arrays = state["arrays"]
        if [_form(a) for a in arrays] != [_form(a) for a in self.arrays]:
            raise UsageError(
                f"ParameterServerNode: expected the state of {len(self.arrays)} pieces of "
                f"{[_form(a) for a in self.arrays]} numbers, got {[_form(a) for a in arrays]}. Load "
                "it with as many shards as it was saved with."
            )
        for mine, theirs in zip(self.arrays, arrays, strict=True):
            if isinstance(mine, Table):
                mine.check_state(theirs)  # before anything has changed
        for mine, theirs in zip(self.arrays, arrays, strict=True):
            if isinstance(mine, Table):
                mine.load_state_dict(theirs)
            else:
                mine[:] = theirs
        for i, theirs in enumerate(state["states"]):
            if isinstance(self._states[i], tuple):
                for mine, its in zip(self._states[i], theirs, strict=True):
                    mine[:] = its
            else:
                self._states[i] = deepcopy(theirs)
        self.step = state["step"]


def _held(leaf: Any, piece: Piece, optimizer: Optimizer | Update) -> Any:
    if isinstance(leaf, Keys):
        return Table(leaf, piece.start, piece.stop, optimizer)
    return np.array(np.asarray(leaf).reshape(-1)[piece.start : piece.stop])


def _fresh(array: Any, optimizer: Optimizer | Update) -> Any:
    if isinstance(array, Table) or not isinstance(optimizer, Optimizer):
        return {}  # a table keeps its own
    return optimizer.init(array)


def _keys(indices: Any, table: Table) -> Any:
    """Return the keys at these places of a table's range; what is no number stays to be refused."""
    array = np.asarray(indices)
    # what overflows ends up below the range
    return (
        array.astype(np.int64, copy=False) + table.start if array.dtype.kind in "iu" else array
    )


def _form(array: Any) -> Any:
    """Return what a state must have in common with the array that it is loaded into."""
    if isinstance(array, Table):
        return f"keys {array.start} to {array.stop}"
    if isinstance(array, dict):
        return f"keys {array['start']} to {array['stop']}"
    return int(np.size(array))


def _mean(terms: Sequence[tuple[Any, float]], like: Any) -> Any:
    """Return the sum of terms times their factors, in the order given."""
    first, scale = terms[0]
    if len(terms) == 1 and scale == 1 and not isinstance(first, Sparse):
        return first
    if not any(isinstance(term, Sparse) for term, _ in terms):
        return _mean_of_dense(terms, like)
    total = np.zeros_like(like)
    for term, scale in terms:
        if isinstance(term, Sparse):
            np.add.at(total, term.indices, np.multiply(term.values, scale, dtype=like.dtype))
        else:
            total += np.multiply(term, scale, dtype=like.dtype)
    return total


def _mean_of_dense(terms: Sequence[tuple[Any, float]], like: Any) -> Any:
    """Return the same sum, block by block: each is read from memory once."""
    total, room = np.empty_like(like), np.empty(BLOCK, like.dtype)
    (first, scale), rest = terms[0], terms[1:]
    for at in range(0, like.size, BLOCK):
        part = total[at : at + BLOCK]
        np.multiply(first[at : at + BLOCK], scale, out=part, dtype=like.dtype)
        more = room[: part.size]
        for term, factor in rest:
            np.multiply(term[at : at + BLOCK], factor, out=more, dtype=like.dtype)
            part += more
    return total


def _joined(terms: Sequence[tuple[Any, float]], dtype: Any) -> tuple[Any, Any]:
    """Return the elements of all terms, each once, and the sums of their values."""
    indices = np.concatenate([term.indices for term, _ in terms])
    values = np.concatenate([np.multiply(t.values, s, dtype=dtype) for t, s in terms])
    return summed(indices, values)


def summed(indices: Any, values: Any) -> tuple[Any, Any]:
    """Return indices ascending, each once, and the sums of their values in the order they came."""
    if (indices[1:] > indices[:-1]).all():
        return indices, values
    once, places = np.unique(indices, return_inverse=True)
    sums = np.zeros(len(once), values.dtype)
    np.add.at(sums, places, values)
    return once, sums
