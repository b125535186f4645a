"""A message on its way, and one that has come: what mail hands to those who send and receive."""

from typing import Any

from mpiml.collectives.messages import Waiting, adopt
from mpiml.collectives.office import Office
from mpiml.collectives.team import Team

__all__ = ["Parcel", "Sending", "waiting_in"]


class Sending:
    """A message on its way. Local. It arrives even if this is dropped.

    Its body may be changed once it is done: received, if by a member of the same process; or
    in the hands of MPI.
    """

    __slots__ = ("_kept", "_office", "_out", "_requests", "to")

    def __init__(self, office: Office, to: int, kept: Any) -> None:
        self.to = to
        self._office = office
        self._kept = kept
        self._requests: list[Any] = []
        self._out = False  # whether a member of this process has yet to take it

    def test(self) -> bool:
        """Return whether it is done."""
        if self._out:
            return False
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        if self._requests:
            return False
        self._kept = None
        return True

    def wait(self, label: Any) -> None:
        """Wait until it is done; raises what ends the waits of the team.

        Parameters
        ----------
        label
            What is waited in; or what `Team.waiting` returned.
        """
        office = self._office
        office.until(self.test, waiting_in(office.team, label), (self.to,))

    def taken(self) -> None:
        """Note that a member of this process has it."""
        self._out = False
        self._kept = None
        self._office.tell()

    def __del__(self) -> None:
        if self._requests:  # MPI may still read there
            adopt(self._requests, self._kept)


class Parcel:
    """A message that has come.

    Attributes
    ----------
    source : int
        The member that sent it.
    head : bytes
        What it says.
    body : memoryview or None
        Its body, as bytes; where it was asked for with `borrow`, perhaps the sender's memory:
        read-only, and to be given back by `release`.
    """

    __slots__ = ("_sending", "body", "head", "source")

    def __init__(self, source: int, head: bytes, body: Any, sending: Sending | None) -> None:
        self.source = source
        self.head = head
        self.body = body
        self._sending = sending

    def release(self) -> None:
        """Let the sender have its memory back; the body must not be read any more."""
        sending, self._sending = self._sending, None
        if sending is not None:
            self.body = None
            sending.taken()


def waiting_in(team: Team, label: Any) -> Any:
    """Return what a wait calls from time to time, given its label or that itself. Local."""
    return label if isinstance(label, Waiting) else team.waiting(label)
