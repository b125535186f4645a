"""Nodes of a program graph: what runs, with which arguments, and which methods it serves.

What a node is given belongs to the user's function or class; settings of the runtime
(replicas, concurrency, placement) are given to `Program.add_node`.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final

from mpiml.errors import UsageError
from mpiml.signatures import accepts

__all__ = [
    "RESERVED",
    "UNSERVED",
    "Colocation",
    "Node",
    "PyClassNode",
    "PyNode",
    "ServiceNode",
    "is_stream",
    "public_methods",
    "served_methods",
]

#: Names a client has itself: a service with a method of such a name is refused.
RESERVED: Final = ("futures", "stream", "with_options")
#: Public names of a service class that belong to the runtime and are never served.
UNSERVED: Final = frozenset({"run", "state_dict", "load_state_dict"})

_GENERATOR: Final = 0x20 | 0x200  # inspect.CO_GENERATOR, CO_ASYNC_GENERATOR


class Node:
    """A vertex of the graph before it is placed: a callable and its arguments.

    Attributes
    ----------
    kind : str
        Name of the class of node, as the user typed it.
    callable : callable
        The function or class.
    args, kwargs : tuple, dict
        Its arguments, handles included.
    """

    kind: ClassVar[str] = "Node"
    outside: ClassVar[bool] = False
    """Whether it is a rank of another program, which attaches."""

    __slots__ = ("args", "callable", "home", "kwargs", "state")

    home: str | None
    """``Program 'name', node 'label'`` once it was added."""
    state: str
    """``new``, ``configured`` or ``launched``."""

    def __init__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self._check(function)
        self.callable = function
        self.args = args
        self.kwargs = kwargs
        self.home = None
        self.state = "new"

    @property
    def spread(self) -> int | None:
        """How many replicas it consists of, if it says so itself, as one thing to its users."""
        return None

    def seen_as(self, reference: Any) -> Any:
        """Return what `add_node` returns for it, where the handles are `reference`."""
        return reference

    def client_of(self, clients: Any, node: Any) -> Any:
        """Return what code of `node` gets that asks for the clients of this one by its label.

        None stands for code around the program.
        """
        return clients

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Replace the arguments, once, before launch: so two nodes may hold each other.

        Raises
        ------
        UsageError
            The node was configured before, or its program was launched.
        """
        if self.state != "new":
            raise UsageError(
                f"{self.home or repr(self)}: configure() comes too late, the node was "
                f"{self.state} already. Give all its arguments in one call, before launch."
            )
        self.args = args
        self.kwargs = kwargs
        self.state = "configured"

    def check_arguments(self) -> None:
        """Check that the callable accepts the arguments, where its signature tells.

        Raises
        ------
        UsageError
            It does not; names the node, the function, what it takes and what it was given.
        """
        self._check_signature(self.callable, self.name, self.args, self.kwargs)

    @property
    def name(self) -> str:
        """Name of the callable, for messages and drawings."""
        return _name_of(self.callable)

    def __repr__(self) -> str:
        return f"{self.kind}({self.name})"

    def _check(self, function: Any) -> None:
        raise NotImplementedError

    def _check_signature(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if accepts(function, args, kwargs):
            return
        import inspect  # to say what is wrong

        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # written in C: it says so itself when it is called
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            given = [f"{len(args)} positional"] + [f"{key}=" for key in kwargs]
            raise UsageError(
                f"{self.home or repr(self)}: {name} takes {_short(str(signature))}, got "
                f"{', '.join(given)}: {error}. Pass its arguments to {self.kind}(...) or to "
                "node.configure(...)."
            ) from None


class PyNode(Node):
    """Runs a function; the value it returns is in the `Result`.

    Parameters
    ----------
    function : callable
        The body; may be ``async def``.
    *args, **kwargs
        Its arguments; handles become clients.
    """

    kind = "PyNode"
    __slots__ = ()

    def _check(self, function: Any) -> None:
        if not callable(function):
            raise UsageError(
                f"PyNode: expected a function, got {_kind_of(function)}. Write "
                "PyNode(function, *args), not PyNode(function(*args))."
            )


class PyClassNode(Node):
    """Constructs an object, then calls its ``run()``.

    Parameters
    ----------
    cls : type
        A class with a ``run`` method.
    *args, **kwargs
        Arguments of its constructor; handles become clients.
    """

    kind = "PyClassNode"
    __slots__ = ()

    def _check(self, function: Any) -> None:
        _check_class(function, self.kind)
        if not callable(getattr(function, "run", None)):
            raise UsageError(
                f"PyClassNode: {_name_of(function)} has no run() method, which is its body. "
                "Write one, use ServiceNode for a class that only serves calls, or PyNode."
            )

    def check_arguments(self) -> None:
        """Check the constructor's arguments, and that ``run`` takes none."""
        super().check_arguments()
        _check_run(self)


class ServiceNode(Node):
    """Constructs an object, serves its public methods and runs its ``run()``, if any.

    Parameters
    ----------
    cls : type
        A class. Functions that return an object are not taken, since clients learn from
        the class which methods there are.
    *args, **kwargs
        Arguments of its constructor; handles become clients.
    """

    kind = "ServiceNode"
    __slots__ = ()

    @property
    def cls(self) -> type:
        """The class of the service."""
        return self.callable  # type: ignore[return-value] # checked to be a class

    def _check(self, function: Any) -> None:
        _check_class(function, self.kind)

    def check_arguments(self) -> None:
        """Check the constructor's arguments, and that ``run``, if any, takes none."""
        super().check_arguments()
        if callable(getattr(self.callable, "run", None)):
            _check_run(self)


class Colocation:
    """Several nodes as threads of one rank.

    Parameters
    ----------
    nodes : iterable of Node or Colocation
        At least one; node k becomes the role ``label.k``.
    """

    kind: ClassVar[str] = "Colocation"

    __slots__ = ("nodes",)

    def __init__(self, nodes: "Iterable[Node | Colocation]") -> None:
        try:
            self.nodes = tuple(nodes)
        except TypeError:
            raise UsageError(
                f"Colocation: expected a list of nodes, got {_kind_of(nodes)}. "
                "Write Colocation([node, ...])."
            ) from None
        if not self.nodes:
            raise UsageError("Colocation: expected at least one node, got an empty list.")
        for position, node in enumerate(self.nodes):
            if not isinstance(node, (Node, Colocation)):
                raise UsageError(
                    f"Colocation: item {position} is {_kind_of(node)}, expected a node. Wrap "
                    "functions as PyNode(function, ...) and classes as ServiceNode(cls, ...)."
                )

    def __repr__(self) -> str:
        return f"Colocation({list(self.nodes)!r})"


def public_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the methods a service of this class offers, by name, inherited ones included.

    Public is what is callable, no class, and has no leading underscore; ``run``,
    ``state_dict`` and ``load_state_dict`` are never served.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(cls):
        if name.startswith("_") or name in UNSERVED:
            continue
        method = getattr(cls, name, None)
        if callable(method) and not isinstance(method, type):
            found[name] = method
    return found


def served_methods(
    cls: type, allow: Iterable[str] | None = None, where: str = ""
) -> dict[str, Callable[..., Any]]:
    """Return the public methods of `cls` that are served under the allow-list.

    Parameters
    ----------
    cls : type
        Class of the service.
    allow : iterable of str, optional
        The only names to serve; all public ones without it.
    where : str
        Which node, for the message.

    Raises
    ------
    UsageError
        A method has a reserved name, or `allow` names what is no public method.
    """
    methods = public_methods(cls)
    prefix = f"{where}: " if where else ""
    for name in RESERVED:
        if name in methods:
            raise UsageError(
                f"{prefix}{cls.__qualname__} has a method {name!r}, which every client has "
                f"itself ({', '.join(RESERVED)}). Rename it, or give it a leading underscore."
            )
    if allow is None:
        return methods
    names = sorted(set(allow))
    for name in names:
        if name not in methods:
            raise UsageError(
                f"{prefix}allow= names {name!r}, which is no public method of "
                f"{cls.__qualname__}. It has {', '.join(methods) or 'none'}."
            )
    return {name: methods[name] for name in names}


def is_stream(method: Any) -> bool:
    """Return whether a method is a generator function, ``async def`` or not."""
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is not None and bool(code.co_flags & _GENERATOR)


def _check_class(given: Any, kind: str) -> None:
    if not isinstance(given, type):
        raise UsageError(
            f"{kind}: expected a class, got {_kind_of(given)}. Write {kind}(Class, *args), "
            "neither an instance nor a function that returns one; wrap single arguments in "
            "mpiml.Deferred to build them in the node."
        )


def _check_run(node: Node) -> None:
    classes = node.callable.__mro__  # type: ignore[attr-defined] # it is a class
    raw = next(base.__dict__["run"] for base in classes if "run" in base.__dict__)
    bound = isinstance(raw, (staticmethod, classmethod))
    function = raw.__func__ if isinstance(raw, staticmethod) else node.callable.run  # type: ignore[attr-defined]
    node._check_signature(function, f"{node.name}.run", () if bound else (None,), {})


def _name_of(function: Any) -> str:
    """Return how the user would call it; partials and callable objects by their type."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _kind_of(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__qualname__}"
    if hasattr(type(given), "__get__") and callable(given):
        return f"the function {_name_of(given)}"
    return f"an object of type {type(given).__qualname__}"
