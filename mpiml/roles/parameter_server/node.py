"""`ParameterServerNode`: parameters that workers pull and push gradients to, in the graph."""

from collections.abc import Callable, Iterable
from typing import Any

from mpiml.consistency import Consistency, as_consistency
from mpiml.errors import UsageError
from mpiml.nodes import ServiceNode
from mpiml.optim import Optimizer
from mpiml.references import Deferred, HandleSequence
from mpiml.roles.parameter_server.client import ParameterClient
from mpiml.roles.parameter_server.holding import Hold
from mpiml.roles.parameter_server.opening import client_of, open_client
from mpiml.roles.parameter_server.settings import Settings
from mpiml.roles.parameter_server.shard import Shard
from mpiml.whole import whole_number

__all__ = ["ParameterHandle", "ParameterServerNode"]

_NONFINITE = ("raise", "drop")


class ParameterHandle(Deferred):
    """Stands for a parameter server in the arguments of nodes; becomes a `ParameterClient`.

    Every node that holds it is a worker, for which others may have to wait. One that only pulls
    is given ``handle.reader()``.
    """

    __slots__ = ("_hold", "_shards")

    def __init__(self, shards: HandleSequence, hold: Hold) -> None:
        super().__init__(open_client, shards, hold)
        self._shards, self._hold = shards, hold

    def reader(self) -> "ParameterHandle":
        """Return a handle of a node that only pulls: no worker waits for it, it for none."""
        return ParameterHandle(self._shards, Hold(self._hold.node, True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copies and pickles ask for before there is anything
            raise AttributeError(name)
        raise AttributeError(
            f"{self!r} has no {name!r}: it is a handle while the graph is built, and becomes a "
            "ParameterClient inside the node that holds it. Pass it as an argument of that node, as "
            "in PyNode(train, params)."
        )

    def __repr__(self) -> str:
        more = ".reader()" if self._hold.reads else ""
        return f"<handle {self._shards.text()}{more}, a parameter server>"


class ParameterServerNode(ServiceNode):
    """Parameters on one or several ranks, which workers pull, and push gradients to.

    ``program.add_node`` returns a handle of all ranks together; it becomes a `ParameterClient`
    in the nodes that hold it, which are its workers. Which gradients are applied when, and when a
    pull is answered, is up to the consistency; the order is the same on all shards, and a pull
    gets parts of one version. See docs/parameter-server.md.

    Parameters
    ----------
    init : tree of arrays, or function
        The parameters at first: float32 or float64, and `Keys` for ranges of sparse rows. A
        function is called on each of the servers, and must return the same there.
    optimizer : Optimizer or function
        What is done with a gradient: of `mpiml.optim`; or ``update(parameter, gradient, state,
        step)``, which changes the flat array `parameter` and the dict `state` in place, and is
        called for each part of an array that a server holds.
    consistency : str or Consistency
        ``"async"``, ``"bsp"``, or one of `mpiml.consistency`.
    shards : int
        On how many ranks: each holds a part of the arrays, of about as many bytes; large arrays
        are split.
    nonfinite : str
        What is done with a gradient that has NaN or infinity: ``"raise"`` at the worker;
        ``"drop"``, and count.
    push_filters, pull_filters : sequence of `mpiml.filters`
        What is left out of messages, or made smaller, in this order.
    encode, decode : function, optional
        A codec of gradients: what a worker makes of each array before it is sent, flat and of what
        one server holds; and what the server makes of that, an array again. Not together with
        `push_filters`.

    Raises
    ------
    UsageError
        One of these is something else.
    """

    kind = "ParameterServerNode"
    __slots__ = ("settings",)

    settings: Settings

    def __init__(
        self,
        init: Any,
        optimizer: Optimizer | Callable[[Any, Any, dict[str, Any], int], None],
        consistency: str | Consistency = "async",
        shards: int = 1,
        *,
        nonfinite: str = "raise",
        push_filters: Iterable[Any] = (),
        pull_filters: Iterable[Any] = (),
        encode: Callable[[Any], Any] | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        where = "ParameterServerNode"
        if not isinstance(optimizer, Optimizer) and not callable(optimizer):
            raise UsageError(
                f"{where}: optimizer: expected one of mpiml.optim, as SGD(0.1), or a function "
                f"update(parameter, gradient, state, step), got {optimizer!r}"
            )
        if isinstance(optimizer, type):
            raise UsageError(
                f"{where}: optimizer: expected an object, as {optimizer.__name__}(0.1), got the "
                "class"
            )
        if nonfinite not in _NONFINITE:
            raise UsageError(
                f"{where}: nonfinite: expected 'raise' or 'drop', got {nonfinite!r}"
            )
        push_filters = _filters(push_filters, where, False)
        if (encode is None) != (decode is None) or (encode is not None and push_filters):
            raise UsageError(
                f"{where}: expected encode and decode together and without push_filters, got "
                f"encode={encode!r}, decode={decode!r}, push_filters={push_filters!r}"
            )
        for what, codec in (("encode", encode), ("decode", decode)):
            if codec is not None and not callable(codec):
                raise UsageError(f"{where}: {what}: expected a function, got {codec!r}")
        self.settings = Settings(
            init,
            optimizer,
            as_consistency(consistency, where),
            whole_number(f"{where}: shards", shards, 1),
            nonfinite,
            push_filters,
            _filters(pull_filters, where, True),
            encode,
            decode,
        )
        super().__init__(Shard, self.settings)

    @property
    def name(self) -> str:
        """What drawings say of it: optimizer and consistency."""
        optimizer = self.settings.optimizer
        rule = getattr(optimizer, "name", None) or getattr(
            optimizer, "__qualname__", "a function"
        )
        return f"{rule}, {self.settings.consistency!r}, shards={self.settings.shards}"

    @property
    def spread(self) -> int:
        """How many ranks it is."""
        return self.settings.shards

    def seen_as(self, reference: Any) -> ParameterHandle:
        """Return the handle of all shards together."""
        return ParameterHandle(reference, Hold(self, False))

    def client_of(self, clients: Any, node: Any) -> ParameterClient:
        """Return the client that `node` has, or one that only reads."""
        return client_of(clients, self, node)

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: all it needs is given when it is made."""
        raise UsageError("ParameterServerNode: has no arguments to configure; make another one")


def _filters(filters: Iterable[Any], where: str, pull: bool) -> tuple[Any, ...]:
    name = f"{where}: {'pull' if pull else 'push'}_filters"
    try:
        found = tuple(filters)
    except TypeError:
        raise UsageError(
            f"{name}: expected a list of filters of mpiml.filters, got {filters!r}"
        ) from None
    if found:
        from mpiml.roles.parameter_server.filtering.rules import check_filters

        check_filters(found, name, pull)
    return found
