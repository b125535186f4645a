"""`Array`: what dtype and shape a topic has, where ranks of another program take part in it."""

from collections.abc import Iterable
from typing import Any, Final

from mpiml.errors import UsageError
from mpiml.external.encoding import DTYPES, MOST_DIMS
from mpiml.whole import as_whole

__all__ = ["Array"]

_SHORT: Final = {
    "b1": "bool", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u1": "uint8",
    "u2": "uint16", "u4": "uint32", "u8": "uint64", "f2": "float16", "f4": "float32",
    "f8": "float64", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


class Array(tuple[str, tuple[int | None, ...] | None]):
    """What arrays of a topic are: checked where they are published, in C as in Python.

    Parameters
    ----------
    dtype : str or NumPy dtype
        As ``"float64"``, ``"f8"`` or ``numpy.float64``; never converted.
    shape : sequence of int or None, optional
        Lengths of the dimensions, None for any; all shapes by default.

    Raises
    ------
    UsageError
        It is none of these.
    """

    __slots__ = ()

    def __new__(cls, dtype: Any, shape: Iterable[int | None] | None = None) -> "Array":
        """Return the two, checked."""
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype
        name = _SHORT.get(str(name).lstrip("<=|"), name)
        if name not in DTYPES[1:]:
            raise UsageError(
                f"Array: dtype: expected one of {', '.join(DTYPES[1:])}, got {dtype!r}"
            )
        return super().__new__(cls, (name, _lengths(shape)))

    @property
    def dtype(self) -> str:
        """What NumPy calls the dtype."""
        return self[0]

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """Lengths, None for any; None for all shapes."""
        return self[1]

    def check(self, array: Any, where: str) -> None:
        """Refuse an array of another dtype or shape.

        Raises
        ------
        UsageError
            It is; says what was expected. The message begins with `where`.
        """
        shape = self.shape
        fits = shape is None or (
            len(shape) == array.ndim
            and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
        )
        if array.dtype.name != self.dtype or not fits:
            raise UsageError(
                f"{where}: expected {self!r}, got an array of {array.dtype}, shape {array.shape}. "
                "What is expected stands in the ExternalNode of the topic."
            )

    def __repr__(self) -> str:
        more = "" if self.shape is None else f", {self.shape!r}"
        return f"Array({self.dtype!r}{more})"


def _lengths(shape: Any) -> tuple[int | None, ...] | None:
    if shape is None:
        return None
    found: list[int | None] = [-1]
    if isinstance(shape, Iterable):
        found = [None if n is None else _length(n) for n in shape]
    if len(found) > MOST_DIMS or -1 in found:
        raise UsageError(
            f"Array: shape: expected at most {MOST_DIMS} lengths, None for any, got {shape!r}"
        )
    return tuple(found)


def _length(given: Any) -> int:
    number = as_whole(given)
    return -1 if number is None or number < 0 else number
