"""The clients of a role's replicas, called together."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, overload

from mpiml.client import Client
from mpiml.errors import UsageError
from mpiml.later import refuse

__all__ = ["ClientGroup"]

_GROUP_VERBS = ("scatter", "least_loaded", "reduced")


class _Each:
    """A method on every member of a group."""

    __slots__ = ("_bound",)

    def __init__(self, bound: list[Any]) -> None:
        self._bound = bound

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all replicas at once; a list in their order."""
        return [bound(*args, **kwargs) for bound in self._bound]


class _GroupFutures:
    """``clients.futures.method(x)``: a list of futures, one for each replica."""

    def __init__(self, clients: list[Client]) -> None:
        self._clients = clients

    def __getattr__(self, name: str) -> _Each:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Each([getattr(c.futures, name) for c in self._clients])


class ClientGroup:
    """The clients of a role's replicas: a sequence, whose methods call all of them.

    Local. ``clients.method(x)`` returns the list of results, ``clients.futures.method(x)`` a
    list of futures; slices are groups.
    """

    # Registered as a Sequence below, not derived from it: its `count` and `index` would hide
    # methods of such names.

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = list(clients)

    @property
    def futures(self) -> _GroupFutures:
        """The same calls, as futures."""
        return _GroupFutures(self._clients)

    @property
    def stream(self) -> Any:
        """Refused: items of several streams have no order of their own."""
        raise UsageError(
            f"{self!r}.stream: expected the client of one replica, got a group. Stream from "
            "each: for c in clients: c.stream.method(...)"
        )

    def with_options(self, *, timeout: float | None = None) -> "ClientGroup":
        """Return a group whose blocking calls have a deadline, in seconds."""
        return ClientGroup([c.with_options(timeout=timeout) for c in self._clients])

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> "ClientGroup": ...
    def __getitem__(self, index: int | slice) -> "Client | ClientGroup":
        if isinstance(index, slice):
            return ClientGroup(self._clients[index])
        return self._clients[index]

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _GROUP_VERBS:
            refuse(name)
        return _GroupCall(self._clients, name)

    def __repr__(self) -> str:
        return f"<ClientGroup of {len(self._clients)}>"


Sequence.register(ClientGroup)


class _GroupCall:
    """``clients.method``: fans out, then gathers within the deadline of each client."""

    __slots__ = ("_clients", "_name")

    def __init__(self, clients: list[Client], name: str) -> None:
        for client in clients:
            client.__dict__["_target"].check(name)
        self._clients = clients
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all replicas at once and return their results in order."""
        began = time.monotonic()
        futures = [getattr(c.futures, self._name)(*args, **kwargs) for c in self._clients]
        results = []
        for client, future in zip(self._clients, futures, strict=True):
            timeout = client.__dict__["_target"].timeout
            left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
            results.append(future.result(left))
        return results
