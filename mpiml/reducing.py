"""``clients.reduced(op).method(x)``: results of replicas that are combined on their way.

The caller calls the first replica only. Each replica that is called has a list of replicas, of
which it is the first: it calls one in each half of the others, then its own method, and combines
the results in the order of the list. Each of these is a call like any other, so errors, stops,
turns and circles of calls are what they are elsewhere.
"""

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

from mpiml.errors import UsageError
from mpiml.payload import SNAPSHOT
from mpiml.target import Target, future_class

__all__ = ["REDUCE", "Reducing", "reduce_here"]

REDUCE: Final = "\0reduced"  #: the method that every node has for it
_OPS: Final = ("sum", "mean", "min", "max", "prod")


class _Member(NamedTuple):
    """A replica, as the others call it."""

    vertex: int
    rank: int
    title: str


class Reducing:
    """One operation over the replicas of a group. Local.

    Parameters
    ----------
    op : str
    replicas : int
        How many there are.

    Raises
    ------
    UsageError
        There is no such operation, or no replica.
    """

    def __init__(self, op: str, replicas: int) -> None:
        if op not in _OPS:
            raise UsageError(f"clients.reduced: expected one of {', '.join(_OPS)}, got {op!r}")
        if not replicas:
            raise UsageError("clients.reduced: expected a replica, got an empty group")
        self._op = op

    def bind(self, targets: Sequence[Target], name: str, waits: bool) -> Callable[..., Any]:
        """Return what calls the method `name` of all, and waits for the result."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if _earlier(targets):
                futures = [t.submit(name, SNAPSHOT, args, kwargs)[0] for t in targets]
                values = [future.result(targets[0].timeout) for future in futures]
                result = _combined(self._op, values, [t.title for t in targets])
            else:
                members = [(t.vertex, t.rank, t.title) for t in targets]
                result = _sent(targets[0], self._op, name, args, kwargs, members).result(
                    targets[0].timeout
                )
            return _divided(result, len(targets)) if self._op == "mean" else result

        return call


def _earlier(targets: Sequence[Target]) -> bool:
    """Tell whether calls to these replicas are open, which this one must not overtake."""
    vertices = {target.vertex for target in targets}
    future = future_class()
    pending = list(targets[0].engine.pending.values())
    return any(type(call) is future and call.target_vertex in vertices for call in pending)


def _sent(
    target: Target, op: str, name: str, args: Any, kwargs: Any, members: Sequence[Any]
) -> Any:
    """Call the first of `members`, which is `target`; return the future of all their results."""
    return target.submit(REDUCE, SNAPSHOT, (op, name, args, kwargs, members), {})[0]


def reduce_here(
    server: Any, op: str, name: str, args: Any, kwargs: Any, members: Sequence[Any]
) -> Any:
    """Do what `members` are to do, of whom this node is the first; return what they have together.

    Local: runs as a method of the node whose `server` it is.
    """
    engine, vertex = server.engine, server.owner.vertex
    others = members[1:]
    half = (len(others) + 1) // 2
    parts = [part for part in (others[:half], others[half:]) if part]
    futures = []
    for part in parts:
        first = _Member(*part[0])
        target = Target(engine, vertex, first.vertex, first.rank, first.title, None)
        futures.append(_sent(target, op, name, args, kwargs, part))
    own = _own(server, name, args, kwargs)
    titles = [_Member(*member[0]).title for member in (members, *parts)]
    return _combined(op, [own, *[future.result() for future in futures]], titles)


def _own(server: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return what this node's own method returns."""
    key = name.encode()
    method = server.methods.get(key)
    if method is not None and key not in server.starters and key not in server.wrappers:
        return method(*args, **kwargs)
    # a coroutine, a batched method, one that is not there: as for any caller
    own = server.owner
    target = Target(server.engine, own.vertex, own.vertex, server.engine.rank, own.title, None)
    return target.submit(name, SNAPSHOT, args, kwargs)[0].result()


def _combined(op: str, values: Sequence[Any], titles: Sequence[str]) -> Any:
    """Combine results in their order. The first is the method's own, and is not changed."""
    if all(type(value) in (int, float, complex) for value in values):
        return reduce(_NUMBERS[op], values)
    import optree

    from mpiml.collectives.trees import NAMESPACE

    def leaf(*leaves: Any) -> Any:
        for title, one in zip(titles, leaves, strict=True):
            if _shape(one, title) != _shape(leaves[0], titles[0]):
                raise UsageError(
                    f"clients.reduced({op!r}): expected results alike, got {_text(leaves[0])} of "
                    f"{titles[0]} and {_text(one)} of {title}"
                )
        return reduce(_arrays(op), leaves)

    try:
        return optree.tree_map(leaf, *values, none_is_leaf=True, namespace=NAMESPACE)
    except (ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"clients.reduced({op!r}): expected results of one structure of {', '.join(titles)}: "
            f"{error}"
        ) from None


_NUMBERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": operator.add,
    "mean": operator.add,
    "min": min,
    "max": max,
    "prod": operator.mul,
}


def _arrays(op: str) -> Callable[[Any, Any], Any]:
    import numpy as np

    return {"min": np.minimum, "max": np.maximum}.get(op, _NUMBERS[op])


def _shape(value: Any, title: str) -> Any:
    """Return what results must have alike."""
    if isinstance(value, int | float | complex):
        return ()
    shape = getattr(value, "shape", None)
    if shape is None:
        raise UsageError(
            f"clients.reduced: {title}: expected numbers, arrays, or a tree of them, got "
            f"{type(value).__name__}"
        )
    return tuple(shape), value.dtype


def _text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {tuple(shape)}"


def _divided(result: Any, count: int) -> Any:
    if isinstance(result, int | float | complex):
        return result / count
    import optree

    from mpiml.collectives.trees import NAMESPACE

    return optree.tree_map(lambda x: x / count, result, none_is_leaf=True, namespace=NAMESPACE)
