"""`wait_until_ready`: go on only when services have been constructed."""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from mpiml.client import Client
from mpiml.errors import DeadlineError, UsageError
from mpiml.group import ClientGroup
from mpiml.payload import SNAPSHOT
from mpiml.seconds import timeout_seconds

if TYPE_CHECKING:
    from mpiml.futures import Future
    from mpiml.target import Target

__all__ = ["READY", "wait_until_ready"]

READY: Final = "\0ready"  #: the method that every node has for it


def wait_until_ready(
    clients: "Client | ClientGroup | Iterable[Any] | Any", timeout: float | None = None
) -> None:
    """Wait until services have been constructed, and answer.

    Local: asks them, and only the calling node waits. A single call waits for that anyhow; this is
    for code that is to begin only when all are up. A service that runs a long method answers after
    it. Other nodes are ready from the beginning.

    Parameters
    ----------
    clients : client, group of clients, or iterable of these
        Which ones. The client of a parameter server stands for all its shards.
    timeout : float, optional
        Seconds, for all of them together. None, and infinity: no deadline.

    Raises
    ------
    ServiceGoneError
        The constructor of one of them failed, or it has stopped.
    DeadlineError
        Some were not ready in time; it names them. They may still become so.
    UsageError
        What is given is no client, or `timeout` no number >= 0.
    Stopped
        The program stops.
    """
    seconds = timeout_seconds("wait_until_ready", timeout)
    from mpiml.futures import wait

    targets = {target.vertex: target for target in _flat(clients)}
    deadline = None if seconds is None else time.monotonic() + seconds
    open_: list[Future] = []
    for target in targets.values():
        asking = target.with_timeout(None)  # a deadline of the clients is for their calls
        try:
            open_.append(asking.submit(READY, SNAPSHOT, (), {}, deadline)[0])
        except DeadlineError:  # there was no room for another call
            titles = [future.target for future in open_ if not future.ready]
            titles += [other.title for other in list(targets.values())[len(open_) :]]
            raise _late(len(targets), seconds, open_, titles) from None
    while open_:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, late = wait(open_, timeout=left)
        for future in done:
            future.result()
        if not done:
            raise _late(len(targets), seconds, late, [future.target for future in late])
        open_ = late


def _late(
    count: int, seconds: float | None, asked: "list[Future]", titles: Sequence[str]
) -> DeadlineError:
    """Give up those that were asked and have not answered; return the error, which names them."""
    for future in asked:
        future.cancel()
    return DeadlineError(
        f"wait_until_ready: expected {count} nodes to be ready within {seconds:g} s; not ready: "
        f"{', '.join(titles)}. See what their constructors do, or wait longer."
    )


def _flat(given: Any) -> "list[Target]":
    """Return what is to be asked; a client that is several nodes' says so by `_ready_targets`."""
    if isinstance(given, Client):
        return [given.__dict__["_target"]]
    made_of = getattr(type(given), "_ready_targets", None)
    if made_of is not None:
        return list(made_of(given))
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(
            f"wait_until_ready: expected clients, got {type(given).__name__}. Give what a handle "
            "became inside this node."
        )
    return [target for one in given for target in _flat(one)]
