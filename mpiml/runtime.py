"""One program on one rank: its nodes, the frames they exchange, and how it runs to its end."""

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from mpiml.client import Client, ClientGroup, NodeClient, Target
from mpiml.context import missing_ranks
from mpiml.control import EXIT, FAILED, REQUESTED, STUCK, Note
from mpiml.ending import Ending
from mpiml.engine import Engine
from mpiml.errors import RemoteError, ServiceGoneError
from mpiml.futures import Wait
from mpiml.graph import Vertex
from mpiml.hosting import HostedNode, has_body
from mpiml.nodes import ServiceNode, served_methods
from mpiml.payload import SNAPSHOT, pack, pack_error, unpack_error
from mpiml.references import Handle
from mpiml.scope import Scope, enter, leave, owners
from mpiml.server import remote_text
from mpiml.streams import decode_item, on_stream_control
from mpiml.wire import (
    ERROR,
    FLAG_BODY_APART,
    ITEM,
    MORE,
    QUIT_STREAM,
    REPLY,
    REQUEST,
    RETURN,
    STREAM_END,
    Frame,
)

__all__ = ["Runtime", "Settings"]


class Settings(NamedTuple):
    """How a program is run; see `mpiml.launch`. Times are seconds."""

    grace: float = 10.0
    stall_warning: float = 60.0
    seed: int = 0
    max_time: float | None = None
    on_stuck: str = "abort"
    progress: bool = False
    failure_grace: float | None = None
    prints: bool = False  # whether this run, and not the caller, shows the traceback


class Runtime:
    """A program on this rank, from its placement to its end.

    Collective over the program's communicator: `run`.
    """

    def __init__(
        self,
        name: str,
        vertices: Sequence[Vertex],
        ranks: Sequence[int],
        engine: Engine,
        hosts: Any,
        world: Any,
        gpus: dict[tuple[int, int], tuple[int, ...]],
        settings: Settings,
    ) -> None:
        self.name = name
        self.vertices = vertices
        self.ranks = ranks
        self.engine = engine
        self.hosts = hosts
        self.world = world
        self.settings = settings
        self.error: BaseException | None = None
        self.stuck: list[str] = []
        self.results: dict[int, Any] = {}
        self.on_report: Callable[[str, float, float, dict[str, float]], None] | None = None
        self.streams_of: dict[int, Any] = {}
        self._gpus = gpus
        self._stop_time = 0.0
        self._index = {(v.role_index, v.index): v.id for v in vertices}
        self._roles: dict[int, list[Vertex]] = {}
        for vertex in vertices:
            self._roles.setdefault(vertex.role_index, []).append(vertex)
        bodies = sum(has_body(v.node) and not v.daemon for v in vertices)
        self.ending = Ending(engine, bodies, self._on_stop)
        self._bodies_left = Wait("the bodies of this rank")
        self.nodes = [HostedNode(self, v) for v in vertices if ranks[v.id] == engine.rank]
        self._servers = {node.vertex: node.server for node in self.nodes}
        for node in self.nodes:
            self.ending.members[node.vertex] = node
            if node.spec.index == 0 and node.spec.replicas > 1:
                role = self._roles[node.spec.role_index]
                self.ending.add_role(node.vertex, [(v.id, ranks[v.id]) for v in role])
        engine.handlers.update(
            {
                REQUEST: self._on_request,
                REPLY: self._on_reply,
                ERROR: self._on_error,
                ITEM: self._on_item,
                STREAM_END: self._on_stream_end,
                MORE: self._on_stream_control,
                QUIT_STREAM: self._on_stream_control,
                RETURN: self._on_return,
            }
        )
        engine.on_broken = self._on_broken

    # -- frames ------------------------------------------------------------------------------

    def _on_request(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self._servers[frame.target].submit(rank, frame, buffers)

    def _on_reply(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        call = self.engine.pending.pop(frame.id, None)
        if frame.aux:
            self.engine.credit(rank, frame.aux)
        if call is not None:
            call.complete(decode_item(frame, buffers))

    def _on_error(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        call = self.engine.pending.pop(frame.id, None)
        if frame.aux:
            self.engine.credit(rank, frame.aux)
        if call is None:
            return

        def decode() -> Any:
            body: Any = frame.body
            rest = buffers
            if frame.flags & FLAG_BODY_APART:
                body, rest = buffers[0], buffers[1:]
            error = unpack_error(frame.encoding, body, rest)
            error.__cause__ = RemoteError(bytes(frame.name).decode(errors="replace"))
            raise error

        call.complete(decode, True)

    def _on_item(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        call = self.engine.pending.get(frame.id)
        if frame.aux:
            self.engine.credit(rank, frame.aux)
        if call is not None:
            call.item(decode_item(frame, buffers))

    def _on_stream_end(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        call = self.engine.pending.pop(frame.id, None)
        if frame.aux:
            self.engine.credit(rank, frame.aux)
        if call is not None:
            call.complete(None)

    def _on_stream_control(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        on_stream_control(self._servers[frame.target], rank, frame)

    def _on_return(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        decode = decode_item(frame, buffers)
        if bytes(frame.name) != b"error":
            self.results[frame.source] = decode
            return

        def refuse() -> Any:
            raise RemoteError(decode())

        self.results[frame.source] = refuse

    def _on_broken(self, error: BaseException) -> None:
        node = self.nodes[0] if self.nodes else None
        if node is not None:
            self.fail(node, error)

    # -- clients -------------------------------------------------------------------------------

    def resolver(self, node: HostedNode) -> Callable[[Any], Any]:
        """Return what turns a handle into a client that belongs to `node`."""

        def resolve(handle: Any) -> Any:
            if isinstance(handle, Handle):
                return self.client(self._index[handle.role_index, handle.index], node)
            role = self._roles[handle.role_index]
            chosen = handle.indices(len(role))
            return ClientGroup(
                [self.client(self._index[handle.role_index, i], node) for i in chosen]
            )

        return resolve

    def client(self, vertex: int, node: HostedNode | None) -> Client:
        """Return a client of a vertex, for `node` or for the code around the program."""
        spec = self.vertices[vertex]
        title = f"{spec.role}/{spec.index}"
        source = node.vertex if node is not None else vertex
        scope = node.scope if node is not None else None
        rank = self.ranks[vertex]
        if isinstance(spec.node, ServiceNode):
            methods: Any = served_methods(spec.node.callable, spec.allow, title)
            return Client(Target(self.engine, source, vertex, rank, title, methods, scope))
        methods = {"result": None, "done": None}
        return NodeClient(Target(self.engine, source, vertex, rank, title, methods, scope))

    def clients(self, role: str, node: HostedNode | None) -> Client | ClientGroup:
        """Return the client of a role with one node, or the group of its replicas."""
        chosen = [v for v in self.vertices if v.role == role]
        if len(chosen) == 1:
            return self.client(chosen[0].id, node)
        return ClientGroup([self.client(v.id, node) for v in chosen])

    def first_of(self, spec: Vertex) -> tuple[int, int]:
        """Return vertex and rank of the first node of a role."""
        first = self._index[spec.role_index, 0]
        return first, self.ranks[first]

    # -- what a context shows ------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether the program stops."""
        return self.ending.note is not None

    def gpus_of(self, spec: Vertex) -> tuple[int, ...]:
        """Return the devices given to a vertex."""
        return self._gpus.get(spec.unit, ())

    def role_comm(self, spec: Vertex) -> Any:
        """Return the communicator of a role, or raise `PlacementError`."""
        held = {self.ranks[v.id] for v in self._roles[spec.role_index]}
        if len(held) < spec.replicas:
            raise missing_ranks(spec.role, spec.replicas, len(held))
        if self.world is not None:
            return self.world.roles[spec.role_index]
        return self._single(spec.role)

    def user_comm(self) -> Any:
        """Return the program's own communicator."""
        return self.world.user_comm if self.world is not None else self._single("mpiml world")

    def _single(self, name: str) -> Any:
        """Return a communicator of one rank: this process, without a launcher."""
        from mpiml import world

        if self.world is None:
            self.world = world.single()
        return self.world.user_comm

    def log_stream(self, node: HostedNode) -> Any:
        """Return where a node's log goes: standard error, tagged with the node."""
        return sys.stderr

    def report(
        self, node: HostedNode, done: float, total: float | None, metrics: dict[str, float]
    ) -> None:
        """Take a node's progress in; see `mpiml.progress`."""
        if self.on_report is not None:
            self.on_report(node.title, done, total or 0.0, metrics)

    # -- failure and stop ------------------------------------------------------------------------

    def fail(self, node: HostedNode, error: BaseException) -> None:
        """End the program because `error` left a node."""
        status, reason = 1, FAILED
        if isinstance(error, SystemExit):
            if error.code is None or error.code == 0:
                return
            reason = EXIT
            if isinstance(error.code, int):
                status = error.code
            else:
                print(error.code, file=sys.stderr, flush=True)
        text = remote_text(error, node.title, self.engine.rank)
        packed = pack_error(error)
        if self.error is None:
            self.error = error
        note = Note(
            reason, status, node.vertex, self.engine.rank, text,
            packed.encoding, bytes(packed.body),
        )  # fmt: skip
        node.server.gone = error
        self.ending.request(note)
        limit = self.settings.failure_grace
        if limit is not None:
            self._after(limit, lambda: self._unheard(note))

    def _unheard(self, note: Note) -> None:
        """Abort where the rest of the program does not hear of a failure."""
        if self.ending.note is None:
            self._show(note)
            self._abort(note.status)

    def request_stop(self, node: HostedNode, text: str) -> None:
        """End the program in order."""
        self.ending.request(Note(REQUESTED, 0, node.vertex, self.engine.rank, text))

    def request(self, reason: int, status: int, text: str) -> None:
        """End the program in order for a reason from outside: a signal, the time."""
        self.ending.request(Note(reason, status, 0, self.engine.rank, text))

    def _on_stop(self, note: Note) -> None:
        """Let bodies and waiting calls know; on whatever thread heard of it."""
        if not self._stop_time:
            self._stop_time = time.monotonic()
        if note.reason in (FAILED, EXIT):
            if note.rank == self.engine.rank:
                self._show(note)
            self._fail_calls(note)
            limit = self.settings.failure_grace
            self._after(self.settings.grace if limit is None else limit, self._check_grace)
        else:
            self._after(self.settings.grace, self._check_grace)
        for node in self.nodes:
            node.freeze()
            node.server.wake()

    def _show(self, note: Note) -> None:
        if self.settings.prints and note.reason == FAILED:
            sys.stderr.write(f"mpiml: a node failed, the program ends{note.text}")
            sys.stderr.flush()

    def _fail_calls(self, note: Note) -> None:
        """Fail the calls that the failed node will not answer."""
        spec = self.vertices[note.vertex]
        title = f"{spec.role}/{spec.index}"
        for id, call in list(self.engine.pending.items()):
            if call.target_vertex == note.vertex and self.engine.pending.pop(id, None):
                gone = ServiceGoneError(f"{title} failed")
                gone.__cause__ = self.error_of(note)
                call.fail(gone)

    def error_of(self, note: Note) -> BaseException:
        """Return the error in a note, with its remote traceback as cause."""
        if note.rank == self.engine.rank and self.error is not None:
            return self.error
        if note.reason == EXIT:
            return SystemExit(note.status)
        error = unpack_error(note.encoding, note.error)
        error.__cause__ = RemoteError(note.text)
        return error

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _check_grace(self) -> None:
        """List whoever still runs after the grace, and end the program all the same."""
        if self.done:
            return
        self.stuck = self.stragglers()
        if not self.stuck:
            return  # others have the straggler; its rank ends the program
        seconds = time.monotonic() - self._stop_time
        sys.stderr.write(
            f"mpiml: still running {seconds:.1f} s after the stop, so the program is ended:\n"
            + "\n".join(self.stuck) + "\n"
        )  # fmt: skip
        sys.stderr.flush()
        if self.settings.on_stuck == "abort":
            self._abort(1)
        else:
            self.ending.request(
                Note(STUCK, 1, self.nodes[0].vertex, self.engine.rank, "\n".join(self.stuck))
            )

    def _abort(self, status: int) -> None:
        if self.world is not None:
            self.world.abort(status)
        import os

        os._exit(status)

    def stragglers(self) -> list[str]:
        """Describe bodies and methods that still run, with their stacks."""
        from mpiml.survey import stack_of

        lines = []
        for node in self.nodes:
            running = (node.body and not node.returned) or node.constructing
            if running or node.server.active:
                what = "body" if running else f"{node.server.active} calls"
                lines.append(f"[{node.title}] {what}\n{stack_of(node)}")
        return lines

    # -- running ---------------------------------------------------------------------------------

    _timers: list[threading.Timer]
    done = False

    def body_left(self, node: HostedNode) -> None:
        """Note that a body has returned."""
        self._send_result(node)
        if not node.spec.daemon:
            self.ending.body(-1)
        if all(n.returned for n in self.nodes):
            self.engine.fulfil(self._bodies_left)

    def _send_result(self, node: HostedNode) -> None:
        if self.engine.rank == 0:
            self.results[node.vertex] = lambda: node.value
            return
        try:
            packed = pack(node.value, SNAPSHOT, f"the return value of {node.title}")
            name = b""
        except Exception as error:  # nobody may want it: an error for whoever reads it
            packed, name = pack(str(error)), b"error"
        self.engine.transmit(
            0, RETURN, node.vertex, node.vertex, name=name,
            encoding=packed.encoding, body=packed.body, buffers=packed.buffers,
        )  # fmt: skip

    def run(self, started: bool = False) -> None:
        """Run this rank's nodes until the program has ended. Collective.

        Parameters
        ----------
        started
            The caller has called `start`, and its own bodies have ended.
        """
        if not started:
            self.start()
            if len(self.nodes) == 1:
                self.nodes[0].run()
        self._serve_until_stop()
        self._finish()

    def start(self, attached: Collection[HostedNode] = (), extra: int = 0) -> None:
        """Begin: count bodies, and start the threads of nodes that share this rank.

        Parameters
        ----------
        attached
            Nodes whose bodies are the caller's own code.
        extra
            Bodies beyond those of the nodes, that the end waits for: a test's.
        """
        self._timers = []
        self._scopes: list[Scope] = [node.scope for node in self.nodes]
        owners.append(self._scopes)
        bodies = sum(n.body and not n.spec.daemon for n in self.nodes)
        self.ending.start(bodies + extra)
        if all(n.returned for n in self.nodes):
            self._bodies_left.ready = True
        if len(self.nodes) == 1 and not attached and not extra:
            return  # runs on the thread that calls `run`
        for node in self.nodes:
            if node not in attached:
                threading.Thread(
                    target=node.run, name=f"mpiml {node.title}", daemon=True
                ).start()

    def _serve_until_stop(self) -> None:
        stopped = self.ending.stopped
        if len(self.nodes) == 1 and not stopped.ready:
            node = self.nodes[0]
            if not node.body:
                node.server.work(until=stopped)
        while not stopped.ready:
            self.engine.wait(stopped, None, None)

    def _active(self) -> int:
        building = sum(node.constructing for node in self.nodes)
        return building + sum(node.server.active for node in self.nodes)

    def _finish(self) -> None:
        """End in order: bodies, calls, callbacks, calls again, services."""
        ending = self.ending
        comm = self.world.engine_comm if self.world is not None and self.engine.link else None

        def gave_up() -> bool:
            return ending.abandoned

        while not self._bodies_left.ready and not gave_up():
            self.engine.wait(self._bodies_left, time.monotonic() + 0.1, None)
        quiet = ending.settle(comm, self._active, gave_up)
        if quiet:
            for node in self.nodes:
                self._call_back(node)
            quiet = ending.settle(comm, self._active, gave_up)
        self.done = True
        for timer in self._timers:
            timer.cancel()
        for node in self.nodes:
            node.server.stop()
            node.loop.stop()
        if quiet and comm is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            ending.finish(comm.Ibarrier(), gave_up)
            self.engine.link.drain(1.0)
        self.engine.close()
        owners[:] = [scopes for scopes in owners if scopes is not self._scopes]

    def _call_back(self, node: HostedNode) -> None:
        scope = type(node.scope)(node)  # the node's own has halted; callbacks may still call
        token = enter(scope)
        try:
            while node.callbacks:
                node.callbacks.pop(0)()
        except BaseException as error:
            self.fail(node, error)
        finally:
            leave(token)

    def value_of(self, vertex: int) -> Any:
        """Return what a node returned, on rank 0."""
        decode = self.results.get(vertex)
        return decode() if decode is not None else None
