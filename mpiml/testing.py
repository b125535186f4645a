"""`running`: a program in threads inside a test, with some of its nodes stepped by the test.

    with mpiml.testing.running(program, manual=["learner"]) as run:
        learner = run["learner"]          # the object, built with live clients
        for _ in range(10):
            learner.step()
        assert run.client("counter").total() == 10

Nothing here needs pytest or MPI.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mpiml.control import EXIT, FAILED
from mpiml.errors import ServiceGoneError, Stopped, UsageError
from mpiml.hosting import HostedNode
from mpiml.program import Program
from mpiml.result import Result, finish
from mpiml.runtime import Runtime, Settings
from mpiml.scope import BodyScope, enter, leave
from mpiml.session import Job, run_session

__all__ = ["Run", "running"]


class Run:
    """A program that runs beside a test. Made by `running`.

    Local. Its clients may be used by the test's thread and by threads the test starts.

    Attributes
    ----------
    result : Result or None
        What the program returned, once the block has been left.
    """

    def __init__(self, runtime: Runtime, manual: dict[str, list[HostedNode]]) -> None:
        self.result: Result | None = None
        self._runtime = runtime
        self._manual = manual
        self._stepped: dict[str, list[Any]] = {}
        held = [node for nodes in manual.values() for node in nodes]
        self._scope = held[0].scope if len(held) == 1 else BodyScope(_Test(manual))

    def __getitem__(self, label: str) -> Any:
        """Return what the test steps for a role named in ``manual``.

        The constructed object of a class or service node; for a function a callable with its
        arguments bound. A list of them where the role has several nodes.

        Raises
        ------
        UsageError
            If the role was not named in ``manual``.
        """
        if label not in self._manual:
            named = ", ".join(self._manual) or "none"
            raise UsageError(
                f"run[{label!r}]: expected a role that the test steps ({named}). Name it in "
                f"running(program, manual=[{label!r}]), or call it with run.client({label!r})."
            )
        stepped = self._stepped[label]
        return stepped[0] if len(stepped) == 1 else list(stepped)

    def client(self, label: str) -> Any:
        """Return a client of a role: of its node, or the group of its replicas.

        Raises
        ------
        UsageError
            If the program has no such role.
        """
        labels = list(dict.fromkeys(v.role for v in self._runtime.vertices))
        if label not in labels:
            raise UsageError(
                f"run.client({label!r}): no such role; the program has {', '.join(labels)}"
            )
        return self._runtime.clients(label, None)

    @contextmanager
    def inside(self, label: str, index: int = 0) -> Iterator[Any]:
        """Let the block belong to a node the test steps; gives the node's context.

        With one such node the whole test belongs to it anyhow.
        """
        self[label]
        node = self._manual[label][index]
        token = enter(node.scope)
        try:
            from mpiml.context import context

            yield context()
        finally:
            leave(token)

    def stop(self) -> None:
        """Stop the program in order, as a node's ``context().stop()`` does; returns at once."""
        self._runtime.request_stop(self._runtime.nodes[0], "the test stopped it")

    @property
    def stopping(self) -> bool:
        """Whether the program stops."""
        return self._runtime.stopping

    def _build(self) -> None:
        """Construct the nodes that the test steps, on its thread."""
        for label, nodes in self._manual.items():
            self._stepped[label] = [self._build_one(node) for node in nodes]

    def _build_one(self, node: HostedNode) -> Any:
        token = enter(node.scope)
        try:
            node.build()
        except BaseException as error:
            node.fail(error)
            raise
        finally:
            leave(token)
        return node.object if node.object is not None else _bound(node)


class _Test:
    """Stands in for the node where the test's thread belongs to none."""

    title = "test"
    vertex = -1

    def __init__(self, manual: Iterable[str]) -> None:
        self._labels = ", ".join(manual) or "none"

    @property
    def context(self) -> Any:
        raise UsageError(
            "mpiml.context(): expected one node that the test steps, got "
            f"{self._labels}. Use `with run.inside(label, index):` around the step."
        )

    def team(self) -> Any:
        """Refuse collectives too, in the same words."""
        return self.context


@contextmanager
def running(
    program: Program,
    manual: Iterable[str] = (),
    *,
    threads: int | None = None,
    seed: int = 0,
    grace: float = 5.0,
) -> Iterator[Run]:
    """Run a program in threads of this process while the block, a test, runs beside it.

    Local: no MPI. The nodes named in `manual` are constructed but not run: the test steps
    them, and the program does not end before the test leaves the block. Leaving it stops the
    program in order. When a node fails, every mpiml wait of the test raises, and leaving the
    block raises the node's error with its own traceback; a test that fails by itself keeps
    its own error, with a note about the node.

    Parameters
    ----------
    program
        The program; it can be run once.
    manual
        Labels of the roles that the test steps.
    threads
        Replicas of the role that has ``FILL``: 1 by default.
    seed
        What every node's own seed is derived from.
    grace
        Seconds that nodes which do not wait in mpiml get to end; `MpimlError` then.

    Yields
    ------
    Run
        ``run[label]`` for what the test steps, ``run.client(label)`` for the others.

    Raises
    ------
    UsageError
        `manual` names a role that the program does not have.
    """
    labels = [manual] if isinstance(manual, str) else list(manual)
    settings = Settings(grace, seed=seed, on_stuck="raise")
    job = Job(lambda: _checked(program, labels), None, None, settings, threads, output=False)
    with run_session(job) as runtime:
        held = {label: [n for n in runtime.nodes if n.spec.role == label] for label in labels}
        run = Run(runtime, held)
        runtime.start([node for nodes in held.values() for node in nodes], extra=1)
        _halt_with(runtime, run._scope)
        token = enter(run._scope)
        failure = None
        try:
            run._build()
            yield run
        except BaseException as error:
            failure = error
        finally:
            leave(token)
        _end(runtime, held)
    run.result = _outcome(runtime, failure)


def _checked(program: Program, labels: list[str]) -> Program:
    known = [role.label for role in program.roles] if isinstance(program, Program) else labels
    for label in labels:
        if label not in known:
            raise UsageError(
                f"running(manual=[{label!r}]): no such role; the program has {', '.join(known)}"
            )
    return program


def _bound(node: HostedNode) -> Callable[[], Any]:
    """Return the function of a node, with its arguments, made to belong to the node."""

    def step() -> Any:
        token = enter(node.scope)
        try:
            function: Callable[[], Any] = node._call
            node.value = result = function()
            if hasattr(result, "__await__"):
                node.value = node.loop.run(result, node.scope)
            return node.value
        finally:
            leave(token)

    return step


def _halt_with(runtime: Runtime, scope: BodyScope) -> None:
    """Let every mpiml wait of the test raise `Stopped` once the program stops."""
    import threading

    def watch() -> None:
        try:
            runtime.engine.wait(runtime.ending.stopped, None, None)
        except ServiceGoneError:
            return
        scope.stop()
        runtime.engine.interrupt()

    threading.Thread(target=watch, name="mpiml test", daemon=True).start()


def _end(runtime: Runtime, held: dict[str, list[HostedNode]]) -> None:
    """Leave the bodies that were the test's, and wait for the others."""
    if not runtime.stopping:
        runtime.request_stop(runtime.nodes[0], "the test left the block")
    for nodes in held.values():
        for node in nodes:
            node.left_by(None)
    runtime.ending.body(-1)
    runtime.run(started=True)


def _outcome(runtime: Runtime, failure: BaseException | None) -> Result:
    """Return the result; or raise the node's error, or the test's where it is no echo of it."""
    note = runtime.ending.note
    failed = note is not None and note.reason in (FAILED, EXIT)
    if failure is None or isinstance(failure, Stopped):
        return finish(runtime)
    if failed:
        assert note is not None
        error = runtime.error_of(note)
        if error is failure or isinstance(failure, ServiceGoneError):
            raise error
        spec = runtime.vertices[note.vertex]
        failure.add_note(f"mpiml: {spec.title} failed too: {error!r}")
    raise failure
