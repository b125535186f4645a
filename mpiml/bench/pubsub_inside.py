"""On the ranks: messages of topics there and back, in a row, and to several, beside raw mpi4py.

One way is half of there and back: the clocks of two ranks need not agree. The same processes
send with mpiml and without, one block of each in turn.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import mpiml
from mpiml.bench.measure import BATCH, batches

__all__ = ["fan_out", "one_way", "rate"]

SMALL = (1, 2, "a")
LIMIT = 60.0  # seconds after which nothing comes any more

_Plan = dict[str, Any]
_Samples = dict[str, list[float]]


def _halves(
    there_and_back: Callable[[], Any], count: int, batch: int, warm: int
) -> list[float]:
    """Return the seconds of one way, from `count` batches, after `warm` times."""
    return [seconds / 2 for seconds in batches(there_and_back, count, warm, batch)]


def _counts(plan: _Plan, nbytes: int) -> tuple[int, int]:
    return (plan["arrays"], 1) if nbytes else (plan["batches"], BATCH)


def _ping(
    publisher: Any, subscriber: Any, plan: _Plan, nbytes: int, given: bool
) -> list[float]:
    message: Any = SMALL
    if nbytes:
        import numpy as np

        message = np.zeros(nbytes // 8)

    def there_and_back() -> None:
        publisher.put(mpiml.give(message) if given else message)
        subscriber.get(LIMIT)

    count, batch = _counts(plan, nbytes)
    return _halves(there_and_back, count, batch, plan["warm"])


def _pong(publisher: Any, subscriber: Any, given: bool) -> None:
    for message in subscriber:
        publisher.put(mpiml.give(message) if given else message)


def _ours(comm: Any, plan: _Plan, nbytes: int, policy: Any, given: bool = False) -> list[float]:
    program = mpiml.Program("bench pubsub")
    there, back = program.topic("there", policy), program.topic("back", policy)
    ping = mpiml.PyNode(_ping, there.publisher(), back.subscriber(), plan, nbytes, given)
    program.add_node(ping, label="ping")
    pong = mpiml.PyNode(_pong, back.publisher(), there.subscriber(), given)
    program.add_node(pong, label="pong")
    result = mpiml.launch(program, comm=comm)
    return result["ping"][0] if comm.rank == 0 else []


def _raw(comm: Any, plan: _Plan, nbytes: int) -> list[float]:
    """Send a pickled tuple, or an array into memory that is there, to and fro."""
    count, batch = _counts(plan, nbytes)
    other = 1 - comm.rank
    if nbytes:
        import numpy as np

        mine, theirs = np.zeros(nbytes // 8), np.zeros(nbytes // 8)

        def send() -> None:
            comm.Send(mine, other)

        def receive() -> None:
            comm.Recv(theirs, other)
    else:

        def send() -> None:
            comm.send(SMALL, other)

        def receive() -> None:
            comm.recv(source=other)

    def there_and_back() -> None:
        send()
        receive()

    if comm.rank == 0:
        return _halves(there_and_back, count, batch, plan["warm"])
    for _ in range(plan["warm"] + count * batch):
        receive()
        send()
    return []


def one_way(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure one way of a small message and of arrays, raw and ours in turn.

    Collective over `comm`, of two ranks.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``; ``batches`` of small messages and ``arrays`` of a round; ``warm`` ones before
        each; ``sizes``: name -> bytes of the arrays.

    Returns
    -------
    dict
        On rank 0: name -> seconds.
    """
    found: _Samples = {}

    def note(name: str, seconds: list[float]) -> None:
        found.setdefault(name, []).extend(seconds)

    keep = mpiml.Keep(100)
    for _ in range(plan["rounds"]):
        note("raw_small", _raw(comm, plan, 0))
        note("small", _ours(comm, plan, 0, keep))
        note("small_latest", _ours(comm, plan, 0, "latest"))
        for name, nbytes in plan["sizes"].items():
            note(f"raw_{name}", _raw(comm, plan, nbytes))
            note(name, _ours(comm, plan, nbytes, keep))
            note(f"{name}_given", _ours(comm, plan, nbytes, keep, given=True))
    return found


def _say(publisher: Any, message: Any, count: int) -> None:
    for _ in range(count):
        publisher.put(message)


def _hear(subscriber: Any, count: int) -> float:
    """Return messages per second, from the first to the last."""
    subscriber.get(LIMIT)
    began = perf_counter()
    for _ in range(count - 1):
        subscriber.get(LIMIT)
    return (count - 1) / (perf_counter() - began)


def rate(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure messages per second of 1 KiB in a row, raw and ours in turn.

    Collective over `comm`, of two ranks.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``; ``messages`` of a round.

    Returns
    -------
    dict
        On rank 0: ``rate`` and ``raw_rate``.
    """
    message, count = bytes(1024), plan["messages"]
    found: _Samples = {"rate": [], "raw_rate": []}
    for _ in range(plan["rounds"]):
        raw = 0.0
        if comm.rank == 0:
            for _ in range(count):
                comm.send(message, 1)
        else:
            comm.recv(source=0)
            began = perf_counter()
            for _ in range(count - 1):
                comm.recv(source=0)
            raw = (count - 1) / (perf_counter() - began)
        raw = comm.bcast(raw, root=1)
        program = mpiml.Program("bench pubsub")
        topic = program.topic("row", mpiml.Keep(100))
        program.add_node(mpiml.PyNode(_say, topic.publisher(), message, count), label="say")
        program.add_node(mpiml.PyNode(_hear, topic.subscriber(), count), label="hear")
        result = mpiml.launch(program, comm=comm)
        if comm.rank == 0:
            found["rate"].append(result["hear"][0])
            found["raw_rate"].append(raw)
    return found


def _call(publisher: Any, subscriber: Any, plan: _Plan, others: int) -> list[float]:
    import numpy as np

    message = np.zeros(plan["nbytes"] // 8)
    seconds = []
    for i in range(plan["warm"] + plan["arrays"]):
        began = perf_counter()
        publisher.put(message)
        for _ in range(others):
            subscriber.get(LIMIT)
        if i >= plan["warm"]:
            seconds.append(perf_counter() - began)
    return seconds


def _answer(publisher: Any, subscriber: Any) -> None:
    for _ in subscriber:
        publisher.put(SMALL)


def _raw_fan_out(comm: Any, plan: _Plan) -> list[float]:
    import numpy as np
    from mpi4py import MPI

    message = np.zeros(plan["nbytes"] // 8)
    others = range(1, comm.size)
    seconds = []
    for i in range(plan["warm"] + plan["arrays"]):
        if comm.rank:
            comm.Recv(message, 0)
            comm.send(SMALL, 0)
            continue
        began = perf_counter()
        MPI.Request.Waitall([comm.Isend(message, other) for other in others])
        for other in others:
            comm.recv(source=other)
        if i >= plan["warm"]:
            seconds.append(perf_counter() - began)
    return seconds


def fan_out(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure an array to all other ranks until the last has answered, raw and ours in turn.

    Collective over `comm`.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``rounds``; ``arrays`` of a round, of ``nbytes``; ``warm`` ones before them.

    Returns
    -------
    dict
        On rank 0: ``fan_out`` and ``raw_fan_out`` in seconds.
    """
    found: _Samples = {"fan_out": [], "raw_fan_out": []}
    others = comm.size - 1
    for _ in range(plan["rounds"]):
        found["raw_fan_out"] += _raw_fan_out(comm, plan)
        program = mpiml.Program("bench pubsub")
        keep = mpiml.Keep(4)
        arrays, answers = program.topic("arrays", keep), program.topic("answers", keep)
        node = mpiml.PyNode(_call, arrays.publisher(), answers.subscriber(), plan, others)
        program.add_node(node, label="call")
        node = mpiml.PyNode(_answer, answers.publisher(), arrays.subscriber())
        program.add_node(node, label="answer", replicas=others)
        result = mpiml.launch(program, comm=comm)
        if comm.rank == 0:
            found["fan_out"] += result["call"][0]
    return found
