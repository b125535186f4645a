"""Which processes of a team have ended: for those that wait for them in MPI.

Where members share memory, or send messages to each other, whoever ends tells the others there.
An exchange of the whole team goes through MPI's own collectives, in which nobody can be told
anything, and MPI's end waits for all processes: so those that end say so beside it. One that
ends by an error tells all. One that ends in order tells the first process, which takes that in
at its own end, and tells the others where it waits itself, or ends before them. So nothing is
left that nobody receives, where all end in order within `PATIENCE`.

Pure: messages are returned and taken as bytes, time is passed in.
"""

import json
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["PATIENCE", "Leavers", "is_farewell"]

PATIENCE: Final = 2.0  #: s, that the first process waits at its end for those that end in order
_MARK: Final = b"!"  # how a message begins here; those of `mpiml.collectives.ledger`: with "["
_GRACE: Final = 2.0  # s that what the process has still taken part in has to come to its end

_Outgoing = list[tuple[int, bytes]]  # (process, message)


def is_farewell(message: bytes) -> bool:
    """Tell whether a message is for `Leavers.receive`. Local."""
    return message.startswith(_MARK)


class Leavers:
    """The side of one process.

    Local: `leave`, `give_up` and `receive` return the messages to be sent.

    Parameters
    ----------
    processes : int
        How many there are.
    here : int
        This one. The first passes on what it is told.
    """

    def __init__(self, processes: int, here: int) -> None:
        self._others = [process for process in range(processes) if process != here]
        self._here = here
        self._gone: dict[
            int, tuple[str, bool]
        ] = {}  # process -> how; whether it is a consequence
        self._passed = False  # whether the others have been told of one
        self._known: float | None = None  # since when a wait here has known of the first one

    @property
    def alone(self) -> bool:
        """Whether all others have ended."""
        return len(self._gone) == len(self._others)

    def leave(self, how: str, failed: bool = False, consequence: bool = False) -> _Outgoing:
        """Say that this process ends.

        Parameters
        ----------
        how : str
            A clause for an error's text.
        failed : bool
            Whether it ends by an error.
        consequence : bool
            Whether that error is one that tells of another process.
        """
        self._passed = True  # from now on it passes nothing on
        to: Iterable[int] = self._others if failed else [] if self._here == 0 else [0]
        return self._tell(to, self._here, how, consequence)

    def give_up(self, how: str) -> _Outgoing:
        """Tell those that have not ended, where the first process waits for them no more."""
        return self._tell(self._others, self._here, how, False)

    def receive(self, message: bytes) -> _Outgoing:
        """Take in that another process ends."""
        process, how, consequence, told = json.loads(message[len(_MARK) :])
        self._gone.setdefault(process, (how, consequence))
        if self._here or told or self._passed:  # one name suffices: no wait can end any more
            return []
        self._passed = True
        return self._tell(self._others, process, how, consequence)

    def _tell(self, to: Iterable[int], process: int, how: str, consequence: bool) -> _Outgoing:
        to = [other for other in to if other not in self._gone]
        told = len(to) > 1 or self._here == 0  # or does the first process pass it on?
        text: list[Any] = [process, how, consequence, told]
        message = _MARK + json.dumps(text).encode()
        return [(other, message) for other in to]

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
        # The causes first, and of these the first that was heard of.
        return min(self._gone.values(), key=lambda found: found[1])[0]
