"""Which processes of a team have ended: for those that wait for them in MPI.

Where members share memory, or send messages to each other, whoever ends tells the others there.
An exchange of the whole team goes through MPI's own collectives, in which nobody can be told
anything, and MPI's end waits for all processes: so those that end say so beside it, to the
first process, which tells the others once it waits itself. A program that ends as a whole sends
few messages then, and nobody reads them.

Pure: messages are returned and taken as bytes, time is passed in.
"""

import json

__all__ = ["Leavers", "is_farewell"]

_MARK = b"!"  # how a message begins here; those of `mpiml.collectives.ledger` begin with "["
_GRACE = 2.0  # s that what the process has still taken part in has to come to its end


def is_farewell(message: bytes) -> bool:
    """Tell whether a message is for `Leavers.receive`. Local."""
    return message.startswith(_MARK)


class Leavers:
    """The side of one process.

    Local: `leave` and `receive` return the messages to be sent, each with the process it is for.

    Parameters
    ----------
    processes : int
        How many there are.
    here : int
        This one. The first passes on what it is told.
    """

    def __init__(self, processes: int, here: int) -> None:
        self._processes = processes
        self._here = here
        self._gone: dict[int, str] = {}  # process -> how it has ended
        self._known: float | None = None  # since when a wait here has known of the first one

    def leave(self, how: str) -> list[tuple[int, bytes]]:
        """Say that this process ends, and how."""
        return self._tell(
            self._here, how, range(1, self._processes) if self._here == 0 else [0]
        )

    def receive(self, message: bytes) -> list[tuple[int, bytes]]:
        """Take in that another process ends."""
        process, how = json.loads(message[len(_MARK) :])
        self._gone.setdefault(process, how)
        return [] if self._here else self._tell(process, how, range(1, self._processes))

    def _tell(
        self, process: int, how: str, others: "list[int] | range"
    ) -> list[tuple[int, bytes]]:
        message = _MARK + json.dumps([process, how]).encode()
        return [(p, message) for p in others if p != process and p not in self._gone]

    def end(self, since: float, now: float) -> str:
        """Tell why a wait for all members cannot end; nothing if it still may. Local.

        Parameters
        ----------
        since, now : float
            When it was looked at for the first time, and the time, in seconds.
        """
        if not self._gone:
            return ""
        if self._known is None:
            self._known = now
        if now - max(since, self._known) < _GRACE:
            return ""
        return next(iter(self._gone.values()))  # the first: the others may have ended for it
