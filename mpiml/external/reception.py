"""Guests on a Python rank: takes in what they send, and answers them in arrays and codes."""

from array import array
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

from mpiml.contents import parts
from mpiml.control import FAILED, REQUESTED, Note
from mpiml.errors import RemoteError, UsageError
from mpiml.external.codes import DTYPE, ENC_CODE, REMOTE, call_code, pack_code
from mpiml.external.crowd import Crowd
from mpiml.external.encoding import encode
from mpiml.external.guest import GuestNode
from mpiml.external.link import GuestLink
from mpiml.external.manifest import outside_of
from mpiml.payload import Given, pack_error
from mpiml.payload_owned import owned_arrays
from mpiml.tracebacks import remote_text
from mpiml.wire import (
    ERROR,
    GUEST_GONE,
    GUEST_LEAVE,
    REPLY,
    REQUEST,
    STOP_REQUEST,
    TOPIC,
    TOPIC_ACK,
    TOPIC_END,
    Frame,
)

__all__ = ["Reception"]

_PASSED = (REQUEST, TOPIC, TOPIC_END, TOPIC_ACK)


class Reception:
    """What a Python rank has to do with guests. Local; safe from any thread.

    Parameters
    ----------
    runtime
        The program on this rank.
    crowd : Crowd
        Who is who.

    Attributes
    ----------
    ranks : array of int
        The rank of each node; guests have ranks of their own, behind those of Python ranks.
    nodes : list of GuestNode
        The guests that this rank speaks to for the program.
    """

    def __init__(self, runtime: Any, crowd: Crowd) -> None:
        engine = self._engine = runtime.engine
        self._runtime = runtime
        self._crowd = crowd
        self._numbers = {rank: guest for guest, rank in enumerate(crowd.guests)}
        self._vertices: dict[int, int] = {}
        self._shown: set[tuple[str, str, str]] = set()
        self._link: Any = None
        self.ranks = array("i", runtime.ranks)
        for vertex in outside_of(runtime.vertices):
            guest = crowd.by_label[vertex.role][vertex.index]
            self._vertices[guest] = vertex.id
            self.ranks[vertex.id] = engine.size + guest
        self.nodes = [
            GuestNode(runtime, runtime.vertices[vertex], engine.size + guest)
            for guest, vertex in sorted(self._vertices.items())
            if crowd.keeper(guest) == engine.rank
        ]
        self._kept = {node.rank - engine.size: node for node in self.nodes}
        engine.guests = self
        runtime.present += self.nodes
        runtime.router.servers.update({node.vertex: node.server for node in self.nodes})

    @property
    def left_behind(self) -> bool:
        """Whether guests that this rank speaks to have not left: there may be messages."""
        return any(not node.returned for node in self.nodes)

    @property
    def places(self) -> tuple[Sequence[int], Callable[[int], int]]:
        """The rank of each node, and the host of each rank: a guest is alone on one."""
        size, host_of = self._engine.size, self._runtime.hosts.host_of
        return self.ranks, lambda rank: host_of(rank) if rank < size else -1 - rank

    def open(self, inner: Any, comm: Any) -> GuestLink:
        """Return the link of this rank, which talks to guests over `comm` too."""
        for node in self.nodes:
            node.open_servers()
        outer = type(inner)(comm, inner.bell, self._deliver)
        link = GuestLink(inner, outer, self._engine, self._crowd.guests)
        self._link = link
        return link

    # -- what comes ----------------------------------------------------------------------------

    def _deliver(self, source: int, frame: Frame, buffers: Sequence[Any]) -> None:
        guest = self._numbers[source]
        engine = self._engine
        if frame.kind in _PASSED:
            engine.note_sent()  # by the guest, who does not count
            engine.dispatch(engine.size + guest, frame, buffers)
        elif frame.kind == STOP_REQUEST:
            self._asked(guest, Note.unpack(bytes(parts(frame, buffers)[0])))
        elif frame.kind == GUEST_LEAVE:
            self._left(guest, frame)
        else:
            engine.log(f"a frame of kind {frame.kind} from a guest, rank {source}, was dropped")

    def _asked(self, guest: int, asked: Note) -> None:
        """End the program, since a guest wishes it, or has failed."""
        node = self._kept[guest]
        runtime = self._runtime
        if asked.reason != FAILED:
            reason = Note(
                REQUESTED, 0, node.vertex, self._engine.rank, f"{node.title}: mpiml_stop"
            )
            runtime.ending.request(reason)
            return
        text = (
            f"\n[{node.title}] (rank {self._crowd.guests[guest]} of the communicator, another "
            f"program) failed:\n{asked.text}\n"
        )
        packed = pack_error(RemoteError(f"{node.title} failed: {asked.text}"))
        runtime.ending.request(
            Note(
                FAILED, 1, node.vertex, self._engine.rank, text, packed.encoding,
                bytes(packed.body),
            )
        )  # fmt: skip

    def _left(self, guest: int, frame: Frame) -> None:
        engine = self._engine
        node = self._kept.get(guest)
        if node is not None:
            node.went(frame.body[0] if frame.body else 0)
        engine.transmit(engine.size + guest, GUEST_GONE, engine.rank, self._vertices[guest])
        self._link.gone.add(guest)

    # -- what is answered ----------------------------------------------------------------------

    def answer(self, request: Any, result: Any, title: str) -> None:
        """Send the result of a call: arrays.

        Raises
        ------
        ArraysError
            It is none.
        """
        owned = owned_arrays(result, getrefcount(result))
        given = type(result) is Given
        frame = request.frame
        where = f"{title}.{frame.name.decode()}(): the result"
        encoding, body, buffers = encode(
            result.value if given else result, where, not given, owned
        )
        self._engine.transmit(
            request.rank, REPLY, frame.target, frame.source, frame.id,
            encoding=encoding, body=body, buffers=buffers,
        )  # fmt: skip

    def refuse(self, request: Any, error: BaseException, title: str) -> None:
        """Send an error as a code and a text; show its traceback here, the first time."""
        frame = request.frame
        code = call_code(error)
        method = f"{title}.{frame.name.decode('utf-8', 'replace')}"
        text = str(error)
        if code == REMOTE:
            text = f"{method}: {type(error).__name__}: {text}"
        kind = (title, method, type(error).__name__)
        # a path of parameters, say, that is wrong: frames of mpiml alone would tell nobody more
        mistaken = frame.target == frame.source and isinstance(error, UsageError)
        if code in (REMOTE, DTYPE) and not mistaken and kind not in self._shown:
            self._shown.add(kind)
            trace = remote_text(error, title, self._engine.rank)
            guest = request.rank - self._engine.size
            caller = self._runtime.vertices[self._vertices[guest]].title
            where = f"rank {self._crowd.guests[guest]} of the communicator, another program"
            self._engine.log(f"{method} failed for {caller} ({where}):\n{trace}")
        self._engine.transmit(
            request.rank, ERROR, frame.target, frame.source, frame.id,
            encoding=ENC_CODE, body=pack_code(code, text),
        )  # fmt: skip
