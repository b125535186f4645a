"""On the ranks: the results of all replicas as one sum, gathered by the caller or on the way."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import mpiml

__all__ = ["Part", "group"]

_Plan = dict[str, Any]
_HEADER = 40  # bytes of a frame beside its name, body and buffers


class Part:
    """A replica that has a block of the result."""

    def __init__(self, plan: _Plan) -> None:
        import numpy as np

        self._block = np.full(plan["nbytes"] // 8, 1.0 + mpiml.context().index)

    def block(self) -> Any:
        """Return its array, which it keeps."""
        return self._block


def _received(engine: Any, call: Callable[[], Any]) -> int:
    """Return the bytes of the messages that come to this rank during ``call()``."""
    handlers = dict(engine.handlers)
    sizes = []

    def counting(handler: Callable[..., None]) -> Callable[..., None]:
        def handle(rank: int, frame: Any, buffers: Any) -> None:
            sizes.append(_HEADER + len(frame.name) + len(frame.body) + sum(map(len, buffers)))
            handler(rank, frame, buffers)

        return handle

    engine.handlers.update({kind: counting(handler) for kind, handler in handlers.items()})
    try:
        call()
    finally:
        engine.handlers.update(handlers)
    return sum(sizes)


def _drive(parts: Any, plan: _Plan) -> dict[str, Any]:
    def gathered() -> Any:
        return sum(parts.block())

    def reduced() -> Any:
        return parts.reduced("sum").block()

    ways = {"gathered": gathered, "reduced": reduced}
    engine = parts[0].__dict__["_target"].engine
    expected = len(parts) * (len(parts) + 1) / 2
    found: dict[str, Any] = {}
    for name, call in ways.items():
        assert (call() == expected).all()
        found[f"{name}_bytes"] = _received(engine, call)
        found[name] = []
    for _ in range(plan["repeats"]):
        for name, call in ways.items():
            began = perf_counter()
            call()
            found[name].append(perf_counter() - began)
    return found


def group(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure both ways over all other ranks.

    Collective over `comm`.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``nbytes`` of each array; ``repeats`` of each way, in turn.

    Returns
    -------
    dict
        On rank 0: ``gathered`` and ``reduced`` in seconds; ``gathered_bytes`` and
        ``reduced_bytes``: what the caller has received in one call.
    """
    program = mpiml.Program("bench group")
    parts = program.add_node(
        mpiml.ServiceNode(Part, plan), label="part", replicas=comm.size - 1
    )
    program.add_node(mpiml.PyNode(_drive, parts, plan), label="caller")
    result = mpiml.launch(program, comm=comm)
    return dict(result["caller"][0]) if comm.rank == 0 else {}
