"""``clients.reduced(op).method(x)``: results of replicas that are combined on their way.

The caller calls the first replica only. Each replica that is called has a list of replicas, of
which it is the first: it calls one in each half of the others, then its own method, and combines
the results in the order of the list. Each of these is a call like any other, so errors, stops,
turns and circles of calls are what they are elsewhere.

Only the first replica hears from the caller, so a call that the caller has made to another before
could be overtaken. Where such calls are open, an empty call goes to their replicas first: once it
is answered, those before it have started.

A deadline goes with the calls, as the seconds that are left: each replica gives the others up when
the caller does.
"""

import operator
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

from mpiml.errors import DeadlineError, UsageError
from mpiml.payload import SNAPSHOT
from mpiml.scope import current_scope
from mpiml.target import Target, future_class

__all__ = ["REDUCE", "Reducing", "reduce_here"]

REDUCE: Final = "\0reduced"  #: the method that every node has for it
_NUMBERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": operator.add,
    "mean": operator.add,
    "min": min,
    "max": max,
    "prod": operator.mul,
}
_OPS: Final = tuple(_NUMBERS)
_ORDERED: Final = ("min", "max")


class _Member(NamedTuple):
    """A replica, as the others call it."""

    vertex: int
    rank: int
    title: str


class _What(NamedTuple):
    """What the replicas are asked."""

    op: str
    name: str
    args: Any
    kwargs: Any

    @property
    def text(self) -> str:
        """How the user has written it."""
        return f'reduced("{self.op}").{self.name}'


class _Limit:
    """Until when a result is waited for; without end where `seconds` is None."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.deadline = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds that are left."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def late(self, about: str, wanted: str) -> DeadlineError:
        return DeadlineError(
            f"{about}: expected {wanted} within {self.seconds or 0:.3g} s, got none. What was "
            "called goes on; give it more time with with_options(timeout=)."
        )

    def value(self, future: Any, wanted: str) -> Any:
        """Return the value of a future.

        Raises
        ------
        DeadlineError
            It has not come in time. An error of the call, this one too, is raised as it is.
        """
        scope = current_scope(required=False)
        if not future.ready and not future.engine.wait(future, self.deadline, scope):
            raise self.late(future.about, wanted)
        return future._value()


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
            limit = _Limit(targets[0].timeout)
            what = _What(self._op, name, args, kwargs)
            _follow(targets, what, limit)
            members = [(t.vertex, t.rank, t.title) for t in targets]
            future = _sent(targets[0], what, members, limit)
            try:
                result = limit.value(future, f"the result of {len(targets)} replicas")
            finally:
                future.cancel()  # nothing, where it has ended
            return _divided(result, len(targets)) if self._op == "mean" else result

        return call


def _follow(targets: Sequence[Target], what: _What, limit: _Limit) -> None:
    """Wait until calls to the replicas that are open have started, but for the first replica."""
    kind = future_class()
    pending = list(targets[0].engine.pending.values())
    called = {call.target_vertex for call in pending if type(call) is kind}
    nothing = what._replace(args=(), kwargs={})
    fences = [_sent(t, nothing, [], limit) for t in targets[1:] if t.vertex in called]
    try:
        for fence in fences:
            limit.value(fence, "the calls before it to start")
    finally:
        for fence in fences:
            fence.cancel()


def _sent(target: Target, what: _What, members: Sequence[Any], limit: _Limit) -> Any:
    """Call the first of `members`, which is `target`; return the future of all their results."""
    args = (*what, members, limit.left)
    try:
        return target.submit(REDUCE, SNAPSHOT, args, {}, limit.deadline, what.text)[0]
    except DeadlineError:
        raise limit.late(f"{target.title}.{what.text}()", "room for another call") from None


def reduce_here(
    server: Any,
    op: str,
    name: str,
    args: Any,
    kwargs: Any,
    members: Sequence[Any],
    seconds: float | None,
) -> Any:
    """Do what `members` are to do, of whom this node is the first; return what they have together.

    Local: runs as a method of the node whose `server` it is. Without `members` it is only waited
    for that its turn comes.
    """
    if not members:
        return None
    limit, what = _Limit(seconds), _What(op, name, args, kwargs)
    engine, vertex = server.engine, server.owner.vertex
    others = members[1:]
    half = (len(others) + 1) // 2
    parts = [part for part in (others[:half], others[half:]) if part]
    futures: list[Any] = []
    try:
        for part in parts:
            first = _Member(*part[0])
            target = Target(engine, vertex, first.vertex, first.rank, first.title, None)
            futures.append(_sent(target, what, part, limit))
        values = [_own(server, what, limit)]
        values += [limit.value(future, "its result") for future in futures]
    finally:
        for future in futures:
            future.cancel()
    titles = [_Member(*member[0]).title for member in (members, *parts)]
    return _combined(op, values, titles)


def _own(server: Any, what: _What, limit: _Limit) -> Any:
    """Return what this node's own method returns."""
    _, name, args, kwargs = what
    key = name.encode()
    method = server.methods.get(key)
    if method is not None and key not in server.starters and key not in server.wrappers:
        return method(*args, **kwargs)
    # a coroutine, a batched method, one that is not there: as for any caller
    own = server.owner
    target = Target(server.engine, own.vertex, own.vertex, server.engine.rank, own.title, None)
    return limit.value(target.submit(name, SNAPSHOT, args, kwargs)[0], "its result")


def _combined(op: str, values: Sequence[Any], titles: Sequence[str]) -> Any:
    """Combine results in their order. The first is the method's own, and is not changed."""
    if all(type(value) in (int, float, complex) for value in values):
        for title, value in zip(titles, values, strict=True):
            _check_order(op, value, title)
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
            _check_order(op, one, title)
        return reduce(_arrays(op), leaves)

    try:
        return optree.tree_map(leaf, *values, none_is_leaf=True, namespace=NAMESPACE)
    except UsageError:  # a ValueError too
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"clients.reduced({op!r}): expected results of one structure of {', '.join(titles)}: "
            f"{error}"
        ) from None


def _arrays(op: str) -> Callable[[Any, Any], Any]:
    import numpy as np

    return {"min": np.minimum, "max": np.maximum}.get(op, _NUMBERS[op])


def _shape(value: Any, title: str) -> Any:
    """Return what results must have alike."""
    if type(value) in (int, float, complex, bool):  # NumPy's scalars are arrays without axes
        return ()
    shape = getattr(value, "shape", None)
    if shape is None:
        raise UsageError(
            f"clients.reduced: {title}: expected numbers, arrays, or a tree of them, got "
            f"{type(value).__name__}"
        )
    return tuple(shape), getattr(value.dtype, "str", str(value.dtype)).lstrip("<>=|")


def _check_order(op: str, value: Any, title: str) -> None:
    """Refuse complex numbers where the smallest or largest is wanted."""
    if op in _ORDERED and (
        isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"
    ):
        raise UsageError(
            f"clients.reduced({op!r}): {title}: expected numbers that have an order, got "
            f"{_text(value)}. Return their abs(), or reduce by 'sum'."
        )


def _text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {tuple(shape)}"


def _divided(result: Any, count: int) -> Any:
    if isinstance(result, int | float | complex):
        return result / count
    import optree

    from mpiml.collectives.trees import NAMESPACE

    return optree.tree_map(lambda x: x / count, result, none_is_leaf=True, namespace=NAMESPACE)
