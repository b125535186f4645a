"""``client.futures`` of a parameter server: pushes that do not wait."""

from collections.abc import Sequence
from typing import Any

from mpiml.errors import UnknownMethodError

__all__ = ["Posting"]


class Posting:
    """What does not wait: each returns a `mpiml.Future`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownMethodError(
            f"{self._client!r}.futures: expected push or clock, got {name!r}"
        )

    def push(
        self,
        gradient: Any,
        version: int,
        names: Sequence[str] | None = None,
        indices: Any = None,
    ) -> Any:
        """Push a gradient, which may be changed at once; see `ParameterClient.push`.

        The future's result is what `ParameterClient.push` returns.
        """
        client = self._client
        parts = client._parts(gradient, names, indices, "push")
        client._reap()
        if parts is None:
            return client._shards[0].futures.skip(client._worker)
        with client._lock:
            futures = client._post(version, parts, _itself)
            client._sent.extend((future, seen == 0) for seen, future in enumerate(futures))
        return futures[0]

    def clock(self) -> Any:
        """Tell the servers that an iteration is over; see `ParameterClient.clock`."""
        client = self._client
        client._check_worker("clock")
        client._reap()
        with client._lock:
            future = client._shards[0].futures.clock(client._worker)
            client._sent.append((future, True))
        return future


def _itself(value: Any) -> Any:
    return value
