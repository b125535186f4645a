"""A program between its loader and its end on this rank: what is started, and closed again."""

import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from mpiml import handshake, scope
from mpiml.asked import check_settings
from mpiml.claims import claimed
from mpiml.config import Config
from mpiml.control import FAILED, SIGNALLED, STUCK, TIME, Note
from mpiml.cores import settle_cores, start_notes
from mpiml.engine import Engine
from mpiml.errors import UsageError
from mpiml.faults import LauncherWatch, Signals, install_excepthooks, last_words
from mpiml.finalizing import guarded
from mpiml.forking import guard_fork
from mpiml.hosting import HostedNode
from mpiml.layout import check_levels, lay_out, split_layers
from mpiml.output import Output, check_folder
from mpiml.payload import pack_error
from mpiml.program import Program
from mpiml.reporting import reporting
from mpiml.runtime import Runtime, Settings
from mpiml.survey import Survey
from mpiml.tracebacks import remote_text
from mpiml.undertaker import resign
from mpiml.vertices import Vertices
from mpiml.wire import STOP

__all__ = ["Job", "log", "run_session"]


class Job(NamedTuple):
    """A program to run, and how.

    Attributes
    ----------
    load
        Returns the program; may raise.
    file
        The file that builds it, for the digest.
    comm
        An mpi4py intracommunicator; None for threads of this process.
    settings
        How it is run.
    threads
        Without MPI: replicas of the role that has ``FILL``.
    attached
        Label of the role whose body is the calling code, if any.
    hooks
        Whether to listen to signals, to exceptions of threads and to the launcher's death.
    output
        Whether lines that nodes print get a prefix.
    log_dir
        Folder for a file of output of each node.
    """

    load: Callable[[], Program]
    file: str | os.PathLike[str] | None
    comm: Any
    settings: Settings
    threads: int | None = None
    attached: str | None = None
    hooks: bool = False
    output: bool = True
    log_dir: Any = None


@contextmanager
def run_session(job: Job) -> Iterator[Runtime]:
    """Start a program and close everything after it, whatever happens.

    Collective over the job's communicator. The block runs the program. What fails on one rank
    before it begins is raised on all; so is an error of mpiml that leaves the block on one.
    """
    with ExitStack() as stack:
        stack.enter_context(claimed(job.comm))
        meeting = _meet(stack, job)
        held: list[Runtime] = []
        stack.callback(_close, meeting.world, held)
        error: BaseException | None = None
        try:
            _set_up(stack, job, meeting, held)
        except BaseException as failure:
            error = failure
        if meeting.world is not None and meeting.comm.size > 1:
            handshake.agree(meeting.world.engine_comm, error)
        elif error is not None:
            raise error
        if meeting.party is not None:
            meeting.party.welcome(held[0])
        try:
            yield held[0]
        except BaseException as failure:
            _give_up(held[0], failure)
            raise


class _Built(NamedTuple):
    """What one rank has before it meets the others; an error, since they must hear of it."""

    program: Program | None = None
    config: Config | None = None
    lines: Any = ()
    role: int | None = None
    error: BaseException | None = None


def _build(job: Job) -> _Built:
    """Load, check and describe, and do all else that may fail here and needs nobody else."""
    try:
        call = "launch" if job.attached is None else "attach"
        check_settings(job.settings, job.threads, call)
        config = Config.read()
        if job.log_dir is not None:
            check_folder(job.log_dir)
        program = job.load()
        if not isinstance(program, Program):
            raise UsageError(f"mpiml.{call}: expected a Program, got {type(program).__name__}")
        program.check()
        role = None if job.attached is None else _role(program, job.attached)
        lines: list[Any] = []
        if job.comm is not None:
            from mpiml.world import check_threads

            check_threads()
            if job.comm.size > 1:
                from mpiml.digest import describe

                file = job.file if job.file is not None and os.path.isfile(job.file) else None
                lines = describe(program, file)
        return _Built(program, config, lines, role)
    except BaseException as error:
        return _Built(error=error)


def _role(program: Program, label: str) -> int:
    labels = [role.label for role in program.roles]
    if label not in labels:
        raise UsageError(
            f"mpiml.attach: the program has no role {label!r}; it has {', '.join(labels)}."
        )
    return labels.index(label)


class _Meeting(NamedTuple):
    """What all ranks know once they have met; equal on all, but for `shared`."""

    name: str
    vertices: Vertices
    ranks: Sequence[int]
    gpus: dict[tuple[int, int], tuple[int, ...]]
    notes: tuple[str, ...]
    hosts: Any
    config: Config
    comm: Any = None  # of the ranks that run Python
    party: Any = None  # of these and ranks of other programs
    world: Any = None
    shared: Any = None  # memory of this host, and the lines in it


def _meet(stack: ExitStack, job: Job) -> _Meeting:
    """Compare programs, place the nodes, make communicators. Collective.

    Whatever is raised here is raised on all ranks: all that may fail on one was done before,
    or is done in `_set_up`.
    """
    comm: Any = job.comm
    party: Any = None
    built = _build(job)
    if comm is None:
        if built.error is not None:
            raise built.error
        records = [handshake.alone(built.role)]
    else:
        parties: list[Any] = []
        part = partial(_part, stack, comm, parties)
        limit = None if built.error is not None else job.settings.max_time
        records = handshake.exchange(comm, built.lines, built.error, built.role, part, limit)
        party = parties[0] if parties else None
        comm = party.comm if parties else comm
    program, config = built.program, built.config
    assert program is not None
    assert config is not None
    plan, hosts = lay_out(
        program, [r.facts for r in records], [r.attached for r in records],
        job.threads, config.host_size, party and party.crowd,
    )  # fmt: skip
    if comm is not None and comm.rank == 0 and (job.hooks or _leads()):
        from mpiml.world import described

        facts, whole = [record.facts for record in records], job.hooks and party is None
        said = start_notes(facts, described(), whole)
        plan = plan._replace(notes=(*plan.notes, *said))
    vertices = program.expand(plan.replicas)
    ranks = array("i", vertices.owners(plan.ranks))  # lasts, on each rank: 4 bytes a node
    meeting = _Meeting(program.name, vertices, ranks, plan.gpus, plan.notes, hosts, config)
    if comm is None:
        return meeting
    check_levels(vertices, ranks, [record.level for record in records], hosts)
    if party is not None:
        party.check(vertices)
    from mpiml.linking import bell_path, share
    from mpiml.world import World

    world = World(comm)
    world.split_roles(split_layers(vertices, ranks, comm.rank))
    first = hosts.rows[hosts.host_of(comm.rank)].ranks[0]
    if party is not None and config.doorbell:
        party.bells = [
            (row.name, bell_path(records[row.ranks[0]].token), row.ranks) for row in hosts.rows
        ]
    token, guests = records[first].token, party is not None
    shared = share(world, comm.rank, hosts, config, token, guests)
    return meeting._replace(comm=comm, party=party, world=world, shared=shared)


def _leads() -> bool:
    """Tell whether this is rank 0 of all: of many small programs, one speaks of the start."""
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.rank) == 0


def _part(stack: ExitStack, comm: Any, parties: list[Any], records: list[Any]) -> Any:
    """Part from ranks of other programs, who will hear of all that fails. Collective."""
    from mpiml.external.party import meet

    parties.append(stack.enter_context(meet(comm, records)))
    return parties[0].comm


def _set_up(stack: ExitStack, job: Job, meeting: _Meeting, held: list[Runtime]) -> None:
    """Make the engine of this rank and all that stands around it. Local."""
    comm, config, hosts = meeting.comm, meeting.config, meeting.hosts
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    spin = 0 if hosts.oversubscribed(rank) else config.spin_us
    engine = Engine(rank, size, (config.window_messages, config.window_bytes), log, spin)
    engine.crowd = hosts.crowd(rank)
    runtime = Runtime(
        meeting.name, meeting.vertices, meeting.ranks, engine, hosts, meeting.world,
        meeting.gpus, job.settings, meeting.party and meeting.party.receive,
    )  # fmt: skip
    held.append(runtime)
    stack.callback(runtime.failures.close)  # a start that fails never runs it
    if comm is not None:
        from mpiml.linking import link

        if job.hooks:  # the whole of what a launcher started: the hosts are ours
            settle_cores(hosts.threads_per_rank(rank))
        own = link(meeting.world, engine, *meeting.shared)
        engine.connect(own if meeting.party is None else meeting.party.open(own))
        if rank == 0:
            for note in meeting.notes:
                log(note)
        stack.enter_context(guarded(runtime, _give_up))
    stack.callback(engine.close)
    stack.callback(guard_fork(lambda: _disown(runtime)))
    survey = Survey(runtime, job.settings.stall_warning)
    stack.callback(survey.close)
    if job.hooks:
        _hook(stack, runtime, survey, config)
    if job.settings.max_time is not None and rank == 0:
        _limit(stack, runtime, job.settings.max_time)
    if job.output:
        single = runtime.nodes[0].title if len(runtime.nodes) == 1 else None
        runtime.stderr = stack.enter_context(Output(single, job.log_dir)).raw_stderr
    stack.enter_context(reporting(runtime))


def _close(world: Any, held: list[Runtime]) -> None:
    """Free the communicators, unless messages are left that nobody will receive."""
    for runtime in held:
        runtime.engine.close()
        world = runtime.world or runtime.alone  # None in a forked child
        if world is not None and (runtime.ending.abandoned or runtime.engine.stuck):
            world.give_up()
            return
    if world is not None:
        world.close(spoiled=any(r.ending.failed or r.teams.spoiled for r in held))


def _give_up(runtime: Runtime, error: BaseException) -> None:
    """Tell the others that this rank does not end together with them, since mpiml failed here.

    They raise `error` too, instead of waiting. Local: nothing is said twice, and what cannot
    be sent is not.
    """
    ending, engine = runtime.ending, runtime.engine
    if not ending.abandoned:
        runtime.failures.broke(error)
    if engine.link is None or engine.size == 1:
        return
    title, vertex = runtime.name, 0
    if runtime.nodes:
        title, vertex = runtime.nodes[0].title, runtime.nodes[0].vertex
    text, packed = remote_text(error, title, engine.rank), pack_error(error)
    failed = Note(FAILED, 1, vertex, engine.rank, text, packed.encoding, bytes(packed.body))
    left = Note(STUCK, 1, vertex, engine.rank, "mpiml itself failed")
    with suppress(Exception):
        for rank in range(engine.size):
            for note in (failed, left) if rank != engine.rank else ():
                engine.transmit(rank, STOP, engine.rank, rank, body=note.pack())
        for guest in engine.guests.nodes if engine.guests is not None else ():
            guest.stop(True)
        engine.link.drain(1.0)


def log(text: str) -> None:
    """Say something on standard error, in mpiml's own name. Local."""
    sys.stderr.write(f"mpiml: {text.rstrip()}\n")
    sys.stderr.flush()


def _disown(runtime: Runtime) -> None:
    """In a forked child: refuse everything that would touch the parent's MPI. Local."""
    text = (
        f"mpiml: this process was forked from rank {runtime.engine.rank} of a running program, "
        "and MPI does not survive a fork: expected no use of mpiml here. Compute in the child "
        "and talk to the parent by pipes, or start it with 'spawn'."
    )

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UsageError(text)

    engine = runtime.engine
    scope.forbid(text)
    engine.acquire = engine.transmit = engine.wait = refuse  # type: ignore[method-assign]
    engine.link = runtime.world = runtime.alone = None  # so that nothing is freed twice, either


def _hook(stack: ExitStack, runtime: Runtime, survey: Survey, config: Config) -> None:
    """Install what listens to signals, threads and the launcher."""

    def on_stop(number: int) -> None:
        import signal

        name = signal.Signals(number).name
        runtime.request(SIGNALLED, 130 if name == "SIGINT" else 143, name)

    def on_error(error: BaseException, thread: Any) -> None:
        runtime.fail(_node_of_thread(runtime, error), error)

    def again() -> None:
        if runtime.world is None:  # perhaps a notebook, which dies of it
            last_words("mpiml: SIGINT came again before the program had ended: it ends now")
        runtime.abort(130)

    def show() -> None:
        survey.show(sys.stderr.write)

    def on_death(text: str) -> None:
        last_words(text)
        resign(1)  # MPICH goes on where a rank has left with a status, its manager alive

    stack.enter_context(Signals(on_stop, again, show))
    if runtime.world is not None:  # else no launcher has started it, though one may stand above
        stack.enter_context(LauncherWatch(on_death, config))
    stack.enter_context(install_excepthooks(on_error))


def _limit(stack: ExitStack, runtime: Runtime, seconds: float) -> None:
    """Stop the program after so many seconds."""
    timer = threading.Timer(seconds, lambda: runtime.request(TIME, 143, "--max-time"))
    timer.daemon = True
    timer.start()
    stack.callback(timer.cancel)


def _node_of_thread(runtime: Runtime, error: BaseException) -> HostedNode:
    vertex = getattr(error, "mpiml_vertex", None)  # noted by context().bind
    for node in runtime.nodes:
        if node.vertex == vertex:
            return node
    current = scope.current_scope(required=False)
    return runtime.nodes[0] if current is None else current.owner
