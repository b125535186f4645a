"""A key range with sparse values, as a leaf of a parameter tree.

Pure. As in Li et al., OSDI 2014, section 3.1, parameters are pairs of key and value; of a range
far too large to be held, only the keys exist that something was pushed to.
"""

from typing import Any, Final

import numpy as np

from mpiml.errors import UsageError
from mpiml.real import finite_number
from mpiml.whole import whole_number

__all__ = ["Keys", "check_keys"]

MOST: Final = 2**62  #: keys of a range


class Keys:
    """Stands for `n` rows of `width` numbers, which exist once something was pushed to them.

    Local: it holds no numbers; the servers do. It is a leaf like an array of shape
    (n, width), and never changes.

    Parameters
    ----------
    n : int
        How many rows there may be, 1 to 2**62; their keys are 0 to n - 1.
    width : int
        Numbers of a row, from 1 on.
    dtype : dtype
        float32 or float64.
    fill : float or function
        What a row that does not exist reads as, and begins with. ``fill(keys)`` returns rows,
        (m, width), for keys, (m,): the same for a key whenever and wherever it is called.

    Raises
    ------
    UsageError
        An argument is out of its range.
    """

    def __init__(self, n: int, width: int = 1, dtype: Any = "float32", fill: Any = 0.0) -> None:
        self.n = whole_number("Keys: n", n, 1, MOST)
        self.width = whole_number("Keys: width", width, 1, 2**31)
        try:
            self.dtype = np.dtype(dtype)
        except TypeError:
            self.dtype = np.dtype(object)
        if self.dtype not in (np.float32, np.float64):
            raise UsageError(f"Keys: dtype: expected float32 or float64, got {dtype!r}")
        if not callable(fill):
            fill = finite_number("Keys: fill", fill, "a finite number or a function")
        self.fill = fill

    @property
    def shape(self) -> tuple[int, int]:
        """Of the array that it stands for."""
        return self.n, self.width

    @property
    def rowsize(self) -> int:
        """Bytes of the numbers of a row."""
        return self.width * int(self.dtype.itemsize)

    def filled(self, keys: Any) -> Any:
        """Return rows that do not exist, as new ones.

        Parameters
        ----------
        keys : ndarray
            (m,) int64

        Raises
        ------
        UsageError
            A function has returned something else than finite rows.
        """
        if not callable(self.fill):
            return np.full((len(keys), self.width), self.fill, self.dtype)
        rows = np.array(self.fill(keys), self.dtype)
        if rows.shape != (len(keys), self.width) or not np.isfinite(rows).all():
            raise UsageError(
                f"Keys: fill: expected finite rows of shape {(len(keys), self.width)}, got "
                f"{rows.shape}"
            )
        return rows

    def check(self, keys: Any, where: str) -> Any:
        """Return keys as an int64 array of one dimension; see `check_keys`."""
        return check_keys(keys, 0, self.n, where)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        fill = getattr(self.fill, "__qualname__", self.fill)
        return f"Keys({self.n}, width={self.width}, dtype={self.dtype.name!r}, fill={fill})"

    def _all(self) -> tuple[Any, ...]:
        return self.n, self.width, self.dtype, self.fill


def check_keys(keys: Any, start: int, stop: int, where: str, what: str = "keys") -> Any:
    """Return keys as an int64 array of one dimension.

    Local: a pure function.

    Parameters
    ----------
    keys : array_like of int
        (m,), in any order.
    start, stop : int
        What they must be in.
    where, what : str
        Open the message of an error.

    Raises
    ------
    UsageError
        They are no whole numbers, or out of the range.
    """
    array = np.asarray(keys)
    if array.shape == (0,):
        return np.empty(0, np.int64)  # an empty list has no dtype of its own
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"{where}: {what}: expected whole numbers in one dimension, got "
            f"{array.dtype}{array.shape}"
        )
    # as Python's numbers: NumPy compares uint64 with int64 as floats
    if int(array.min()) < start or int(array.max()) >= stop:
        at = next(i for i, key in enumerate(array) if not start <= int(key) < stop)
        raise UsageError(
            f"{where}: {what}: expected {start} to {stop - 1}, got {array[at]} at place {at}"
        )
    return array.astype(np.int64, copy=False)
