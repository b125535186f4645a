"""What a node knows about itself: role, index, communicators, seeds, the stop."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mpiml.errors import PlacementError, UsageError
from mpiml.hosting import HostedNode
from mpiml.scope import BodyScope, current_scope, enter, leave

__all__ = ["Context", "context", "missing_ranks"]


class Context:
    """The node that the calling code belongs to.

    Local. Got from ``mpiml.context()`` in a body, a method, or a thread made by `bind`.

    Attributes
    ----------
    role, index, replicas
        Label of the node, its number in its role, and the size of the role.
    world_rank, world_size
        Rank and size in the program's communicator.
    host, local_rank, local_size
        Name of the machine, and place among the ranks there.
    gpus : tuple of int
        Devices that were given to this node.
    seed : int
        Different for each node; the same for the same ``--seed``, role and index.
    clients
        Under `mpiml.attach`: ``clients[label]`` is the client of each role. None elsewhere,
        since other nodes are given theirs as arguments.
    args, kwargs
        Under `mpiml.attach`: the arguments of the node in the graph, as a body would get them:
        clients for handles, a `Publisher` or `Subscriber` for the end of a topic. They are built when
        one of the two is first asked for. None elsewhere.
    """

    def __init__(self, node: HostedNode) -> None:
        runtime = node.runtime
        self._node = node
        self.role: str = node.spec.role
        self.index: int = node.spec.index
        self.replicas: int = node.spec.replicas
        self.world_rank: int = runtime.engine.rank
        self.world_size: int = runtime.engine.size
        self.host: str = runtime.hosts.name_of(self.world_rank)
        self.local_rank: int = runtime.hosts.local_rank(self.world_rank)
        self.local_size: int = runtime.hosts.local_size(self.world_rank)
        self.gpus: tuple[int, ...] = runtime.gpus_of(node.spec)
        self.seed: int = _seed(runtime.settings.seed, self.role, self.index)
        self.clients: Any = None
        self.given: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self._rng: Any = None
        self._log: Any = None

    @property
    def args(self) -> tuple[Any, ...] | None:
        """The positional arguments of an attached node."""
        return None if self.given is None else self.given()[0]

    @property
    def kwargs(self) -> dict[str, Any] | None:
        """The arguments by name of an attached node."""
        return None if self.given is None else self.given()[1]

    @property
    def comm(self) -> Any:
        """The communicator of the role: one rank for each replica, ordered by index.

        Raises
        ------
        PlacementError
            If replicas share a rank; says how many ranks are missing.
        """
        return self._node.runtime.role_comm(self._node.spec)

    @property
    def world(self) -> Any:
        """A communicator of all ranks of the program, for the program's own use."""
        return self._node.runtime.user_comm()

    @property
    def rng(self) -> Any:
        """The node's `numpy.random.Generator`, seeded with `seed`."""
        if self._rng is None:
            import numpy as np

            self._rng = np.random.default_rng(self.seed)
        return self._rng

    @property
    def log(self) -> Any:
        """A `logging.Logger` whose lines start with ``[role/index]``."""
        if self._log is None:
            import logging

            self._log = logging.getLogger(f"mpiml.{self.role}.{self.index}")
            if not self._log.handlers:
                handler = _handler()
                handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
                self._log.addHandler(handler)
                self._log.propagate = False
                if self._log.level == logging.NOTSET:
                    self._log.setLevel(logging.INFO)
        return self._log

    @property
    def stopping(self) -> bool:
        """Whether this node is to end.

        In a role of several that counts rounds, by `agree_stop` or by `mpiml.collectives`, it
        turns true after the same round on all of them.
        """
        node = self._node
        node.polls += node.agreement.alert
        return node.agreed

    def stop(self) -> None:
        """End the program in order, from any body or method; returns at once."""
        node = self._node
        node.runtime.request_stop(node, f"{node.title} called stop()")

    def agree_stop(self) -> bool:
        """Return whether to leave the loop now: the same answer in the same round everywhere.

        Collective over the role: every replica calls it once in each round of a loop that
        uses collectives, as in ``while not context.agree_stop(): ...``. It sends nothing
        until a stop has been asked for. Those of `mpiml.collectives` are such rounds themselves;
        a loop that calls this is left here, not between two of them.
        """
        return self._node.agree_stop()

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until the program stops, at most `timeout` seconds; whether it does.

        A body that sits here without a `timeout` does not keep the program from ending. With
        one it does: that is a pause in its work, as `time.sleep` is, but one that a stop ends.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._node.wait_for_stop(timeout, deadline)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Run `callback` when all bodies have ended and the calls already made have run.

        Services still answer then. Callbacks run in the order given, once.
        """
        if not callable(callback):
            raise UsageError(f"on_stop: expected a function, got {callback!r}")
        self._node.callbacks.append(callback)

    def report(self, done: float, total: float | None = None, **metrics: float) -> None:
        """Report progress: shown on one line for the whole program with ``--progress``."""
        self._node.runtime.report(self._node, done, total, metrics)

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` made to belong to this node in whatever thread it runs.

        It does so once it has begun: a thread that was started may be held off its core, and
        until it runs nothing waits for it. Where that matters, let it say that it has begun.

        An exception that ends the thread ends the program, as one in the body does, where
        mpiml listens to threads: under ``mpiml.run``, and in a `launch` without ``comm``.
        """
        node = self._node
        scope = current_scope(required=False)
        if scope is None or not isinstance(scope, BodyScope):
            scope = node.scope

        def bound(*args: Any, **kwargs: Any) -> Any:
            token = enter(scope)
            key = object()  # a thread may be in several at once
            node.bound[key] = threading.get_ident()
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                with contextlib.suppress(AttributeError):
                    error.mpiml_vertex = node.vertex  # type: ignore[attr-defined]
                raise
            finally:
                del node.bound[key]
                leave(token)

        return bound

    def __repr__(self) -> str:
        return f"<context of {self.role}/{self.index}, rank {self.world_rank}>"


def _handler() -> Any:
    """Return a handler that writes to what ``sys.stderr`` is at each line.

    A logger outlives its program, and the next program of the process has its own streams.
    """
    import logging

    class Handler(logging.StreamHandler):  # type: ignore[type-arg]
        @property
        def stream(self) -> Any:
            return sys.stderr

        @stream.setter
        def stream(self, value: Any) -> None:
            """Take what the base class sets; nothing is kept."""

    return Handler()


def context() -> Context:
    """Return the context of the node that the calling code belongs to.

    Raises
    ------
    UsageError
        Outside of a node, or in a thread that belongs to none where nodes share a process.
    """
    scope = current_scope()
    assert scope is not None
    node = scope.owner
    if node.context is None:
        node.context = Context(node)
    return node.context  # type: ignore[no-any-return]


def missing_ranks(role: str, replicas: int, ranks: int) -> PlacementError:
    """Build the error of a role whose replicas share ranks and so have no communicator."""
    return PlacementError(
        f"context().comm of role {role!r}: expected one rank for each of its {replicas} "
        f"replicas, got {ranks}. Start {replicas - ranks} more ranks, or have fewer replicas."
    )


def _seed(root: int, role: str, index: int) -> int:
    """Mix the program's seed with role and index: the same for any number of ranks."""
    import hashlib

    digest = hashlib.sha256(f"{root}\0{role}\0{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
