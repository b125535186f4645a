"""The store of `torch.distributed` over mpiml's messages: no address, no port.

Torch's C++ code calls a store that is written in Python by these names: ``set``, ``get``,
``add``, ``wait``, ``check``, ``compare_set``, ``append``, ``multi_get``, ``multi_set``,
``getNumKeys``, ``deleteKey``, ``has_extended_api`` and ``clone``. Queues and ``list_keys`` it
never passes on, so no store of this kind has them.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from mpiml.board import BoardClient
from mpiml.errors import DeadlineError

__all__ = ["RoleStore", "StoreTimeoutError"]


class StoreTimeoutError(DeadlineError, dist.DistStoreError):
    """Keys did not appear in time; a `DistStoreError` too, which torch's own code expects."""


class RoleStore(dist.Store):  # type: ignore[misc,name-defined]
    """Keys and values that the nodes of a role share; they live with its replica 0.

    Local: each call is one message to replica 0 and its answer. Safe from any thread, torch's
    own included. Made by `mpiml.torch.init_process_group`.

    Parameters
    ----------
    board
        The board of the role, for the node that asks.
    """

    def __init__(self, board: BoardClient) -> None:
        super().__init__()
        self._board = board

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, whether or not there is one."""
        self._board.ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Return a value; wait for it, at most the timeout of the store."""
        return self._values([key])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, which is 0 before the first time, and return the sum."""
        return int(self._board.ask("add", key, int(value)))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Write `desired_value` where `expected_value` stands; return what stands there then."""
        wanted = _bytes(expected_value), _bytes(desired_value)
        return bytes(self._board.ask("compare_set", key, *wanted))

    def append(self, key: str, value: str | bytes) -> None:
        """Write a value behind what stands there."""
        self._board.ask("append", key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values; wait for them as `get` does."""
        return self._values(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values at once."""
        self._board.ask("set", list(keys), [_bytes(value) for value in values])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._board.ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist, at most `timeout` or the timeout of the store.

        Raises
        ------
        StoreTimeoutError
            If they do not by then.
        """
        self._wait("wait", keys, timeout)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._board.ask("count"))

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return bool(self._board.ask("delete", key))

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` are one message each."""
        return True

    def clone(self) -> "RoleStore":
        """Return this store, which any number of threads may use."""
        return self

    # what the C++ code looks for
    getNumKeys = num_keys
    deleteKey = delete_key

    def _values(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self._wait("get", keys, None)
        return values

    def _wait(
        self, operation: str, keys: Sequence[str], timeout: timedelta | None
    ) -> list[bytes]:
        seconds = (timeout or self.timeout).total_seconds()
        try:
            return self._board.ask(operation, list(keys), timeout=seconds)  # type: ignore[no-any-return]
        except DeadlineError as error:
            raise StoreTimeoutError(str(error)) from None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
