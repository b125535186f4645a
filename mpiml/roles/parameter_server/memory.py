"""The memory of a server: what its updates change, and what pulls get while these go on.

It is private, or shared with the workers of the server's host. A private block is never copied
for a pull: who pulls gets the block itself, and the next update, if it comes before all of these
have let go, changes a copy. A shared block is updated in place behind a gate
(`mpiml._native.Gate`), so that a worker of the host copies it between two updates, without a
message; for other hosts it is copied once for each version that is asked for.

Shared memory has no name: workers open the server's descriptor by way of ``/proc``, and nothing
is left behind however the program ends.
"""

import os
import secrets
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from mpiml import _native
from mpiml.errors import RankFailedError
from mpiml.roles.parameter_server.plan import LINE

__all__ = ["Address", "Private", "Shared", "SharedView", "memory_of"]

_TOKEN: Final = 16  # bytes, at the beginning of shared memory: that it is the one that is meant
_SIDES: Final = 2  # of the gate: the server that writes, and workers that copy
_SLICE_US: Final = 50_000  # how long to wait at the gate before looking around
_PATIENCE: Final = 30.0  # s, after which who holds the gate must have died


class Address(NamedTuple):
    """Where shared memory is to be found."""

    pid: int
    fd: int
    token: bytes
    words: int  #: int64 words that come with it
    phase: int  #: where its data begins, modulo a cache line
    nbytes: int  #: of the data


class _Place(NamedTuple):
    """At which bytes of shared memory the parts begin."""

    words: int
    gate: int
    data: int
    end: int


def _place(words: int, phase: int, nbytes: int) -> _Place:
    gate = -(-(LINE + 8 * words) // 128) * 128
    data = gate + _native.gate_bytes(_SIDES) + phase
    return _Place(LINE, gate, data, data + max(nbytes, 1))


class Private:
    """Memory of the server alone. Not safe from several threads.

    Parameters
    ----------
    nbytes, phase : int
        How much, and where it begins, modulo a cache line.
    renew : callable
        Called with the memory: at once, and after each change of the place.
    """

    address: Address | None = None
    words: Any = None

    def __init__(self, nbytes: int, phase: int, renew: Callable[[Any], None]) -> None:
        self._nbytes, self._phase, self._renew = nbytes, phase, renew
        self._block = self._new()
        self._lent: Callable[[], Any] = _nobody
        renew(self._block)

    def _new(self) -> Any:
        raw = np.empty(self._nbytes + 2 * LINE, np.uint8)
        begin = -raw.ctypes.data % LINE + self._phase
        return raw[begin : begin + self._nbytes]

    def begin(self) -> None:
        """Begin an update: what pulls were given does not change any more."""
        if self._lent() is not None:
            block = self._new()
            _native.copy(block.data, self._block.data)
            self._block, self._lent = block, _nobody
            self._renew(block)

    def end(self, updates: int = 1) -> None:
        """End an update, or a change that stands for several."""

    def snapshot(self) -> Any:
        """Return the bytes as they are now; they stay so."""
        lent = self._lent()
        if lent is None:
            # Not a slice: a view of a slice holds what the slice is of, and not the slice.
            lent = np.frombuffer(self._block.data, np.uint8)
            self._lent = weakref.ref(lent)
        return lent

    def close(self) -> None:
        """Let go of it."""


class Shared:
    """Memory that the workers of this host map. Not safe from several threads of the server.

    Parameters
    ----------
    nbytes, phase, renew
        As for `Private`.
    words : int
        How many words, int64 and zero, the server tells its workers something by.

    Raises
    ------
    OSError
        There is no room, or the system has no memory without names.
    """

    def __init__(
        self, nbytes: int, phase: int, renew: Callable[[Any], None], words: int
    ) -> None:
        place = _place(words, phase, nbytes)
        self._fd = os.memfd_create("mpiml parameters", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._fd, 0, place.end)
            memory = memoryview(_native.Mapping(self._fd, place.end))
        except BaseException:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(_TOKEN)
        memory[:_TOKEN] = token
        self.address = Address(os.getpid(), self._fd, token, words, phase, nbytes)
        self.words = np.frombuffer(memory, np.int64, words, place.words)
        self._gate = _gate(memory, place, 0)
        self._data = memory[place.data : place.data + nbytes]
        self._copy: Callable[[], Any] = _nobody
        renew(self._data)

    def begin(self) -> None:
        """Begin an update: nobody copies meanwhile."""
        end = time.monotonic() + _PATIENCE
        while not self._gate.enter(_SLICE_US):
            if time.monotonic() > end:
                raise RankFailedError(
                    f"ParameterServerNode: a worker of this host has been copying the parameters "
                    f"for {_PATIENCE:g} s. It has died, or a debugger holds it."
                )
        self._copy = _nobody

    def end(self, updates: int = 1) -> None:
        """End an update, or a change that counts as several."""
        self._gate.leave(updates)

    def snapshot(self) -> Any:
        """Return the bytes as they are now; they stay so."""
        copy = self._copy()
        if copy is None:
            copy = np.frombuffer(memoryview(_native.take(max(1, len(self._data)))), np.uint8)
            copy = copy[: len(self._data)]
            _native.copy(copy.data, self._data)
            self._copy = weakref.ref(copy)
        return copy

    def close(self) -> None:
        """Let go of it; who has mapped it may read on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SharedView:
    """A worker's view of a server's `Shared` memory. Safe from several threads.

    Attributes
    ----------
    words : ndarray
        (words,) int64
    """

    def __init__(self, memory: memoryview, address: Address) -> None:
        place = _place(address.words, address.phase, address.nbytes)
        self.words = np.frombuffer(memory, np.int64, address.words, place.words)
        self._gate = _gate(memory, place, 1)
        self._data = memory[place.data : place.data + address.nbytes]

    @classmethod
    def open(cls, address: Address) -> "SharedView | None":
        """Return the view; None where this process cannot see it, as on another host."""
        with suppress(OSError):
            fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                end = _place(address.words, address.phase, address.nbytes).end
                if os.fstat(fd).st_size != end:
                    return None
                memory = memoryview(_native.Mapping(fd, end))
            finally:
                os.close(fd)
            if memory[:_TOKEN] == address.token:
                return cls(memory, address)
        return None

    @property
    def version(self) -> int:
        """How many updates there have been."""
        return int(self._gate.version())

    def copy_to(self, out: Any) -> int | None:
        """Copy the bytes between two updates; return how many updates there were.

        None: the server has been within one for a while.
        """
        found: int | None = self._gate.snapshot(self._data, out, _SLICE_US)
        return found


def memory_of(
    nbytes: int, phase: int, renew: Callable[[Any], None], words: int, shared: bool
) -> Private | Shared:
    """Return memory for a server, shared if it is wanted and possible. Local."""
    if shared:
        with suppress(OSError, AttributeError):  # no room; no memfd_create
            return Shared(nbytes, phase, renew, words)
    return Private(nbytes, phase, renew)


def _gate(memory: memoryview, place: _Place, side: int) -> Any:
    nbytes = _native.gate_bytes(_SIDES)
    return _native.Gate(memory[place.gate : place.gate + nbytes], side, _SIDES)


def _nobody() -> None:
    return None
