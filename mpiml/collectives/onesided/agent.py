"""The thread of a process that serves one-sided memory while its members compute.

MPI makes progress only in a call of MPI, and what other hosts have sent must be applied by
somebody. One thread does both, for everything of a team in this process. It looks again at
once where it has done something; for a while after that, and where it is asked to, as often as
the kernel lets it sleep, about every 75 us: a thread that does not sleep would take the
interpreter from the members at each look. Then every 1 ms, after a second of silence every 2 ms.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mpiml import threads
from mpiml.collectives.messages import rest
from mpiml.collectives.over import OVER, THREADED
from mpiml.collectives.team import Team
from mpiml.errors import ServiceGoneError

__all__ = ["Agent", "agent_of", "refuse_agents"]

_KEY: Final = "agent of one-sided memory"
_SOON: Final = 1e-3  # s, that it looks often after the last thing it did
_SHORT, _LONG = 1e-3, 2e-3  # s between two looks
_SILENT: Final = 1.0  # s, after which it looks less often
_LAST: Final = 5.0  # s, that `close` waits for the thread


class Agent:
    """Calls functions again and again, on a thread that lives as long as there are any. Local."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._lock = threading.Lock()
        self._turns: list[Callable[[], bool]] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._until = 0.0  # until when to look often
        self._calling = threading.Lock()  # held during a round of calls
        self.error: BaseException | None = None  #: what ended the thread
        THREADED.add(self)

    def add(self, turn: Callable[[], bool]) -> None:
        """Call `turn` from now on; it returns whether there was anything to do."""
        with self._lock:
            self._turns = [*self._turns, turn]
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"mpiml agent of {self._title}", daemon=True
                )
                self._thread.start()

    def remove(self, turn: Callable[[], bool]) -> None:
        """Call it no more; when this returns, the last call is over."""
        with self._lock:
            self._turns = [other for other in self._turns if other != turn]
            thread = self._thread if not self._turns else None
            if thread is not None:
                self._thread = None
        self._wake.set()
        with self._calling:
            pass
        if thread is not None:
            thread.join(_LAST)

    def stay(self, seconds: float) -> None:
        """Look often for so long, as after something was done. Local."""
        self._until = max(self._until, time.monotonic() + seconds)

    def close(self) -> None:
        """Call nothing any more."""
        for turn in list(self._turns):
            self.remove(turn)

    def _run(self) -> None:
        me = threading.current_thread()
        last = time.monotonic()
        while self._thread is me and not OVER:
            try:
                with self._calling:
                    busy = any([turn() for turn in self._turns])
            except ServiceGoneError:  # the mail is closed: the end of the team
                return
            except BaseException as error:
                self.error = error  # whoever waits here raises it
                raise
            now = time.monotonic()
            if busy:
                last = now
                rest(0.0)
            elif now - last < _SOON or now < self._until:
                time.sleep(0)
            else:
                self._wake.clear()
                self._wake.wait(_LONG if now - last > _SILENT else _SHORT)


def refuse_agents(team: Team, what: str, instead: str) -> None:
    """Refuse what needs an agent, on all members, where only one thread may call MPI. Local.

    Parameters
    ----------
    team : Team
        The members.
    what, instead : str
        Of the message, as of `mpiml.threads.need_multiple`.
    """
    if team.comm is not None and team.comm.size > 1:
        threads.need_multiple(f"{what} of {team.title}", instead)


def agent_of(team: Team) -> Agent:
    """Return the agent of a team in this process, made once. Local."""
    shared: dict[Any, Any] = team.room.shared
    agent: Agent = shared.setdefault(_KEY, Agent(team.title))
    if _KEY not in team.kept:
        team.kept[_KEY] = agent
        team.closes(agent.close, early=True)  # it uses the mail
    return agent
