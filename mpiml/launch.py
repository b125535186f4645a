"""`launch` and `attach`: place a program on ranks or threads, run it, return its result.

The handshake comes first: one small collective of fixed-size records, in which every rank
says whether it has a program, what its digest is, and what its host offers. Errors while
loading a file take part in it, so no rank waits for one that has failed.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mpiml import cmdline
from mpiml.claims import default_comm
from mpiml.config import Config
from mpiml.errors import MpimlError, UsageError
from mpiml.graph import arguments
from mpiml.handles import walk
from mpiml.hosting import HostedNode
from mpiml.loading import refuse_while_loading
from mpiml.program import Program
from mpiml.refusal import end_job
from mpiml.result import Result, finish
from mpiml.runtime import Runtime, Settings
from mpiml.session import Job, run_session
from mpiml.survey import thread_frames
from mpiml.tracebacks import error_text

__all__ = ["Result", "attach", "launch", "run_program"]

_FAILURE_GRACE = 1.5
_AHEAD = 1.0  # s, that rank 0, which says why nothing starts, is ahead in leaving


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
    settings = Settings(grace, stall_warning, seed, max_time, on_stuck, progress)
    refuse_while_loading()
    if not isinstance(program, Program):
        return _launch_script(program, comm, settings, threads)
    hooks = comm is None
    comm = default_comm() if comm is None else comm
    job = Job(lambda: program, _caller(), comm, settings, threads, hooks=hooks)
    return _run(job)


def _run(job: Job) -> Result:
    with run_session(job) as runtime:
        runtime.run()
    return finish(runtime)


def _caller() -> str:
    """Return the file of the code that called into this module: what the digest covers."""
    return sys._getframe(2).f_code.co_filename


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
        try:
            return cmdline.call_build(build, options.build_args)
        except cmdline.Help as wish:
            if Config.read_foreign().rank_hint in (None, 0):  # one of many ranks speaks
                print(wish, end="", flush=True)
            raise SystemExit(0) from None

    if comm is not None:
        return _run(Job(load, options.file, comm, settings, threads))
    status = run_program(load, options._replace(threads=threads), settings=settings, box=box)
    if status or not box:
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
    rank = Config.read_foreign().rank_hint or 0
    try:
        comm = default_comm() if comm is None else comm
        rank = 0 if comm is None else comm.rank
        job = Job(
            load, options.file, comm, base, options.threads, hooks=True, log_dir=options.log_dir
        )
        result = _run(job)
        if box is not None:
            box.append(result)
        status = result.status
    except BaseException as error:
        turn = getattr(error, "mpiml_turn", None)  # of a rank that is refused by itself
        time.sleep(turn or 0.0)
        status = _show(error, rank, comm is not None)
        if turn is not None:
            end_job(status)
        if comm is None and rank:  # Open MPI ends all ranks as soon as one has left
            time.sleep(_AHEAD)
    left = _threads_left(base.grace) if box is None else ""
    if left:
        sys.stderr.write(f"mpiml: threads that a node has started still run:\n{left}")
        status = status or 1
    sys.stdout.flush()
    sys.stderr.flush()
    if comm is not None and box is None:
        from mpiml import world

        world.finish(status or 1)
    if left:
        os._exit(status)  # Python would wait for them for ever
    return status


def _threads_left(grace: float) -> str:
    """Wait for threads that are not daemons; return names and stacks of those that stay."""
    end = time.monotonic() + grace
    left = []
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                left.append(thread)
    if not left:
        return ""
    import traceback

    frames = thread_frames()
    return "".join(
        f"[{thread.name}]\n{''.join(traceback.format_stack(frames.get(thread.ident or 0)))}"
        for thread in left
    )


def _show(error: BaseException, rank: int, shared: bool) -> int:
    """Write an error that no node has shown yet, on one rank; return the exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    speaker = getattr(error, "mpiml_rank", None)
    first = getattr(error, "mpiml_first", 0)  # the first that runs Python
    if getattr(error, "mpiml_shown", False):
        return 1
    usage = isinstance(error, UsageError)
    if rank == (speaker if speaker is not None else first):
        if isinstance(error, MpimlError) and (usage or speaker is None):
            text = str(error)
            prefix = "" if text.startswith(("usage:", "mpiml")) else "mpiml: "
            sys.stderr.write(f"{prefix}{text}\n")
        else:
            sys.stderr.write(error_text(error))
        sys.stderr.flush()
    return 2 if usage else 1


def attach(
    program: Program,
    comm: Any = None,
    *,
    label: str,
    grace: float = 10.0,
    stall_warning: float = 60.0,
    seed: int = 0,
    max_time: float | None = None,
    progress: bool = False,
    on_stuck: str = "abort",
) -> AbstractContextManager[Any]:
    """Let the calling code be the body of a node: the block is the body.

    Collective over `comm`: some ranks attach, the others call `launch` with the same program.

    Parameters
    ----------
    program
        The program; the node's own function is not called on a rank that attaches.
    comm
        As for `launch`.
    label
        Role of the calling code.
    grace, stall_warning, seed, max_time, progress, on_stuck
        As for `launch`.

    Returns
    -------
    context manager
        Of the node's `Context`, with ``clients[label]`` for every other role, and ``args`` and
        ``kwargs``: what the node was given in the graph, such as the ends of topics.

    Raises
    ------
    UsageError
        If the program has no such role, or more or fewer ranks attach than it has replicas.
    """
    chosen = Settings(grace, stall_warning, seed, max_time, on_stuck, progress)
    comm = default_comm() if comm is None else comm
    return _attached(Job(lambda: program, _caller(), comm, chosen, attached=label))


@contextmanager
def _attached(job: Job) -> Iterator[Any]:
    from mpiml.context import Context
    from mpiml.scope import enter, leave

    with run_session(job) as runtime:
        node = next(n for n in runtime.nodes if n.spec.role == job.attached)
        node.attached = True
        token = enter(node.scope)
        try:
            runtime.start([node])
            me = node.context = Context(node)
            me.clients = _Clients(runtime, node)
            me.given = _Given(node)
            _hold(runtime, node)
            yield me
        except BaseException as error:
            node.left_by(error)
        else:
            node.left_by(None)
        finally:
            leave(token)
        runtime.run(started=True)
    finish(runtime)


def _hold(runtime: Runtime, node: HostedNode) -> None:
    """Let what counts who holds it know of attached code, for which no arguments are built."""
    for _, argument in arguments(node.spec.node):
        for _, value in walk(argument):
            if hasattr(type(value), "hold_for"):
                value.hold_for(runtime, node)


class _Given:
    """The arguments of a node that attaches, as `bind` makes them for a body; built once."""

    def __init__(self, node: HostedNode) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._built: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from mpiml.scope import enter, leave

        node = self._node
        with self._lock:
            if self._built is None:
                token = enter(node.scope)  # whoever asks: they are the node's
                try:
                    self._built = node.arguments()
                finally:
                    leave(token)
            return self._built


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
