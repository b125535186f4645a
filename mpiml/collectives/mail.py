"""Messages between single members of a team, wherever they live.

Members that are threads of one process hand memory over; others send by MPI, on a duplicate of
the team's communicator. There one message tells whose it is and how long its body; a body that
is not small follows as another, straight into the receiver's array. Whoever waits takes in
what has come for all members of its process, so nothing depends on who waits for what.
"""

import itertools
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mpiml.arrays import as_buffer
from mpiml.collectives.arrivals import Apart, Arrival
from mpiml.collectives.messages import Waiting, adopt
from mpiml.collectives.office import Office
from mpiml.collectives.parcels import Parcel, Sending, waiting_in
from mpiml.collectives.team import Team
from mpiml.errors import UsageError

__all__ = ["INLINE", "Channel", "Mail", "Parcel", "Receiving", "Sending", "mail_of"]

INLINE: Final = 65536  #: bytes of a body that come with the head, and are copied when sent

_HEAD: Final = struct.Struct("<IIIiIq")  # channel, source, target, tag of the body, lengths
_LINE: Final = 16  # bytes; where a body lies in its message is a multiple of that
_TAGS: Final = 16384  # tags of bodies, after that of heads; MPI has 32767 at least
_KEY: Final = "mail"


class Receiving:
    """A message to come: the next one of its channel and source.

    Local. Of several for one source, the first to be tested takes the first message.
    """

    __slots__ = ("_arrival", "_borrow", "_channel", "_into", "_memory", "_requests", "source")

    def __init__(self, channel: "Channel", source: int | None, into: Any, borrow: bool) -> None:
        self.source = source
        self._channel = channel
        self._into = into
        self._borrow = borrow
        self._arrival: Arrival | None = None
        self._memory: Any = None
        self._requests: list[Any] = []

    def test(self, look: bool = True) -> Parcel | None:
        """Return the message if it is there.

        Parameters
        ----------
        look : bool
            Whether to take in what has come by MPI first.

        Raises
        ------
        UsageError
            Its body is of another length than `into`. Whatever the function `into` raises.
            The message is dropped.
        """
        arrival = self._arrival
        if arrival is None:
            if look:
                self._channel.mail.office.progress()
            arrival = self._channel.take(self.source)
            if arrival is None:
                return None
            self.begin(arrival)
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        return None if self._requests else self._finish(arrival)

    def begin(self, arrival: Arrival) -> None:
        """Begin to receive what `Channel.take` has returned. Raises what `test` does."""
        office = self._channel.mail.office
        try:
            self._memory = self._place(arrival)
        except BaseException:
            office.drop(arrival)
            raise
        if arrival.tag:
            self._requests = office.receive(arrival, self._memory)
        self._arrival = arrival  # last: from now on no requests mean that all is here

    def _place(self, arrival: Arrival) -> Any:
        """Return where a body is to be; None: it has none, or stays where it is."""
        into = self._into
        if callable(into):
            into = into(arrival.source, arrival.head, arrival.nbytes)
        if arrival.nbytes < 0:
            return None
        if into is None:
            apart = arrival.sending is None or not self._borrow
            stays = not arrival.tag and not apart
            return None if stays else np.empty(arrival.nbytes, np.uint8).data
        whole = not isinstance(into, np.ndarray) or into.flags.c_contiguous
        found = as_buffer(into)
        fits = (
            whole and found.nbytes == arrival.nbytes and not (found.nbytes and found.readonly)
        )
        if not fits:
            names = self._channel.mail.team.names
            raise UsageError(
                f"{self._channel.title}: expected a message of {found.nbytes} bytes for "
                f"{names[self._channel.mail.index]}, into contiguous memory that can be "
                f"written, got {arrival.nbytes} bytes from {names[arrival.source]}"
            )
        return found

    def _finish(self, arrival: Arrival) -> Parcel:
        body = self._memory
        if arrival.tag:
            came = arrival.body.memory
            if came is not body:  # it had to be received before
                body[:] = came
        elif arrival.nbytes >= 0:
            if body is None:  # borrowed
                lent = memoryview(arrival.body).toreadonly()
                return Parcel(arrival.source, arrival.head, lent, arrival.sending)
            if arrival.nbytes:
                body[:] = arrival.body
        if arrival.sending is not None:
            arrival.sending.taken()
        return Parcel(arrival.source, arrival.head, body, None)

    def leave(self) -> bool:
        """Wait no more; return whether a message had been taken, which is lost then."""
        arrival = self._arrival
        if arrival is not None and arrival.sending is not None:
            arrival.sending.taken()
        return arrival is not None

    @property
    def coming(self) -> bool:
        """Whether its head is there, so that its body will come."""
        return self._arrival is not None

    def wait(self, label: Any) -> Parcel:
        """Wait for the message and return it; raises what ends the waits of the team.

        Parameters
        ----------
        label
            What is waited in; or what `Team.waiting` returned.
        """
        mail = self._channel.mail
        waiting = waiting_in(mail.team, label)
        missing = () if self.source is None else (self.source,)
        try:
            parcel: Parcel = mail.office.until(
                lambda: self.test(False), waiting, missing, coming=lambda: self.coming
            )
        except BaseException:
            self.leave()
            raise
        return parcel

    def __del__(self) -> None:
        if self._requests:  # MPI may still write there, or where the body had to be received
            adopt(self._requests, (self._memory, self._arrival))


class Channel:
    """A stream of messages between the members, apart from other channels.

    Local. Messages of one member to another come in the order in which they were sent.

    Attributes
    ----------
    number : int
        The same on all members.
    title : str
        Opens messages of errors.
    """

    def __init__(self, mail: "Mail", number: int, title: str) -> None:
        self.mail = mail
        self.number = number
        self.title = title

    def send(self, to: int, head: bytes, body: Any = None) -> Sending:
        """Begin to send a message.

        Parameters
        ----------
        to : int
            The member; the sender itself too.
        head : bytes
            Short; copied.
        body : buffer or array, optional
            C-contiguous host memory of any length; must not change before the `Sending` is
            done. A member of the same process reads it where it lies.
        """
        if body is None:
            return self.post(to, head, -1, None)
        view = as_buffer(body)
        return self.post(to, head, view.nbytes, view)

    def post(self, to: int, head: bytes, nbytes: int, view: Any) -> Sending:
        """Do what `send` does, with a body of which it is known how many bytes it has.

        Parameters
        ----------
        to, head
            As for `send`.
        nbytes : int
            Of the body; -1: there is none.
        view : buffer or None
            C-contiguous; where it is not copied at once, a memoryview of bytes.
        """
        mail = self.mail
        office, team = mail.office, mail.team
        sending = Sending(office, to, view)
        rank = team.ranks[to]
        if rank == team.rank:
            sending._out = view is not None
            after = sending if view is not None else None
            arrival = Arrival(mail.index, bytes(head), nbytes, view, after, 0, 0)
            office.put(self.number, to, arrival)
            return sending
        if nbytes > INLINE:
            tag = 1 + next(office.tags) % _TAGS
            front = _HEAD.pack(self.number, mail.index, to, tag, len(head), nbytes) + head
            sending._requests = office.send(rank, front, tag, view)
            return sending
        front = _HEAD.pack(self.number, mail.index, to, 0, len(head), nbytes) + head
        if nbytes > 0:
            front = b"".join((front, bytes(-len(front) % _LINE), view))
        sending._requests = office.send(rank, front, 0, None)
        sending._kept = None  # what MPI reads, the requests keep
        return sending

    def take(self, source: int | None) -> Arrival | None:
        """Return the next message of `source`, its body perhaps not yet here: see `receive`.

        What it holds of another member's memory must be given back: by `Receiving.begin`.
        """
        mail = self.mail
        return mail.office.take(self.number, mail.index, source)

    def close(self) -> None:
        """Take nothing any more: what has come and what comes is dropped. Local.

        What others send to this member is taken from them, and nobody hears of it. Receive and
        poll nothing from then on; sending is as before.
        """
        mail = self.mail
        mail.office.shut(self.number, mail.index)

    def receive(self, source: int | None, into: Any = None, borrow: bool = False) -> Receiving:
        """Ask for the next message of a member; None: of whichever comes first.

        Parameters
        ----------
        source : int or None
            The member.
        into : buffer, array or function, optional
            C-contiguous memory of the body's length, for the body; or what returns it, given
            source, head and length (-1: there is no body), when the message has come. New
            memory by default.
        borrow : bool
            Whether the body may stay the sender's memory, until `Parcel.release`.
        """
        return Receiving(self, source, into, borrow)

    def some(self) -> bool:
        """Return whether a message has come that is not taken; looks at what is here only."""
        mail = self.mail
        return mail.office.some(self.number, mail.index)

    def peek(self, source: int) -> list[bytes]:
        """Return what the messages of a member say that have come and are not taken."""
        mail = self.mail
        return mail.office.heads(self.number, mail.index, source)

    def poll(
        self, source: int | None = None, into: Any = None, look: bool = True
    ) -> Parcel | None:
        """Return the next message if it is there, body and all; else None.

        One that has come without all of its body is waited for: its sender has sent it. The
        parameters are those of `receive`, and of `Receiving.test`.
        """
        receiving = Receiving(self, source, into, False)
        parcel = receiving.test(look)
        if parcel is None and receiving._arrival is not None:
            team = self.mail.team
            return receiving.wait(Waiting(team.hooks, self.title))
        return parcel


class Mail:
    """One member's part in the messages of its team.

    Collective over the members: `open`, in the same order on all of them.
    """

    def __init__(self, team: Team, office: Office) -> None:
        self.team = team
        self.index = team.index
        self.office = office
        self._numbers = itertools.count(1)

    def open(self, title: str) -> Channel:
        """Make a channel. Collective over the members, but nobody waits.

        Parameters
        ----------
        title : str
            What it is for, in messages.
        """
        return Channel(self, next(self._numbers), title)


def mail_of(team: Team) -> Mail:
    """Return a member's mail, made once. Collective over the members, the first time."""
    found: Mail | None = team.kept.get(_KEY)
    if found is None:
        with team.making:
            found = team.kept.get(_KEY)
            if found is None:
                found = team.kept[_KEY] = Mail(team, _office_of(team))
    return found


def _office_of(team: Team) -> Office:
    def make(_: Sequence[bytes]) -> Office:
        office: Office | None = team.room.shared.get(_KEY)
        if office is None:
            office = team.room.shared[_KEY] = Office(team, _parse)
            team.closes(office.close)
        return office

    found: Office = team.share(b"", make, f"making the mail of {team.title}")
    return found


def _parse(rank: int, memory: bytearray) -> tuple[int, int, Arrival]:
    """Return channel, target and what has come, of a message that came by MPI."""
    channel, source, target, tag, length, nbytes = _HEAD.unpack_from(memory)
    at = _HEAD.size + length
    head = bytes(memory[_HEAD.size : at])
    body = Apart(nbytes) if tag else memoryview(memory)[at + -at % _LINE :]
    return channel, target, Arrival(source, head, nbytes, body, None, rank, tag)
