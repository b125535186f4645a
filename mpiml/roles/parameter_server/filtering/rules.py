"""Which filters go together, and in which order."""

from collections.abc import Sequence
from typing import Any

from mpiml.errors import UsageError
from mpiml.filters import (
    KKT,
    Compressed,
    Filter,
    KeyCaching,
    RandomSkip,
    SignificantlyModified,
    ZeroSuppression,
)
from mpiml.roles.parameter_server.filtering.stages import Coder

__all__ = ["check_filters"]

#: filters of a lower number come first: entries are chosen, then written
_ORDER = {
    KKT: 0,
    SignificantlyModified: 1,
    RandomSkip: 1,
    ZeroSuppression: 2,
    KeyCaching: 3,
    Compressed: 3,
}


def check_filters(filters: Any, where: str, pull: bool) -> tuple[Filter, ...]:
    """Return filters as a tuple. Local: a pure function.

    Parameters
    ----------
    filters : sequence of Filter
        In the order in which they are applied.
    where : str
        Opens the message of an error.
    pull : bool
        Whether they are for parameters; else for gradients.

    Raises
    ------
    UsageError
        One is none, comes twice, stands in the wrong place, or cannot be used here.
    """
    if not isinstance(filters, tuple | list):
        raise UsageError(
            f"{where}: expected a tuple of those of mpiml.filters, such as "
            f"(SignificantlyModified(1e-3),), got {filters!r}"
        )
    for each in filters:
        if type(each) not in _ORDER:
            raise UsageError(f"{where}: expected filters of mpiml.filters, got {each!r}")
        if isinstance(each, KKT) and pull:
            raise UsageError(
                f"{where}: KKT is for gradients, got it for pulls. Give it for pushes only."
            )
    kinds = [type(each) for each in filters]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise UsageError(
                f"{where}: expected each kind once, got {kind.__name__} twice or more. "
                "Keep one of them."
            )
    _check_order(kinds, where)
    for each in filters:
        if isinstance(each, Compressed):
            Coder(each.compressor, where, "pull" if pull else "push", 0)
    return tuple(filters)


def _check_order(kinds: Sequence[type[Any]], where: str) -> None:
    right = sorted(kinds, key=lambda kind: _ORDER[kind])
    for kind, should in zip(kinds, right, strict=True):
        if kind is not should:
            why = (
                "it needs the gradient as it is"
                if should is KKT
                else "entries are chosen before they are written"
            )
            raise UsageError(
                f"{where}: expected {should.__name__} before {kind.__name__}, since {why}. Write "
                f"({', '.join(k.__name__ + '(...)' for k in right)},)."
            )
