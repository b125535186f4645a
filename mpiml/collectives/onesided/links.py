"""What a member sends to the memory of another host: additions, values, questions.

An addition is not waited for. What is added while a message is under way to the host waits and
goes together in the next one, once the first is acknowledged or `_FULL` bytes wait; so a member
that adds faster than the other host applies sends fewer and larger messages, at most `AHEAD` at a
time. `Link.flush` waits until all is applied.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from mpiml.collectives.mail import Channel, Parcel, Sending
from mpiml.collectives.onesided.agent import Agent
from mpiml.collectives.onesided.records import (
    ADD,
    ASSIGN,
    FAILED,
    LOOK,
    MARK,
    READ,
    ROWS,
    SNAPSHOT,
    Ask,
    Said,
    Sparse,
    pack_rows,
)
from mpiml.collectives.team import Team
from mpiml.errors import RankFailedError, ServiceGoneError

__all__ = ["AHEAD", "Link"]

AHEAD: Final = 4  #: messages under way to one host
_FULL: Final = 64 << 10  # bytes that are worth a message of their own
_MOST: Final = 4 << 20  # bytes that may wait for a message; beyond that the member waits
_OFTEN: Final = 16  # additions that may wait before one looks for acknowledgements


class Link:
    """One member's way to the memory of one other host.

    Local: every method. `turn` may be called by another thread.

    Parameters
    ----------
    team : Team
        The members.
    asks, answers : Channel
        To the host and back.
    to : int
        The member that serves the host's memory.
    agent : Agent
        Of this process: what ended it is raised in waits.
    """

    def __init__(
        self, team: Team, asks: Channel, answers: Channel, to: int, agent: Agent
    ) -> None:
        self._team = team
        self._agent = agent
        self._asks, self._answers = asks, answers
        self._to = to
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], list[Sparse]] = {}  # by block and leaf
        self._held = 0  # bytes that wait
        self._calls = 0
        self._sendings: list[Sending] = []
        self._sent = self._done = 0  # messages to be acknowledged, and that have been
        self._numbers = 0
        self._answered: dict[int, tuple[Said, Any]] = {}
        self._into: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        self._failed = ""
        self.seen: Said | None = None  #: the last answer to a marked addition
        self._mark_next = 0

    # -- additions -----------------------------------------------------------------------------

    def add_at(self, block: int, leaf: int, positions: Any, values: Any, scale: float) -> None:
        """Add to elements of a leaf. Both arrays are copied."""
        self._add(block, leaf, Sparse(positions.copy(), values.copy(), scale))

    def add_rows(self, block: int, leaf: int, rows: Any) -> None:
        """Add the rows of a CSR block, which is copied."""
        begin, end = int(rows.indptr[0]), int(rows.indptr[-1])
        indices, values = rows.indices[begin:end].copy(), rows.values[begin:end].copy()
        starts = rows.indptr - begin
        self._add(block, leaf, Sparse(indices, values, rows.coefficients.copy(), starts))

    def _add(self, block: int, leaf: int, add: Sparse) -> None:
        with self._lock:
            self._waiting.setdefault((block, leaf), []).append(add)
            self._held += 16 + add.positions.nbytes + add.values.nbytes
            self._calls += 1
            if self._sent == self._done:
                self._send_waiting(True)
            elif not self._calls % _OFTEN:
                self._turn()
        if self._held > _MOST:
            self.until(lambda: self._held <= _MOST, "adding")

    def write(self, kind: int, block: int, leaf: int, body: Any, scale: float) -> None:
        """Add or assign one leaf, or (-1) all.

        Parameters
        ----------
        kind : int
            ADD or ASSIGN.
        block, leaf : int
            Which.
        body : bytes
            The values; not changed any more.
        scale : float
            Of ADD.
        """
        assert kind in (ADD, ASSIGN)
        self.until(self._room, "writing")  # one message at a time is large enough
        with self._lock:
            self._send_waiting(True)  # in their order
            self._send(Ask(kind, 0, self._mark(), leaf, block, 0, 0, 0, scale), body)

    def mark_next(self) -> None:
        """Have the next addition tell which version it met."""
        self._mark_next = 1

    def unmark(self) -> bool:
        """Take that back; return whether no addition has been marked since."""
        marked, self._mark_next = self._mark_next, 0
        return bool(marked)

    def flush(self) -> None:
        """Wait until everything sent before is applied.

        Raises
        ------
        RankFailedError
            The other host could not, or is gone.
        """
        if self._waiting or self._done != self._sent or self._failed:
            with self._lock:
                self._send_waiting(True)
            self.until(lambda: self._done == self._sent, "waiting for what was added")

    # -- questions -----------------------------------------------------------------------------

    def snapshot(self, block: int, out: Any, clear: bool) -> int:
        """Copy a block between two updates, after what this member has added; its version."""
        ask = Ask(SNAPSHOT, 0, 0, -1, block, 0, int(clear), 0, 0.0)
        return self._ask(ask, out, "a snapshot").version

    def read(self, parts: Sequence[tuple[int, Any]]) -> None:
        """Copy bytes of the host's memory: from where on, into which buffer; all at once."""
        asks = [(Ask(READ, 0, 0, -1, 0, 0, first, len(out), 0.0), out) for first, out in parts]
        for number in [self._begin(ask, out) for ask, out in asks]:
            self._end(number, "reading")

    def begin_read(self, first: int, out: Any) -> Callable[[], bool]:
        """Ask for bytes of the host's memory from `first` on, and do not wait for them.

        Returns
        -------
        function
            Returns whether they are in `out`, once; raises what failed.
        """
        number = self._begin(Ask(READ, 0, 0, -1, 0, 0, first, len(out), 0.0), out)

        def came() -> bool:
            self.turn()
            if number not in self._answered and not self._failed:
                return False
            self._end(number, "reading")
            return True

        return came

    @property
    def applied(self) -> bool:
        """Whether everything that was sent is applied. Does not wait."""
        self.turn()
        return self._done == self._sent and not self._waiting

    def mark(self, block: int) -> Said:
        """Return the version of a block, and how many updates in it are this member's."""
        return self._ask(Ask(MARK, 0, 0, -1, block, 0, 0, 0, 0.0), None, "reading a version")

    def begin_mark(self, block: int) -> int:
        """Ask for the same, without a wait; return the number by which `answer` has it."""
        return self._begin(Ask(MARK, 0, 0, -1, block, 0, 0, 0, 0.0), None)

    def answered(self, number: int, doing: str) -> None:
        """Wait until the answer to a question has come; `answer` has it then."""
        self.until(lambda: number in self._answered, doing)

    def answer(self, number: int) -> Said | None:
        """Return the answer to a question, if it has come."""
        with self._lock:
            found = self._answered.pop(number, None)
        return None if found is None else found[0]

    def forget(self, number: int) -> None:
        """Want an answer no more."""
        with self._lock:
            if self._answered.pop(number, None) is None:
                self._unwanted.add(number)

    def _ask(self, ask: Ask, out: Any, doing: str) -> Said:
        return self._end(self._begin(ask, out), doing)

    def _begin(self, ask: Ask, out: Any) -> int:
        """Send a question, after what waits; return its number."""
        with self._lock:
            self._send_waiting(True)
            self._numbers += 1
            number = self._numbers
            if out is not None:
                self._into[number] = out
            self._send(ask._replace(number=number), None)
        return number

    def _end(self, number: int, doing: str) -> Said:
        """Wait for the answer."""
        self.until(lambda: number in self._answered, doing)
        with self._lock:
            said, body = self._answered.pop(number)
        if said.kind == FAILED:
            raise RankFailedError(f"{self._title(doing)}: {bytes(body).decode()}", (self._to,))
        return said

    def look(self) -> None:
        """Have the other host make progress at once for a while, since one reads there."""
        with self._lock:
            self._send(Ask(LOOK, 0, 0, -1, 0, 0, 0, 0, 0.0), None, False)

    # -- progress ------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Take in what has come, and send what waits; nothing of it is urgent: return False."""
        if self._lock.acquire(blocking=False):
            try:
                self._turn()
            finally:
                self._lock.release()
        return False

    def _turn(self) -> None:
        while (parcel := self._answers.poll(self._to, self._place)) is not None:
            self._take(parcel)
        self._send_waiting(False)

    def _place(self, source: int, head: bytes, nbytes: int) -> Any:
        said = Said.unpack(head)
        # An error's text goes anywhere
        return None if said.kind == FAILED else self._into.pop(said.number, None)

    def _take(self, parcel: Parcel) -> None:
        said = Said.unpack(parcel.head)
        if said.number:
            self._into.pop(said.number, None)
            if said.number in self._unwanted:
                self._unwanted.remove(said.number)
            else:
                self._answered[said.number] = said, parcel.body
            return
        self._done = said.done
        if said.marked:
            self.seen = said
        if said.kind == FAILED and not self._failed:
            self._failed = bytes(parcel.body).decode()

    def _room(self) -> bool:
        return self._sent - self._done < AHEAD

    def _mark(self) -> int:
        marked, self._mark_next = self._mark_next, 0
        return marked

    def _send_waiting(self, now: bool) -> None:
        """Send what waits, if it is worth a message, or `now`."""
        due = now or self._sent == self._done or (self._held >= _FULL and self._room())
        if not self._waiting or not due:
            return
        waiting, self._waiting, self._held = self._waiting, {}, 0
        for (block, leaf), adds in waiting.items():
            body, rows, wide = pack_rows(adds)
            self._send(Ask(ROWS, wide, self._mark(), leaf, block, 0, 0, rows, 0.0), body)

    def _send(self, ask: Ask, body: Any, counts: bool = True) -> None:
        if counts and not ask.number:
            self._sent += 1
        self._sendings = [sending for sending in self._sendings if not sending.test()]
        self._sendings.append(self._asks.send(self._to, ask.pack(), body))

    def until(self, ready: Callable[[], bool], doing: str) -> None:
        """Wait until `ready` returns true; raises what the other host could not do."""
        label = self._title(doing)

        def test() -> bool:
            self.turn()
            if self._agent.error is not None:
                raise ServiceGoneError(
                    f"{label}: the thread that serves memory here ended: {self._agent.error!r}"
                )
            return bool(self._failed) or ready()

        if not ready():
            self._asks.mail.office.until(test, self._team.waiting(label), (self._to,))
        if self._failed:
            raise RankFailedError(f"{label}: {self._failed}", (self._to,))

    def _title(self, doing: str) -> str:
        return f"{self._asks.title}: {doing}, in the memory of {self._team.names[self._to]}"
