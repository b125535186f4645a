"""On the ranks: messages of raw MPI and of mpiml, launches of programs that do nothing, many calls."""

from time import perf_counter
from typing import Any

import mpiml
from mpiml.bench.scale_memory import held

__all__ = ["Desk", "calls", "launches", "messages"]

_Plan = dict[str, Any]
_LARGE = 1 << 20  # bytes of a message that shows the bandwidth
_STREAM = 16  # messages in a row
_CALLERS = 3  # ranks that call, for each that serves
_WINDOW = 100  # calls of a rank under way at once


class Desk:
    """A service that answers at once."""

    def echo(self, x: int) -> int:
        """Return the argument."""
        return x

    def held(self) -> tuple[int, int]:
        """Return what this rank holds."""
        return held()


# -- parameters of LogGP -------------------------------------------------------------------------


def messages(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure LogGP's parameters. Collective over `comm`, of two ranks.

    Returns
    -------
    dict
        On rank 0, in seconds, one sample for each of ``plan["rounds"]``: ``pingpong`` (one
        way), ``send`` and ``receive`` (overheads), ``gap``, ``byte``, ``reduction``,
        ``duplicate``, and ``call`` (half a call of mpiml).
    """
    comm = comm.Dup()
    names = ("pingpong", "send", "receive", "gap", "byte", "reduction", "duplicate")
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(plan["rounds"] + 1):
        ones = [measure(comm, plan["count"]) for measure in (_pingpong, _ends, _stream, _whole)]
        for name, value in zip(names, (x for one in ones for x in one), strict=True):
            if turn:
                found[name].append(value)
    result = mpiml.launch(_calling(plan), comm=comm)
    if comm.rank == 0:
        found["call"] = result["driver"][0]
    return found


def _pingpong(comm: Any, count: int) -> tuple[float]:
    memory = bytearray(8)
    comm.Barrier()
    began = perf_counter()
    for _ in range(count):
        if comm.rank == 0:
            comm.Send(memory, 1)
            comm.Recv(memory, 1)
        else:
            comm.Recv(memory, 0)
            comm.Send(memory, 0)
    return ((perf_counter() - began) / (2 * count),)


def _ends(comm: Any, count: int) -> tuple[float, float]:
    """Return what a send takes its rank, and a receive whose message is there already."""
    memory = bytearray(8)
    sends, receives = 0.0, 0.0
    for _ in range(count):
        comm.Barrier()
        if comm.rank == 0:
            began = perf_counter()
            comm.Send(memory, 1)
            sends += perf_counter() - began
        comm.Barrier()  # it has come
        if comm.rank == 1:
            began = perf_counter()
            comm.Recv(memory, 0)
            receives += perf_counter() - began
    return sends / count, comm.allreduce(receives) / count


def _stream(comm: Any, count: int) -> tuple[float, float]:
    """Return the time from one message to the next in a row, and that of a byte in long ones."""
    small, large = bytearray(8), bytearray(_LARGE)
    took = []
    for memory, many in ((small, count), (large, _STREAM)):
        comm.Barrier()
        began = perf_counter()
        for _ in range(many):
            if comm.rank == 0:
                comm.Send(memory, 1)
            else:
                comm.Recv(memory, 0)
        comm.Barrier()
        took.append((perf_counter() - began) / many)
    return took[0], took[1] / _LARGE


def _whole(comm: Any, count: int) -> tuple[float, float]:
    """Return the times of a small reduction and of a duplicate."""
    memory, out = bytearray(8), bytearray(8)
    comm.Barrier()
    began = perf_counter()
    for _ in range(count):
        comm.Allreduce(memory, out)
    reduction = (perf_counter() - began) / count
    comm.Barrier()
    began = perf_counter()
    for _ in range(_STREAM):
        comm.Dup().Free()
    return reduction, max(0.0, (perf_counter() - began) / _STREAM - reduction)


def _drive(desk: Any, plan: _Plan) -> list[float]:
    took = []
    for _ in range(plan["rounds"] + 1):
        began = perf_counter()
        for i in range(plan["count"]):
            desk.echo(i)
        took.append((perf_counter() - began) / (2 * plan["count"]))
    return took[1:]


def _calling(plan: _Plan) -> mpiml.Program:
    program = mpiml.Program("bench scale")
    driver = program.add_node(mpiml.ServiceNode(Desk), label="desk")
    program.add_node(mpiml.PyNode(_drive, driver, plan), label="driver")
    return program


# -- programs that do nothing --------------------------------------------------------------------


def _nothing(desk: Any) -> None:
    pass


def launches(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Start and end programs that do nothing. Collective over `comm`.

    Returns
    -------
    dict
        ``launch``: on rank 0, the seconds of each, from a barrier before to one after it.
    """
    took = []
    for turn in range(plan["launches"] + 1):
        program = mpiml.Program("nothing")
        desk = program.add_node(mpiml.ServiceNode(Desk), label="desk")
        program.add_node(mpiml.PyNode(_nothing, desk), label="worker", replicas=mpiml.FILL)
        comm.Barrier()
        began = perf_counter()
        mpiml.launch(program, comm=comm)
        comm.Barrier()
        if turn:
            took.append(perf_counter() - began)
    return {"launch": took}


# -- many calls ----------------------------------------------------------------------------------


def _ask(desks: Any, count: int) -> tuple[int, float, float, tuple[int, int]]:
    import numpy as np  # noqa: F401 - as in what it is compared with

    me = mpiml.context()
    desk = desks[me.index % len(desks)]
    began = perf_counter()
    for start in range(0, count, _WINDOW):
        asked = range(start, min(start + _WINDOW, count))
        # Were each waited for, ranks that outnumber cores would do little but change places.
        for i, answer in zip(asked, [desk.futures.echo(i) for i in asked], strict=True):
            if answer.result() != i:
                raise RuntimeError(f"call {i}: another answer")
    return count, began, perf_counter(), held()


def calls(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Make ``plan["calls"]`` calls in total, three callers for each service. Collective.

    Each caller has up to 100 under way.

    Returns
    -------
    dict
        On rank 0: ``calls``, their number; ``seconds`` from the first to the last; ``pss`` and
        ``private`` bytes of each rank that calls.
    """
    desks = max(1, comm.size // (_CALLERS + 1))
    callers = comm.size - desks
    program = mpiml.Program("calls")
    group = program.add_node(mpiml.ServiceNode(Desk), label="desk", replicas=desks)
    count = -(-plan["calls"] // callers)
    node = mpiml.PyNode(_ask, group, count)
    program.add_node(node, label="caller", replicas=callers)
    result = mpiml.launch(program, comm=comm)
    if comm.rank:
        return {}
    made = result["caller"]
    return {
        "calls": sum(one[0] for one in made),
        "seconds": max(one[2] for one in made) - min(one[1] for one in made),
        "pss": [one[3][0] for one in made],
        "private": [one[3][1] for one in made],
    }
