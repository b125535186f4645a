"""`ExternalNode`: ranks of a C, C++ or Fortran program in the graph."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from mpiml.errors import UsageError
from mpiml.external.specs import Array
from mpiml.handles import Handle, HandleSequence
from mpiml.nodes import Node
from mpiml.references import Deferred
from mpiml.topics.graph import End, Topic

__all__ = ["ExternalNode", "label_of"]


class ExternalNode(Node):
    """Ranks of a program that is linked with libmpiml, as nodes; see docs/external.md.

    Where they run is given: each rank that calls ``mpiml_attach`` with the label is one replica,
    in the order of ranks.

    Parameters
    ----------
    publishes, subscribes : Topic, sequence of these, or dict
        Topics by which they send and get arrays. A dict says what the arrays are:
        ``{fields: mpiml.Array("float64", (None, None))}``. Instead of a topic, one of its ends:
        ``fields.subscriber("trainer")``.
    calls : handle, or sequence of handles
        Services whose methods they call, with arrays in and out; and parameter servers.

    Raises
    ------
    UsageError
        One of these is something else; a topic has two descriptions.
    """

    kind = "ExternalNode"
    outside = True
    __slots__ = ()

    def __init__(self, *, publishes: Any = (), subscribes: Any = (), calls: Any = ()) -> None:
        super().__init__(_outside, *_arguments(publishes, subscribes, calls))

    def configure(self, *, publishes: Any = (), subscribes: Any = (), calls: Any = ()) -> None:
        """Replace what was given, once, before launch: so two nodes may need each other."""
        super().configure(*_arguments(publishes, subscribes, calls))

    def check_arguments(self) -> None:
        """Do nothing: they were checked when they were given."""

    @property
    def name(self) -> str:
        """What drawings say of it."""
        return "ranks of another program"

    @property
    def calls(self) -> tuple[Any, ...]:
        """Handles of services and of parameter servers."""
        return tuple(self.args[2])

    def _check(self, function: Any) -> None:
        """Do nothing: there is no function."""


def label_of(handle: Any) -> tuple[str, int] | None:
    """Return label and position of the role of a parameter server's handle; None of others."""
    shards = getattr(handle, "_shards", None) if isinstance(handle, Deferred) else None
    return (shards.role, shards.role_index) if isinstance(shards, HandleSequence) else None


def _outside() -> NoReturn:
    raise UsageError("mpiml: an ExternalNode has no function to run in Python")


def _arguments(publishes: Any, subscribes: Any, calls: Any) -> tuple[Any, ...]:
    return (
        tuple(_end(*item, True) for item in _topics(publishes, "publishes")),
        tuple(_end(*item, False) for item in _topics(subscribes, "subscribes")),
        tuple(map(_handle, _several(calls, (Handle, HandleSequence, Deferred)))),
    )


def _several(given: Any, single: tuple[type, ...]) -> Iterable[Any]:
    if isinstance(given, single):
        return (given,)
    if isinstance(given, Iterable) and not isinstance(given, str):
        return given
    return (given,)  # refused where each is looked at


def _topics(given: Any, what: str) -> Iterable[tuple[Any, Array | None, str]]:
    if isinstance(given, Mapping):
        for topic, array in given.items():
            if array is not None and not isinstance(array, Array):
                raise UsageError(
                    f"ExternalNode: {what}: expected mpiml.Array(dtype, shape) for {topic!r}, got "
                    f"{array!r}"
                )
            yield topic, array, what
        return
    for topic in _several(given, (Topic, Deferred)):
        yield topic, None, what


def _end(given: Any, array: Array | None, what: str, publishes: bool) -> Any:
    if isinstance(given, Topic):
        given = given.publisher() if publishes else given.subscriber()
    end = given.args[0] if isinstance(given, Deferred) and given.args else None
    if not isinstance(end, End) or end.publishes != publishes:
        raise UsageError(
            f"ExternalNode: {what}: expected topics, as program.topic('fields') returns them, got "
            f"{given!r}"
        )
    if array is not None:
        if end.topic.array not in (None, array):
            raise UsageError(
                f"ExternalNode: {what}: {end.topic!r} was said to be {end.topic.array!r}, now "
                f"{array!r}. Describe a topic once."
            )
        end.topic.array = array
    return given


def _handle(given: Any) -> Any:
    if isinstance(given, (Handle, HandleSequence)) or label_of(given) is not None:
        return given
    raise UsageError(
        "ExternalNode: calls: expected handles of services or parameter servers, as "
        f"program.add_node returns them, got {given!r}"
    )
