"""One program on one rank: its nodes, the frames they exchange, and how it runs to its end."""

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from mpiml.agreeing import Agreeing
from mpiml.board import Boards
from mpiml.callbacks import callbacks
from mpiml.client import Client, NodeClient
from mpiml.context import missing_ranks
from mpiml.control import Note
from mpiml.ending import Ending
from mpiml.engine import Engine
from mpiml.failure import Failures
from mpiml.graph import Vertex
from mpiml.group import ClientGroup
from mpiml.hosting import RETURNED, HostedNode, has_body
from mpiml.idle import Idle
from mpiml.nodes import ServiceNode, served_methods
from mpiml.parting import Parting
from mpiml.progress import Report
from mpiml.references import Handle
from mpiml.routing import Router, close_streams
from mpiml.scope import Scope, enter, leave, owners
from mpiml.target import Target
from mpiml.teams import Teams
from mpiml.topics.ends import ends_of
from mpiml.topics.exchange import Topics
from mpiml.topics.quiet import Quiet
from mpiml.vertices import Vertices

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
        vertices: Vertices,
        ranks: Sequence[int],
        engine: Engine,
        hosts: Any,
        world: Any,
        gpus: dict[tuple[int, int], tuple[int, ...]],
        settings: Settings,
        receive: Callable[["Runtime"], Any] | None = None,
    ) -> None:
        self.name = name
        self.vertices = vertices
        self.ranks = ranks
        self.engine = engine
        self.hosts = hosts
        self.world = world
        self.settings = settings
        self.alone: Any = None  # the communicators of a process without a launcher
        self.done = False
        self.stderr: Any = None  # for what the runtime itself says; None: standard error
        self.survey: Any = None  # says who waits for whom
        self.on_report: Callable[[HostedNode, Report], None] | None = None
        self.on_left: Callable[[HostedNode], None] | None = None
        self._gpus = gpus
        self._threads: list[threading.Thread] = []
        bodies = sum(has_body(v.node) and not v.daemon for v in vertices)
        self.failures = Failures(self)
        self.ending = Ending(engine, bodies, self.failures.on_stop)
        self.parting = Parting(self)
        held = [vertices[v] for v, rank in enumerate(ranks) if rank == engine.rank]
        self.nodes = [HostedNode(self, vertex) for vertex in held if not vertex.node.outside]
        self.present = [*self.nodes]  # and those that stand for ranks of other programs
        self._scopes: list[Scope] = [node.scope for node in self.nodes]
        self.router = Router(engine)
        self.router.servers = {node.vertex: node.server for node in self.nodes}
        self.agreeing = Agreeing(engine, ranks)
        self.teams = Teams(self)
        self.idle = Idle(self)
        for node in self.nodes:
            if node.spec.replicas > 1:
                self.agreeing.add(node, vertices.ids_of(node.spec.role_index))
        places = (ranks, hosts.host_of) if receive is None else receive(self)
        self.topics = Topics(engine, vertices, places[0], ends_of(vertices), places[1])
        self.quiet = Quiet(self)
        self.boards = Boards(engine, lambda first: vertices[first].replicas)
        engine.on_broken = self._on_broken

    # -- clients -------------------------------------------------------------------------------

    def resolver(self, node: HostedNode) -> Callable[[Any], Any]:
        """Return what turns a handle into a client that belongs to `node`."""

        def resolve(handle: Any) -> Any:
            if isinstance(handle, Handle):
                return self.client(self.vertices.ids_of(handle.role_index)[handle.index], node)
            role = self.vertices.ids_of(handle.role_index)
            chosen = handle.indices(len(role))
            return ClientGroup([self.client(role[i], node) for i in chosen])

        return resolve

    def client(self, vertex: int, node: HostedNode | None) -> Client:
        """Return a client of a vertex, for `node` or for the code around the program."""
        spec = self.vertices[vertex]
        title = spec.title
        source = node.vertex if node is not None else vertex
        scope = node.scope if node is not None else None
        rank = self.ranks[vertex]
        if isinstance(spec.node, ServiceNode):
            served: Any = spec.node.callable
            methods: Any = served_methods(served, spec.allow, title)
            return Client(Target(self.engine, source, vertex, rank, title, methods, scope))
        methods = {"result": None, "done": None}
        return NodeClient(Target(self.engine, source, vertex, rank, title, methods, scope))

    def clients(self, role: str, node: HostedNode | None) -> Any:
        """Return the client of a role with one node, or the group of its replicas."""
        chosen = [v for v in self.vertices if v.role == role]
        first = chosen[0].node
        if len(chosen) == 1 and first.spread is None:
            return self.client(chosen[0].id, node)
        return first.client_of(ClientGroup([self.client(v.id, node) for v in chosen]), node)

    def first_of(self, spec: Vertex) -> tuple[int, int]:
        """Return vertex and rank of the first node of a role."""
        first = self.vertices.ids_of(spec.role_index)[0]
        return first, self.ranks[first]

    # -- what a context shows ------------------------------------------------------------------

    @property
    def results(self) -> dict[int, Callable[[], Any]]:
        """On rank 0: what decodes the value that each body has returned, by vertex."""
        return self.router.results

    @property
    def stopping(self) -> bool:
        """Whether the program stops."""
        return self.ending.note is not None

    def gpus_of(self, spec: Vertex) -> tuple[int, ...]:
        """Return the devices given to a vertex."""
        return self._gpus.get(spec.unit, ())

    def role_comm(self, spec: Vertex) -> Any:
        """Return the communicator of a role, or raise `PlacementError`."""
        held = {self.ranks[v] for v in self.vertices.ids_of(spec.role_index)}
        if len(held) < spec.replicas:
            raise missing_ranks(spec.role, spec.replicas, len(held))
        return self._alone() if self.world is None else self.world.roles[spec.role_index]

    def user_comm(self) -> Any:
        """Return the program's own communicator."""
        return self._alone() if self.world is None else self.world.user_comm

    def _alone(self) -> Any:
        """Return a communicator of one rank: this process, without a launcher."""
        from mpiml import world

        if self.alone is None:
            self.alone = world.single()
        return self.alone.user_comm

    def report(
        self, node: HostedNode, done: float, total: float | None, metrics: dict[str, float]
    ) -> None:
        """Take a node's progress in; see `mpiml.progress`."""
        if self.on_report is not None:
            self.on_report(node, Report(done, total or 0.0, metrics))

    def say(self, text: str) -> None:
        """Write to standard error, without a node's prefix."""
        stream = self.stderr or sys.stderr
        stream.write(text)
        stream.flush()

    # -- failure and stop ------------------------------------------------------------------------

    def fail(self, node: HostedNode, error: BaseException, serves: bool = False) -> None:
        """End the program because `error` left a node; see `Failures.fail`."""
        self.failures.fail(node, error, serves)

    def request(self, reason: int, status: int, text: str) -> None:
        """End the program in order for a reason from outside: a signal, the time."""
        self.failures.request(reason, status, text)

    def request_stop(self, node: HostedNode, text: str) -> None:
        """End the program in order."""
        self.failures.request_stop(node, text)

    def error_of(self, note: Note) -> BaseException:
        """Return the error in a note, with its remote traceback as cause."""
        return self.failures.error_of(note)

    def abort(self, status: int) -> None:
        """End every process of the job at once; never returns."""
        self.failures.abort(status)

    def _on_broken(self, error: BaseException) -> None:
        if self.nodes and not self.done:
            self.fail(self.nodes[0], error)

    # -- running ---------------------------------------------------------------------------------

    def body_left(self, node: HostedNode) -> None:
        """Note that a body has returned."""
        if self.on_left is not None:
            self.on_left(node)  # before the result, which the end waits for
        self.router.send_result(node.vertex, node.title, node.value)
        self.teams.left(node)
        # its work is not done, where it was stopped: iterations must not end as if it were
        self.topics.leave(node.vertex, cut=self.stopping or node.how != RETURNED)
        if not node.spec.daemon:
            self.ending.body(-1)
        if all(n.returned for n in self.present):
            self.engine.fulfil(self.parting.bodies)

    def run(self, started: bool = False) -> None:
        """Run this rank's nodes until the program has ended. Collective.

        Parameters
        ----------
        started
            The caller has called `start`, and its own bodies have ended.
        """
        try:
            if not started:
                self.start()
                if len(self.nodes) == 1:
                    self.nodes[0].run()
            self._serve_until_stop()
            self._finish()
        except BaseException as error:
            self.failures.broke(error)
            raise
        finally:
            self.done = True
            self.failures.close()
            owners[:] = [scopes for scopes in owners if scopes is not self._scopes]

    def start(self, attached: Collection[HostedNode] = (), extra: int = 0) -> None:
        """Begin: count bodies, and start the threads of nodes that share this rank.

        Parameters
        ----------
        attached
            Nodes whose bodies are the caller's own code.
        extra
            Bodies beyond those of the nodes, that the end waits for: a test's.
        """
        owners.append(self._scopes)
        if not extra:  # a test's steps cannot be seen
            self.quiet.watch()
        bodies = sum(n.body and not n.spec.daemon for n in self.present)
        self.ending.start(bodies + extra)
        if self.settings.prints and self.engine.rank == 0 and not self.ending.bodies:
            self.say(
                f"mpiml: {self.name} has no body to wait for (services and daemons only), so it "
                "runs until it is stopped: context().stop(), Ctrl-C, --max-time\n"
            )
        if all(n.returned for n in self.present):
            self.parting.bodies.ready = True
        for node in attached:
            node.thread = threading.get_ident()
        if len(self.nodes) == 1 and not attached and not extra:
            return  # runs on the thread that calls `run`
        for node in self.nodes:
            if node not in attached:
                thread = threading.Thread(
                    target=node.run, name=f"mpiml {node.title}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _serve_until_stop(self) -> None:
        stopped = self.ending.stopped
        while not stopped.ready:
            try:
                alone = len(self.nodes) == 1 and not self.nodes[0].body
                if alone and not self.engine.home:  # home drives while methods run
                    self.nodes[0].server.work(until=stopped)
                self.engine.wait(stopped, None, None)
            except KeyboardInterrupt as error:  # nobody has taken SIGINT over: end in order
                if not self.nodes:
                    raise
                self.fail(self.nodes[0], error)

    def _active(self) -> tuple[int, int]:
        """Return how many calls and callbacks are under way here, and how many streams open."""
        servers = [node.server for node in self.present]
        active = sum(node.constructing for node in self.nodes) + self.failures.held
        active += callbacks.under_way(self.engine)
        return (
            active + sum(server.active for server in servers),
            sum(len(server.streams) for server in servers),
        )

    def _finish(self) -> None:
        """End in order: bodies, calls, callbacks, calls again, streams, services."""
        if self.engine.ended_by is not None:
            raise self.engine.ended_by
        ending = self.ending
        comm = self.world.engine_comm if self.world is not None and self.engine.link else None

        def gave_up() -> bool:
            return ending.abandoned

        self.parting.await_bodies()
        if self.survey is not None:
            self.survey.close()
        self.idle.close()
        self.quiet.close()
        self.parting.tell()
        if ending.settle(comm, self._active, gave_up) is not None:
            self._call_back_all()
        streams = ending.settle(comm, self._active, gave_up) if not gave_up() else None
        if streams:
            for node in self.nodes:
                close_streams(node.server)
            streams = ending.settle(comm, self._active, gave_up)
        self.done = True
        for node in self.present:
            node.leave()
            node.server.stop()
            node.loop.stop()
        if streams is not None and comm is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            ending.finish(comm.Ibarrier(), gave_up)
        self._tell_unseen()
        self.engine.close()
        if streams is not None:
            for thread in self._threads:
                thread.join(1.0)
            self.teams.close()

    def _tell_unseen(self) -> None:
        """Say which methods failed again and again; the first error has been logged."""
        if not self.ending.failed:  # else most are its consequences
            for about, count in self.engine.unseen_errors().items():
                if count > 1:
                    self.engine.log(f"{about} failed {count} times and nobody looked")

    def _call_back_all(self) -> None:
        """Run the callbacks of all nodes, at the same time where they may reduce together."""
        threads = []
        for node in self.nodes:
            if node.callbacks and self.teams.meets_here(node):
                title = f"mpiml {node.title}"
                threads.append(threading.Thread(None, self._call_back, title, (node,)))
                threads[-1].daemon = True
                threads[-1].start()
            else:
                self._call_back(node)
        while any(t.is_alive() for t in threads) and not self.ending.abandoned:
            self.ending.rest(0.001)

    def _call_back(self, node: HostedNode) -> None:
        scope = type(node.scope)(node)  # the node's own has halted; callbacks may still call
        token = enter(scope)
        node.calling_back = True
        try:
            while node.callbacks:
                try:
                    node.callbacks.pop(0)()
                except BaseException as error:
                    self.fail(node, error, serves=True)
        finally:
            node.calling_back = False
            leave(token)
