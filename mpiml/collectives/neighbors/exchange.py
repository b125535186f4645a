"""What neighbours send each other in a call: blocks of memory, with credit and refusals.

A member sends a snapshot of what it has, and waits for those it hears from, and for nobody
else. It may be `AHEAD` calls ahead of those it sends to: what comes from one of them in a
later call says that it has taken all before; where nothing comes that way, a word of credit
does. Messages carry the number of the call, so that what a failed call has left behind is
dropped later.
"""

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from mpiml.collectives.labels import Label, refused
from mpiml.collectives.mail import INLINE, Parcel, Receiving, mail_of
from mpiml.collectives.neighbors.edges import Edges
from mpiml.collectives.neighbors.leaves import Leaves
from mpiml.collectives.neighbors.snapshots import Snapshot, Snapshots
from mpiml.collectives.neighbors.wording import mismatch, refusal
from mpiml.collectives.team import Team

__all__ = ["AHEAD", "Block", "Exchange", "exchange_of"]

AHEAD: Final = 2  #: calls that a member may be ahead of those it sends to
_HEAD: Final = struct.Struct("<QQBd")  # call, hash of its label, kind, factor
_CREDIT: Final = struct.Struct("<QQ")  # call; hash of its label, where it has failed
_DATA, _NO = 0, 1
_TEXT: Final = 1 << 16  # bytes of a text, at most
_KNOWN: Final = 256  # labels whose text is not sent again
_KEY: Final = "neighbors"
_EAGER: Final = 100  # looks at what has come before a wait begins


class _Stale(Exception):
    """A message of a call before, to be dropped."""


class Block(NamedTuple):
    """What came from one source."""

    source: int
    factor: float  #: the sender's, for this receiver
    memory: Any  #: a buffer of bytes


class Exchange:
    """One member's messages to and from its neighbours.

    Collective over neighbours: `trade`; all members make the same calls in the same order.

    Parameters
    ----------
    team : Team
        The members.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self._mail = mail_of(team)
        self._data = self._mail.open("messages of neighbours")
        self._credit = self._mail.open("credit of neighbours")
        self._calls = 0
        self._failed: deque[int] = deque(maxlen=1024)  # calls in which messages may be left
        self._sent: deque[tuple[int, Label]] = deque(maxlen=8)  # what has been sent lately
        self._ahead: dict[int, deque[int]] = {}  # by target: calls it has not taken yet
        self._told: dict[int, set[int]] = {}  # by target: hashes of labels whose text it has
        self._heard: dict[tuple[int, int], str] = {}  # by source and hash: the text
        self._office = self._mail.office
        self._snapshots = Snapshots(self._office)
        self._alone = len(team.housemates) == 1  # no other member reads memory of this process

    def trade(
        self, edges: Edges, leaves: Leaves, label: Label,
        use: Callable[[Any, Sequence[Block]], None],
    ) -> None:  # fmt: skip
        """Send a block to the targets, and use what comes from the sources.

        Parameters
        ----------
        edges : Edges
            Who they are.
        leaves : Leaves
            What the block is made of; of the same length on neighbours.
        label : Label
            What neighbours compare.
        use : function
            Called with the own block, or None where none was made, and those of the sources
            in their order; they are not valid any more afterwards.

        Raises
        ------
        UsageError
            A neighbour does something else, or cannot take part.
        """
        self._calls += 1
        try:
            self._trade(edges, leaves, label, use)
        except BaseException:
            self._failed.append(self._calls)
            with suppress(Exception):
                self._say_what_was_expected(edges, label)
            raise

    def _trade(
        self, edges: Edges, leaves: Leaves, label: Label,
        use: Callable[[Any, Sequence[Block]], None],
    ) -> None:  # fmt: skip
        try:
            self._wait_for_credit(edges.sends, label)
        except Exception as error:
            self._say_no(edges, refused(label.head.partition("(")[0], error))
            raise
        snapshot = self._send(edges, leaves, label) if edges.sends else None
        try:
            incoming = _Incoming(self, edges, leaves.nbytes, label)
            blocks = incoming.receive() if edges.receives else []
            try:
                use(None if snapshot is None else snapshot.memory, blocks)
            finally:
                incoming.release()
            for source in edges.unheard:  # the others hear of this in the next message
                self._credit.post(source, _CREDIT.pack(self._calls, 0), -1, None)
        finally:
            if snapshot is not None:
                self._snapshots.let_fly(snapshot)

    def refuse(self, edges: Edges, label: Label) -> None:
        """Tell those who wait for this member's block that none will come; `label` says why.

        Local, but counts as a call.
        """
        self._calls += 1
        self._failed.append(self._calls)
        self._say_no(edges, label)

    def _say_no(self, edges: Edges, label: Label) -> None:
        head = _HEAD.pack(self._calls, label.hash, _NO, 1.0) + label.text().encode()[:_TEXT]
        for to in edges.sends:
            self._data.send(to, head)
            self._sends(to)

    def skip(self) -> None:
        """Count a call in which this member has no part. Local."""
        self._calls += 1

    # -- sending -------------------------------------------------------------------------------

    def _send(self, edges: Edges, leaves: Leaves, label: Label) -> Snapshot:
        """Begin to send a block to the targets."""
        nbytes, content = leaves.nbytes, None
        if nbytes <= INLINE and self._alone:  # each message has a copy of its own
            snapshot, content = Snapshot(None), leaves.content()
        else:
            snapshot = self._snapshots.take(nbytes)
            leaves.copy_to(snapshot.memory)
            content = memoryview(snapshot.memory)
        call, hash_, text = self._calls, label.hash, b""
        self._sent.append((call, label))
        for to, factor in edges.sends.items():
            head = _HEAD.pack(call, hash_, _DATA, factor)
            told = self._told.get(to)
            if told is None or hash_ not in told:
                text = text or label.text().encode("utf-8", "replace")[:_TEXT]
                head += text
                self._tell(to, hash_)
            snapshot.sendings.append(self._data.post(to, head, nbytes, content))
            self._sends(to)
        return snapshot

    def _tell(self, to: int, hash_: int) -> None:
        """Note that a target gets the text of a label."""
        told = self._told.setdefault(to, set())
        if len(told) >= _KNOWN:
            told.clear()
        told.add(hash_)

    def _sends(self, to: int) -> None:
        """Note that a target is being sent something in this call."""
        ahead = self._ahead.get(to)
        if ahead is None:
            ahead = self._ahead[to] = deque()
        ahead.append(self._calls)

    def _wait_for_credit(self, targets: Mapping[int, float], label: Label) -> None:
        late = self._late(targets)
        if late:
            self._office.progress()
        if self._credit.some():
            self._take_credit()
            late = self._late(targets)
        if not late:
            return
        waiting = self.team.waiting(label)

        def there() -> bool:
            self._take_credit()
            for to in late:  # where a call has failed here, what came in it may still be there
                for head in self._data.peek(to):
                    self._taken(to, _HEAD.unpack_from(head)[0] - 1)
            late[:] = [to for to in late if len(self._ahead[to]) >= AHEAD]
            return not late

        def look(_: Any) -> None:
            self._office.look_for(late)
            waiting(late)

        self._office.until(there, look)

    def _late(self, targets: Mapping[int, float]) -> list[int]:
        """Return the targets that have yet to take what calls before have sent."""
        ahead = self._ahead
        return [to for to in targets if to in ahead and len(ahead[to]) >= AHEAD]

    def _take_credit(self) -> None:
        while (parcel := self._credit.poll(look=False)) is not None:
            call, hash_ = _CREDIT.unpack_from(parcel.head)
            self._taken(parcel.source, call)
            if not hash_ or call in self._failed:
                continue
            text = parcel.head[_CREDIT.size :].decode("utf-8", "replace")
            for number, label in self._sent:
                if number == call and label.hash != hash_:
                    raise mismatch(self.team, parcel.source, call, text, label, call)

    def _say_what_was_expected(self, edges: Edges, label: Label) -> None:
        """Tell sources that hear nothing from here what they should have sent.

        They compare: this call may have failed before their message came.
        """
        said = _CREDIT.pack(self._calls, label.hash) + label.text().encode()[:_TEXT]
        for source in edges.unheard:
            self._credit.send(source, said)

    def _taken(self, target: int, call: int) -> None:
        """Note that a target has taken the blocks of calls up to this one."""
        ahead = self._ahead.get(target)
        while ahead and ahead[0] <= call:
            ahead.popleft()

    # -- receiving -----------------------------------------------------------------------------

    def _check(self, source: int, head: bytes, size: int, nbytes: int, label: Label) -> float:
        """Return the sender's factor; raise unless the message is that of this call.

        Notes what it says otherwise.
        """
        call, hash_, kind, factor = _HEAD.unpack_from(head)
        self._taken(source, call - 1)
        text = "" if len(head) == _HEAD.size else head[_HEAD.size :].decode("utf-8", "replace")
        if text and kind == _DATA:
            if len(self._heard) >= _KNOWN * max(len(self._told), 1) * 2:
                self._heard.clear()
            self._heard[source, hash_] = text
        if call in self._failed:  # nobody has taken it then
            self._credit.send(source, _CREDIT.pack(call, 0))
            raise _Stale
        if kind == _NO:
            raise refusal(self.team, source, text)
        if call == self._calls and hash_ == label.hash and size == nbytes:
            return float(factor)
        text = self._heard.get((source, hash_), "")
        raise mismatch(self.team, source, call, text, label, self._calls)


class _Incoming:
    """What comes in during one call. Local."""

    __slots__ = (
        "_begun",
        "_blocks",
        "_exchange",
        "_label",
        "_memories",
        "_nbytes",
        "_parcels",
        "_pending",
        "_sources",
    )

    def __init__(self, exchange: Exchange, edges: Edges, nbytes: int, label: Label) -> None:
        self._exchange = exchange
        self._nbytes = nbytes
        self._label = label
        self._blocks: dict[int, Block] = {}
        self._sources = edges.sources
        self._pending: dict[int, Receiving | None] = dict.fromkeys(edges.sources)
        self._begun = False  # whether a body has been on its way
        self._parcels: list[Parcel] = []
        self._memories: list[Any] = []

    def receive(self) -> list[Block]:
        """Return what has come from the sources, in their order."""
        exchange, pending = self._exchange, self._pending
        office = exchange._office
        seen = -1
        try:
            for _ in range(_EAGER if office.outside else 1):
                office.progress(True)
                if office.news == seen and not self._begun:  # as at the look before
                    continue
                seen = office.news
                if self._there():
                    break
            else:
                self._wait()
        except BaseException:
            for parcel in self._parcels:
                parcel.release()
            for receiving in pending.values():
                if receiving is not None:
                    receiving.leave()
            raise
        return [self._blocks[source] for source in self._sources]

    def _wait(self) -> None:
        exchange, pending = self._exchange, self._pending
        waiting = exchange.team.waiting(self._label)

        def look(_: Any) -> None:
            # whose bodies are coming have sent all that is waited for
            late = [source for source, one in pending.items() if one is None or not one.coming]
            exchange._office.look_for(late)
            waiting(list(pending))

        exchange._office.until(self._there, look)

    def release(self) -> None:
        """Give the memory of the blocks back."""
        for parcel in self._parcels:
            parcel.release()
        for memory in self._memories:
            self._exchange._snapshots.give_back(memory)

    def _there(self) -> bool:
        if self._exchange._credit.some():
            self._exchange._take_credit()  # or the word that what was sent did not fit
        pending = self._pending
        for source, receiving in list(pending.items()):
            if receiving is None:
                self._take(source)
            else:
                self._test(source, receiving)
        return not pending

    def _take(self, source: int) -> None:
        """Take the message of a source, if it is there; its body may be on its way yet."""
        exchange = self._exchange
        while (arrival := exchange._data.take(source)) is not None:
            try:
                if arrival.tag or arrival.sending is not None:
                    receiving = exchange._data.receive(source, self._into, borrow=True)
                    receiving.begin(arrival)
                    self._pending[source] = receiving
                    self._begun = True
                    self._test(source, receiving)
                else:  # all of it is here
                    factor = exchange._check(
                        source, arrival.head, arrival.nbytes, self._nbytes, self._label
                    )
                    self._blocks[source] = Block(source, factor, arrival.body)
                    del self._pending[source]
                return
            except _Stale:
                continue

    def _test(self, source: int, receiving: Receiving) -> None:
        parcel = receiving.test(look=False)
        if parcel is not None:
            factor = _HEAD.unpack_from(parcel.head)[3]
            self._parcels.append(parcel)
            self._blocks[source] = Block(source, factor, parcel.body)
            del self._pending[source]

    def _into(self, source: int, head: bytes, size: int) -> Any:
        """Return memory for a body; None: it stays where it lies."""
        exchange = self._exchange
        exchange._check(source, head, size, self._nbytes, self._label)
        team = exchange.team
        if team.ranks[source] == team.rank:
            return None
        memory = exchange._snapshots.memory(self._nbytes)
        self._memories.append(memory)
        return memory


def exchange_of(team: Team) -> Exchange:
    """Return a member's exchange, made once. Collective over the members, the first time."""
    found: Exchange | None = team.kept.get(_KEY)
    if found is None:
        mail_of(team)
        with team.making:
            found = team.kept.get(_KEY)
            if found is None:
                found = team.kept[_KEY] = Exchange(team)
    return found
