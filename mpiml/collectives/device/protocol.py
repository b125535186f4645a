"""What device memory must be able to do, for all that reduces it: a thin interface.

`mpiml.collectives.device.cuda` is the one implementation; the tests have another, of host
memory, so that everything but that one file runs on machines without a device. A place in
device memory is a plain number, its address.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from mpiml.collectives.device.stages import Event, Lane

__all__ = ["Device", "Slab"]


class Slab(Protocol):
    """A block of device memory; freed or kept for another use when nothing refers to it."""

    pointer: int
    nbytes: int

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array of the device's library in this memory; it keeps the slab."""


class Device(Protocol):
    """One device, as a thread of any member sees it."""

    index: int
    identity: str  #: differs between any two devices of a host
    title: str  #: for people

    def slab(self, nbytes: int, exported: bool) -> Slab:
        """Take memory, not zeroed. `exported`: another process will map it."""

    def handle(self, slab: Slab) -> bytes:
        """Return by what another process maps the slab."""

    def map(self, handle: bytes) -> int:
        """Map another process's slab; return its address here. Stays mapped."""

    def reach(self, index: int) -> None:
        """Make another device's memory, of this process, readable here; raise if it cannot."""

    def write(self, pointer: int, data: bytes) -> None:
        """Copy a few bytes to the device, and wait."""

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Copy a few bytes from it."""

    def zero(self, pointer: int, nbytes: int) -> None:
        """Begin to fill memory with zeros."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Begin to copy memory that this device reaches."""

    def combine(
        self, members: Any, dtype: str, op: str, span: tuple[int, int], to: tuple[int, int]
    ) -> None:
        """Begin to combine bytes `span` of all members' memory; write them to members `to`."""

    def divide(self, array: Any, divisor: int) -> None:
        """Begin to divide an array of the device's library, in place."""

    def table(self, pointers: Sequence[int]) -> Any:
        """Return the members' addresses as `combine` wants them."""

    def settle(self) -> None:
        """Wait for all that anybody in this process has begun on the device."""

    def mark(self) -> Event:
        """Return the point where the calling thread is on the device, in any library."""

    def finish(self) -> None:
        """Wait for what this class has begun."""

    def lanes(self) -> tuple[Lane, Lane]:
        """Return one lane to the host and one to the device."""

    def pin(self, memory: Any) -> Any:
        """Pin a NumPy array of bytes; it is so until the object returned is gone."""
