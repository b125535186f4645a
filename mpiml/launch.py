"""`launch`: place a program on ranks or threads, run it to its end, return its result.

The handshake comes first: one small collective of fixed-size records, in which every rank
says whether it has a program, what its digest is, and what its host offers. Errors while
loading a file take part in it, so no rank waits for one that has failed.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from mpiml import cmdline, handshake
from mpiml.config import Config
from mpiml.control import FAILED, SIGNALLED, STUCK, TIME
from mpiml.engine import Engine
from mpiml.errors import MpimlError, UsageError
from mpiml.faults import LauncherWatch, Signals, install_excepthooks
from mpiml.hosting import HostedNode
from mpiml.hosts import Hosts
from mpiml.output import Output
from mpiml.program import Program
from mpiml.roles.placement import Ask, Plan, place
from mpiml.runtime import Runtime, Settings
from mpiml.settings import FILL
from mpiml.survey import Survey

__all__ = ["Result", "attach", "launch", "run_program"]

_FAILURE_GRACE = 1.5


class Result:
    """What a program returned.

    Attributes
    ----------
    stopped_by : str
        ``"finished"``, or who or what ended it early.
    """

    def __init__(self, runtime: Runtime | None, stopped_by: str, rank: int) -> None:
        self.stopped_by = stopped_by
        self._rank = rank
        self._values: dict[str, list[Any]] = {}
        if runtime is not None and rank == 0:
            for vertex in runtime.vertices:
                value = runtime.value_of(vertex.id)
                self._values.setdefault(vertex.role, []).append(value)

    def __getitem__(self, role: str) -> list[Any]:
        """Return the values of a role in index order.

        Raises
        ------
        UsageError
            On other ranks than rank 0 of the communicator.
        KeyError
            If there is no such role.
        """
        if self._rank != 0:
            raise UsageError(
                f"Result[{role!r}]: expected rank 0 of the program's communicator, got rank "
                f"{self._rank}. Return values are gathered there only; broadcast what you need."
            )
        return self._values[role]

    def keys(self) -> list[str]:
        """Return the roles that have values here."""
        return list(self._values)

    def __repr__(self) -> str:
        return f"<Result, {self.stopped_by}, roles {', '.join(self._values) or 'on rank 0'}>"


class _Running(NamedTuple):
    """A program that has been placed, with what has to be closed after it."""

    runtime: Runtime
    config: Config
    plan: Plan
    survey: Survey


_busy: list[Any] = []  # communicators with a program running on them


def _place(
    program: Program, records: Sequence[handshake.Record], threads: int | None, host_size: Any
) -> tuple[Plan, Hosts]:
    """Place the program's units; ranks whose code is attached get theirs first."""
    hosts = Hosts([record.facts for record in records], host_size)
    units = program.units
    asks = [
        Ask(
            unit.label,
            None if unit.replicas is FILL else unit.replicas,
            unit.placement,
            len(unit.roles),
            tuple(program.roles[i].label for i in unit.roles),
        )
        for unit in units
    ]
    attached: dict[int, list[int]] = {}
    for rank, record in enumerate(records):
        if record.attached is not None:
            attached.setdefault(program.roles[record.attached].unit, []).append(rank)
    if not attached:
        return place(asks, hosts, threads=threads), hosts
    return _place_around(asks, attached, records, host_size), hosts


def _place_around(
    asks: Sequence[Ask],
    attached: dict[int, list[int]],
    records: Sequence[handshake.Record],
    host_size: Any,
) -> Plan:
    """Place units around those whose ranks are given."""
    for unit, ranks in attached.items():
        wanted = asks[unit].replicas
        if wanted is not None and wanted != len(ranks):
            raise UsageError(
                f"mpiml.attach(label={asks[unit].label!r}): expected {wanted} ranks to attach, "
                f"one for each replica, got {len(ranks)}."
            )
    taken = {rank for ranks in attached.values() for rank in ranks}
    free = [rank for rank in range(len(records)) if rank not in taken]
    rest = [i for i in range(len(asks)) if i not in attached]
    ranks: list[tuple[int, ...]] = [tuple(attached.get(i, ())) for i in range(len(asks))]
    gpus: dict[tuple[int, int], tuple[int, ...]] = {}
    notes: tuple[str, ...] = ()
    if rest and not free:
        raise UsageError(
            f"mpiml.attach: all {len(records)} ranks attach, and none is left for "
            f"{', '.join(asks[i].label for i in rest)}. Let one rank call mpiml.launch."
        )
    if rest:
        plan = place(
            [asks[i] for i in rest], Hosts([records[r].facts for r in free], host_size)
        )
        for position, unit in enumerate(rest):
            ranks[unit] = tuple(free[r] for r in plan.ranks[position])
        gpus = {(rest[unit], replica): ids for (unit, replica), ids in plan.gpus.items()}
        notes = plan.notes
    return Plan(tuple(map(len, ranks)), tuple(ranks), (), gpus, notes)


def _build(
    load: Callable[[], Program],
) -> tuple[Program | None, list[Any], BaseException | None]:
    """Load, check and describe; an error is returned, since others must hear of it."""
    try:
        program = load()
        program.check()
        file = getattr(sys.modules.get(_module_of(program)), "__file__", None)
        from mpiml.digest import describe

        return program, describe(program, file), None
    except BaseException as error:
        return None, [], error


def _module_of(program: Program) -> str:
    """Return the module whose file the digest covers: that of the first node's callable."""
    for role in program.roles:
        for member in role.members:
            module = getattr(member.node.callable, "__module__", None)
            if module in sys.modules and hasattr(sys.modules[module], "__file__"):
                return str(module)
    return "__main__"


def _start(
    load: Callable[[], Program],
    comm: Any,
    settings: Settings,
    threads: int | None,
    attached: str | None,
    log: Callable[[str], None],
) -> _Running:
    """Take the program from its loader to the engine of this rank. Collective over `comm`."""
    program, lines, error = _build(load)
    role = None
    if attached is not None and program is not None:
        labels = [r.label for r in program.roles]
        if attached in labels:
            role = labels.index(attached)
        else:
            error = UsageError(
                f"mpiml.attach: the program has no role {attached!r}; it has {', '.join(labels)}"
            )
    config = Config.read()
    if comm is None:
        if error is not None:
            raise error
        records = [handshake.Record(handshake.READY, 0, role, b"", handshake.local_facts())]
    else:
        records = handshake.exchange(comm, lines, error, role)
    assert program is not None
    plan, hosts = _place(program, records, threads, config.host_size)
    vertices = program.expand(plan.replicas)
    ranks = [plan.ranks[v.unit[0]][v.unit[1]] for v in vertices]
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    spin = 0 if hosts.oversubscribed(rank) else config.spin_us
    window = (config.window_messages, config.window_bytes)
    engine = Engine(rank, size, window, log, spin)
    world = None
    if comm is not None:
        from mpiml.world import World

        world = World(comm)
        world.split_roles(_layers(vertices, ranks, rank))
    runtime = Runtime(program.name, vertices, ranks, engine, hosts, world, plan.gpus, settings)
    if world is not None:
        from mpiml.linking import link

        engine.connect(link(world, engine, hosts, config))
    if rank == 0 and size > 1:
        for note in plan.notes:
            log(note)
    return _Running(runtime, config, plan, Survey(runtime, settings.stall_warning))


def _layers(
    vertices: Sequence[Any], ranks: Sequence[int], me: int
) -> list[tuple[int, int, int]]:
    """Return the splits that make a communicator for each role with a rank per replica.

    Roles that share no rank share a split, so usually one is enough for the whole program.
    """
    members: dict[int, list[int]] = {}
    for vertex in vertices:
        members.setdefault(vertex.role_index, []).append(ranks[vertex.id])
    layers: list[tuple[set[int], list[int]]] = []
    for role, held in sorted(members.items()):
        if len(set(held)) < len(held):
            continue  # replicas share a rank: no communicator
        for taken, roles in layers:
            if not taken & set(held):
                taken.update(held)
                roles.append(role)
                break
        else:
            layers.append((set(held), [role]))
    splits = []
    for _, roles in layers:
        mine = [role for role in roles if me in members[role]]
        role = mine[0] if mine else -1
        splits.append((role, role, members[role].index(me) if mine else 0))
    return splits


def _finish(running: _Running) -> Result:
    """Turn the end of a program into a result or an error. Local."""
    runtime = running.runtime
    note = runtime.ending.note
    assert note is not None
    if note.reason == FAILED or note.reason == STUCK:
        if note.reason == STUCK:
            raise MpimlError(f"nodes still ran after the grace:\n{note.text}")
        raise runtime.error_of(note)
    if runtime.error is not None and not isinstance(runtime.error, SystemExit):
        raise runtime.error
    result = Result(runtime, note.text, runtime.engine.rank)
    result.status = note.status  # type: ignore[attr-defined]
    return result


@contextmanager
def _claimed(comm: Any) -> Iterator[None]:
    """Refuse a second program on a communicator at the same time."""
    if comm is not None:
        if comm.Is_inter():
            raise UsageError(
                "mpiml.launch: expected an intracommunicator, got an intercommunicator"
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
        if comm is not None:
            _busy.remove(comm)


def _log(text: str) -> None:
    sys.stderr.write(f"mpiml: {text.rstrip()}\n")
    sys.stderr.flush()


@contextmanager
def _session(
    load: Callable[[], Program],
    comm: Any,
    settings: Settings,
    threads: int | None = None,
    attached: str | None = None,
    hooks: bool = False,
    log_dir: Any = None,
) -> Iterator[_Running]:
    """Start a program and close everything after it, whatever happens."""
    with ExitStack() as stack:
        stack.enter_context(_claimed(comm))
        running = _start(load, comm, settings, threads, attached, _log)
        runtime = running.runtime
        single = runtime.nodes[0].title if len(runtime.nodes) == 1 else None
        if hooks:
            _hook(stack, running)
        stack.enter_context(Output(single, log_dir))
        try:
            yield running
        finally:
            running.survey.close()
            runtime.engine.close()
            if runtime.world is not None and not runtime.ending.abandoned:
                runtime.world.close()


def _hook(stack: ExitStack, running: _Running) -> None:
    """Install what listens to signals, threads, the launcher and the clock."""
    runtime = running.runtime

    def on_stop(number: int) -> None:
        import signal

        name = signal.Signals(number).name
        status = 130 if name == "SIGINT" else 143
        runtime.request(SIGNALLED, status, name)

    def on_death(text: str) -> None:
        os._exit(1)

    def on_error(error: BaseException, thread: Any) -> None:
        runtime.fail(_node_of_thread(runtime), error)

    again = lambda: runtime._abort(130)  # noqa: E731
    quit_ = lambda: running.survey.show(sys.stderr.write)  # noqa: E731
    stack.enter_context(Signals(on_stop, again, quit_))
    stack.enter_context(LauncherWatch(on_death, running.config))
    stack.enter_context(install_excepthooks(on_error))
    if runtime.settings.max_time is not None and runtime.engine.rank == 0:
        import threading

        timer = threading.Timer(
            runtime.settings.max_time, lambda: runtime.request(TIME, 143, "--max-time")
        )
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)


def _node_of_thread(runtime: Runtime) -> HostedNode:
    from mpiml.scope import current_scope

    scope = current_scope(required=False)
    return runtime.nodes[0] if scope is None else scope.owner  # type: ignore[no-any-return]


def _default_comm() -> Any:
    """Return COMM_WORLD under an MPI launcher or in a running MPI program, else None."""
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1:
            return MPI.COMM_WORLD
    if Config.read().launcher is None:
        return None
    from mpiml import world

    return world.start()


def launch(
    program: Program | Callable[..., Program],
    comm: Any = None,
    *,
    grace: float = 10.0,
    stall_warning: float = 60.0,
    seed: int = 0,
    max_time: float | None = None,
    threads: int | None = None,
    progress: bool = False,
    on_stuck: str = "abort",
) -> Result:
    """Run a program to its end.

    Collective over `comm`: all ranks pass the same program.

    Parameters
    ----------
    program
        A `Program`; or the function that builds it, whose parameters are then the command
        line, as under ``python -m mpiml.run``.
    comm
        An mpi4py intracommunicator; it is duplicated. None: all ranks of the launcher that
        started this process, or, without one, threads of this process.
    grace
        Seconds that code which does not wait in mpiml gets to end after a stop.
    stall_warning
        Seconds after which nodes that all wait are reported; 0 turns it off.
    seed
        What every node's own seed is derived from.
    max_time
        Seconds after which the program is stopped.
    threads
        Without MPI: replicas of the role that has ``FILL``.
    progress
        Show what nodes `report` on standard error.
    on_stuck
        What happens to nodes that run on after the grace: ``"abort"`` the job, or ``"raise"``.

    Returns
    -------
    Result
        Return values by role, on rank 0.

    Raises
    ------
    GraphMismatchError, PlacementError, UsageError
        On all ranks, before anything has started.
    Exception
        Whatever left a node, on every rank, with the remote traceback as ``__cause__``.
    """
    if on_stuck not in ("abort", "raise"):
        raise UsageError(f"launch: expected on_stuck 'abort' or 'raise', got {on_stuck!r}")
    settings = Settings(grace, stall_warning, seed, max_time, on_stuck, progress)
    if not isinstance(program, Program):
        return _launch_script(program, comm, settings, threads)
    hooks = comm is None
    if comm is None:
        comm = _default_comm()
    with _session(lambda: program, comm, settings, threads, hooks=hooks) as running:
        running.runtime.run()
    return _finish(running)


def _launch_script(
    build: Callable[..., Program], comm: Any, settings: Settings, threads: int | None
) -> Result:
    """Run ``python hello.py args``: the function's parameters are the command line."""
    if not callable(build):
        raise UsageError(
            f"launch: expected a Program or a function that builds one, got {type(build).__name__}"
        )
    box: list[Result] = []
    options = cmdline.parse_script(sys.argv, build.__name__)

    def load() -> Program:
        return cmdline.call_build(build, options.build_args)

    if comm is not None:
        with _session(load, comm, settings, threads) as running:
            running.runtime.run()
        return _finish(running)
    status = run_program(load, options._replace(threads=threads), settings=settings, box=box)
    if status:
        raise SystemExit(status)
    return box[0]


def run_program(
    load: Callable[[], Program],
    options: cmdline.Options,
    comm: Any = None,
    settings: Settings | None = None,
    box: list[Result] | None = None,
) -> int:
    """Run a program as a command does: show its error once, return the exit status.

    Collective under an MPI launcher, which is found out here. MPI is initialised before
    `load` is called, so an error there ends all ranks.

    Parameters
    ----------
    load
        Builds the program; may raise.
    options
        The command line.
    comm
        For tests: a communicator instead of the launcher's.
    settings
        What `launch` was given, where a script calls it.
    box
        Takes the `Result`.
    """
    base = settings or Settings(
        options.grace, options.stall_warning, options.seed, options.max_time
    )
    progress = bool(options.progress) or (options.progress is None and base.progress)
    base = base._replace(progress=progress, failure_grace=_FAILURE_GRACE, prints=True)
    if comm is None:
        comm = _default_comm()
    rank = 0 if comm is None else comm.rank
    try:
        with _session(
            load, comm, base, options.threads, hooks=True, log_dir=options.log_dir
        ) as running:
            running.runtime.run()
        result = _finish(running)
        if box is not None:
            box.append(result)
        status = int(result.status)  # type: ignore[attr-defined]
    except BaseException as error:
        status = _show(error, rank, comm is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    if comm is not None and box is None:
        from mpiml import world

        world.finish()
    return status


def _show(error: BaseException, rank: int, shared: bool) -> int:
    """Write an error that no node has shown yet, on one rank; return the exit status."""
    import traceback

    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    speaker = getattr(error, "mpiml_rank", None)
    if getattr(error, "mpiml_shown", False):
        return 1
    usage = isinstance(error, UsageError)
    if rank == (speaker if speaker is not None else 0):
        if isinstance(error, MpimlError) and (usage or speaker is None):
            text = str(error)
            prefix = "" if text.startswith("usage:") else "mpiml: "
            sys.stderr.write(f"{prefix}{text}\n")
        else:
            sys.stderr.write("".join(traceback.format_exception(error)))
        sys.stderr.flush()
    return 2 if usage else 1


@contextmanager
def attach(program: Program, comm: Any, label: str, **settings: Any) -> Iterator[Any]:
    """Let the calling code be the body of a node: the block is the body.

    Collective over `comm`: some ranks attach, the others call `launch` with the same program.

    Parameters
    ----------
    program
        The program; the node's own function is not called on a rank that attaches.
    comm
        An mpi4py intracommunicator, or None in a single process.
    label
        Role of the calling code.
    **settings
        As for `launch`.

    Yields
    ------
    Context
        The node's context, with ``clients[label]`` for every other role.

    Raises
    ------
    UsageError
        If the program has no such role, or more or fewer ranks attach than it has replicas.
    """
    from mpiml.context import context
    from mpiml.scope import enter, leave

    with _session(lambda: program, comm, Settings(**settings), attached=label) as running:
        runtime = running.runtime
        node = next(n for n in runtime.nodes if n.spec.role == label)
        runtime.start(attached=node)
        token = enter(node.scope)
        try:
            me = context()
            me.clients = _Clients(runtime, node)  # type: ignore[attr-defined]
            yield me
        except BaseException as error:
            node.left_by(error)
        else:
            node.left_by(None)
        finally:
            leave(token)
        runtime.run(attached=node)
    _finish(running)


class _Clients:
    """``me.clients[label]``: the client of a role, made when it is asked for."""

    def __init__(self, runtime: Runtime, node: HostedNode) -> None:
        self._runtime = runtime
        self._node = node

    def __getitem__(self, label: str) -> Any:
        if not any(v.role == label for v in self._runtime.vertices):
            labels = ", ".join(sorted({v.role for v in self._runtime.vertices}))
            raise KeyError(f"no role {label!r}; the program has {labels}")
        return self._runtime.clients(label, self._node)
