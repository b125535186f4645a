"""Every exception mpiml raises on purpose, as one tree.

MpimlError
├── UsageError            the caller can fix it (also a ValueError)
├── GraphMismatchError    ranks did not build the same program
├── PlacementError        the program does not fit the ranks it was given
├── UnknownMethodError    a service has no such public method (also an AttributeError)
├── RemoteError           a remote exception that cannot be pickled, or the remote traceback
├── DeadlineError         nothing arrived in time (also a TimeoutError)
├── ServiceGoneError      the service failed, ended or lost its rank
├── RankFailedError       a peer process is gone; carries its world ranks
└── SharedMemoryError     a host has no room for an arena (also a MemoryError)

`Stopped` stands outside, as a BaseException: ``except Exception`` must not swallow the
end of a program.
"""

__all__ = [
    "DeadlineError",
    "GraphMismatchError",
    "MpimlError",
    "PlacementError",
    "RankFailedError",
    "RemoteError",
    "ServiceGoneError",
    "SharedMemoryError",
    "Stopped",
    "UnknownMethodError",
    "UsageError",
]


class MpimlError(Exception):
    """Base of all errors that mpiml raises on purpose."""


class UsageError(MpimlError, ValueError):
    """An argument or a call order is wrong; the message says what to do instead."""


class GraphMismatchError(MpimlError):
    """The ranks did not build the same program; names the first difference and the odd ranks."""


class PlacementError(MpimlError):
    """The nodes of a program do not fit the ranks, hosts or devices there are."""


class UnknownMethodError(MpimlError, AttributeError):
    """A service has no public method of this name; distinct from the user's AttributeError."""


class RemoteError(MpimlError):
    """What happened on another rank, as text.

    It stands as ``__cause__`` under a remote exception (its text is the remote traceback),
    or in the exception's place where that cannot be pickled.
    """


class DeadlineError(MpimlError, TimeoutError):
    """A reply, item or stop did not arrive before its deadline. The call goes on remotely."""


class ServiceGoneError(MpimlError):
    """The service failed, has stopped or lost its rank; ``__cause__`` is why, where known."""


class RankFailedError(MpimlError):
    """A peer process died; `ranks` holds its ranks in the program's communicator."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SharedMemoryError(MpimlError, MemoryError):
    """A host cannot give the memory that its ranks would share; the message says how much."""


class Stopped(BaseException):
    """The program is stopping: every wait and new call in a body raises this."""
