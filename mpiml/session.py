"""A program between its loader and its end on this rank: what is started, and closed again."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from mpiml import handshake, scope
from mpiml.config import Config
from mpiml.control import SIGNALLED, TIME
from mpiml.cores import settle_cores
from mpiml.engine import Engine
from mpiml.errors import UsageError
from mpiml.faults import LauncherWatch, Signals, guard_fork, install_excepthooks
from mpiml.hosting import HostedNode
from mpiml.layout import lay_out, split_layers
from mpiml.output import Output
from mpiml.program import Program
from mpiml.reporting import reporting
from mpiml.runtime import Runtime, Settings
from mpiml.survey import Survey

__all__ = ["Job", "default_comm", "log", "run_session"]


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


_busy: list[Any] = []  # communicators with a program running on them


@contextmanager
def run_session(job: Job) -> Iterator[Runtime]:
    """Start a program and close everything after it, whatever happens.

    Collective over the job's communicator. The block runs the program.
    """
    with ExitStack() as stack:
        stack.enter_context(_claimed(job.comm))
        runtime, config = _start(job)
        stack.callback(_close, runtime)
        stack.callback(guard_fork(lambda: _disown(runtime)))
        survey = Survey(runtime, job.settings.stall_warning)
        stack.callback(survey.close)
        if job.hooks:
            _hook(stack, runtime, survey, config)
        if job.settings.max_time is not None and runtime.engine.rank == 0:
            _limit(stack, runtime, job.settings.max_time)
        if job.output:
            single = runtime.nodes[0].title if len(runtime.nodes) == 1 else None
            runtime.stderr = stack.enter_context(Output(single, job.log_dir)).raw_stderr
        stack.enter_context(reporting(runtime))
        yield runtime


def default_comm() -> Any:
    """Return COMM_WORLD under an MPI launcher or in a running MPI program, else None.

    Collective over COMM_WORLD if it initialises MPI.

    Raises
    ------
    UsageError
        Inside a node of a program that runs on MPI: a launch there says on which ranks.
    """
    comm = None
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1:
            comm = MPI.COMM_WORLD
    if comm is None and Config.read().launcher is None:
        return None
    if _busy:
        raise UsageError(
            "mpiml.launch: a program runs in this process already, so expected a communicator, "
            "got none. Pass comm=mpiml.context().comm for the ranks of this role, or "
            "comm=MPI.COMM_SELF for this rank alone."
        )
    if comm is None:
        from mpiml import world

        comm = world.start()
    return comm


@contextmanager
def _claimed(comm: Any) -> Iterator[None]:
    """Refuse a second program on a communicator at the same time."""
    if comm is None:
        yield
        return
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise UsageError(
            f"mpiml.launch: expected comm= an mpi4py communicator, got {type(comm).__name__}"
        )
    if comm == MPI.COMM_NULL:
        raise UsageError(
            "mpiml.launch: expected a communicator that this rank is in, got COMM_NULL. Only "
            "the ranks of a communicator call launch."
        )
    if comm.Is_inter():
        raise UsageError(
            "mpiml.launch: expected an intracommunicator, got an intercommunicator. Merge() it."
        )
    if any(comm == other for other in _busy):
        raise UsageError(
            "mpiml.launch: a program runs on this communicator already. Use comm.Dup(), or "
            "context().comm inside a node."
        )
    _busy.append(comm)
    try:
        yield
    finally:
        _busy.remove(comm)


def _build(job: Job) -> tuple[Program | None, list[Any], int | None, BaseException | None]:
    """Load, check and describe; an error is returned, since other ranks must hear of it."""
    try:
        program = job.load()
        if not isinstance(program, Program):
            raise UsageError(f"expected a Program, got {type(program).__name__}")
        program.check()
        role = None if job.attached is None else _role(program, job.attached)
        lines: list[Any] = []
        if job.comm is not None and job.comm.size > 1:
            from mpiml.digest import describe

            file = job.file if job.file is not None and os.path.isfile(job.file) else None
            lines = describe(program, file)
        return program, lines, role, None
    except BaseException as error:
        return None, [], None, error


def _role(program: Program, label: str) -> int:
    labels = [role.label for role in program.roles]
    if label not in labels:
        raise UsageError(
            f"mpiml.attach: the program has no role {label!r}; it has {', '.join(labels)}"
        )
    return labels.index(label)


def _start(job: Job) -> tuple[Runtime, Config]:
    """Take the program from its loader to the engine of this rank. Collective."""
    comm = job.comm
    program, lines, role, error = _build(job)
    if comm is None:
        if error is not None:
            raise error
        records = [handshake.alone(role)]
    else:
        records = handshake.exchange(comm, lines, error, role)
    assert program is not None
    config = Config.read()
    plan, hosts = lay_out(
        program, [r.facts for r in records], [r.attached for r in records],
        job.threads, config.host_size,
    )  # fmt: skip
    vertices = program.expand(plan.replicas)
    ranks = [plan.ranks[v.unit[0]][v.unit[1]] for v in vertices]
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    spin = 0 if hosts.oversubscribed(rank) else config.spin_us
    window = (config.window_messages, config.window_bytes)
    engine = Engine(rank, size, window, log, spin)
    runtime = Runtime(
        program.name, vertices, ranks, engine, hosts, None, plan.gpus, job.settings
    )
    if comm is not None:  # last, since what was refused above leaves nothing to free
        if job.hooks:  # the whole of what a launcher started: the hosts are ours
            settle_cores(hosts.threads_per_rank(rank))
        _connect(runtime, comm, config, records[hosts.rows[hosts.host_of(rank)].ranks[0]].token)
    if rank == 0 and comm is not None:
        for note in plan.notes:
            log(note)
    return runtime, config


def _connect(runtime: Runtime, comm: Any, config: Config, token: bytes) -> None:
    """Make the program's communicators and this rank's link. Collective over `comm`."""
    from mpiml.linking import link
    from mpiml.world import World, check_threads

    check_threads()
    world = runtime.world = World(comm)
    engine = runtime.engine
    world.split_roles(split_layers(runtime.vertices, runtime.ranks, engine.rank))
    engine.connect(link(world, engine, runtime.hosts, config, token))


def _close(runtime: Runtime) -> None:
    runtime.engine.close()
    if runtime.world is not None and not (runtime.ending.abandoned or runtime.engine.stuck):
        runtime.world.close()


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
    engine.link = runtime.world = None  # so that nothing is freed twice, either


def _hook(stack: ExitStack, runtime: Runtime, survey: Survey, config: Config) -> None:
    """Install what listens to signals, threads and the launcher."""

    def on_stop(number: int) -> None:
        import signal

        name = signal.Signals(number).name
        runtime.request(SIGNALLED, 130 if name == "SIGINT" else 143, name)

    def on_error(error: BaseException, thread: Any) -> None:
        runtime.fail(_node_of_thread(runtime, error), error)

    def again() -> None:
        runtime.abort(130)

    def show() -> None:
        survey.show(sys.stderr.write)

    def on_death(text: str) -> None:
        os._exit(1)

    stack.enter_context(Signals(on_stop, again, show))
    stack.enter_context(LauncherWatch(on_death, config))
    stack.enter_context(install_excepthooks(on_error))


def _limit(stack: ExitStack, runtime: Runtime, seconds: float) -> None:
    """Stop the program after so many seconds."""
    import threading

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
