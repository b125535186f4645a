"""`Handle`, `HandleSequence` and `Deferred`: what stands for nodes while the graph is built."""

from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, Protocol, TypeAlias, overload

from mpiml.errors import UsageError

__all__ = ["Deferred", "Handle", "HandleSequence", "Reference"]

_ANY_LENGTH: Final = range(2**62)  # stands for a role whose replicas are not known yet


class _Graph(Protocol):
    """What a handle knows of its program."""

    name: str


class _Frozen:
    """Refuses what would only work on the client that a handle becomes."""

    __slots__ = ()

    program: _Graph
    role: str

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{self!r} cannot be changed: {name!r} was assigned")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self!r} has no {name!r}: it is a handle while the graph is built, and becomes "
            f"a client inside the node that holds it. Pass it as an argument of that node, "
            f"as in PyNode(function, {_variable(self.role)}); a closure, a functools.partial "
            "or an attribute of a plain object hides it."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            f"{self!r} cannot be pickled: it means something only in the graph it was built "
            f"for. Pass it as an argument of the node that needs it, as in "
            f"PyNode(function, {_variable(self.role)}); there it becomes a client, and "
            "clients may be sent."
        )

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self


class Handle(_Frozen):
    """A reference to one node, valid while the graph is built.

    Attributes
    ----------
    program : Program
        The program that the node was added to.
    role : str
        Label of the node's role.
    role_index : int
        Position of that role in ``program.roles``.
    index : int
        Which replica of the role.
    """

    __slots__ = ("index", "program", "role", "role_index")

    role_index: int
    index: int

    def __init__(self, program: _Graph, role: str, role_index: int, index: int) -> None:
        object.__setattr__(self, "program", program)
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "role_index", role_index)
        object.__setattr__(self, "index", index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"<handle {self.role}/{self.index} of program {self.program.name!r}>"

    def _key(self) -> tuple[int, int, int]:
        return id(self.program), self.role_index, self.index


class HandleSequence(_Frozen):
    """References to the replicas of a role, or to a slice of them.

    With ``replicas=FILL`` the number is known only at launch. Until then the sequence has
    no length and cannot be iterated; slices, negative ones too, are kept and resolved by
    `indices`. An integer index must count from the front then: which replica is the last
    one is not known, so take a slice (``workers[-1:]``) and pass it as a sequence.

    Attributes
    ----------
    program : Program
        The program that the nodes were added to.
    role : str
        Label of the role.
    role_index : int
        Position of that role in ``program.roles``.
    """

    __slots__ = ("_count", "_slices", "_start", "program", "role", "role_index")

    role_index: int
    _start: int
    _count: int | None
    _slices: tuple[slice, ...]

    def __init__(
        self,
        program: _Graph,
        role: str,
        role_index: int,
        count: int | None,
        start: int = 0,
        slices: tuple[slice, ...] = (),
    ) -> None:
        object.__setattr__(self, "program", program)
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "role_index", role_index)
        object.__setattr__(self, "_count", count)  # None: FILL
        object.__setattr__(self, "_start", start)  # the first index, in a group
        object.__setattr__(self, "_slices", slices)

    def indices(self, replicas: int) -> list[int]:
        """Return the replicas meant, once the role is known to have `replicas` of them."""
        return list(self._select(range(replicas)))

    @overload
    def __getitem__(self, key: int) -> Handle: ...
    @overload
    def __getitem__(self, key: slice) -> "HandleSequence": ...
    def __getitem__(self, key: int | slice) -> "Handle | HandleSequence":
        if isinstance(key, slice):
            key.indices(0)  # refuses what is no integer, and a step of 0
            return HandleSequence(
                self.program,
                self.role,
                self.role_index,
                self._count,
                self._start,
                (*self._slices, key),
            )
        if self._count is None and (key < 0 or self._counts_from_the_end()):
            raise UsageError(
                f"{self!r}[{key}]: how many replicas fill the ranks is known only at launch, "
                f"so an index must count from the front. Pass the slice [{key}:] instead, "
                "or give replicas= a number."
            )
        chosen = self._select(_ANY_LENGTH)
        try:
            index = chosen[key]
        except IndexError:
            raise IndexError(f"{self!r}[{key}]: it has {len(chosen)} replicas") from None
        return Handle(self.program, self.role, self.role_index, index)

    def __len__(self) -> int:
        return len(self._known("has no length"))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Handle]:
        chosen = self._known("cannot be iterated")
        return (Handle(self.program, self.role, self.role_index, index) for index in chosen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HandleSequence) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"<handles {self.text()} of program {self.program.name!r}>"

    def text(self, replicas: int = -1) -> str:
        """Return the label with the slice taken, as in ``worker[1:]``.

        `replicas`, where known, are those of the role: in a group it has more than these.
        """
        slices = list(self._slices)
        if self._count is not None and (self._start or -1 < replicas != self._count):
            slices.insert(0, slice(self._start, self._start + self._count))
        return self.role + "".join(f"[{_slice_text(piece)}]" for piece in slices)

    def _select(self, every: range) -> range:
        if self._count is not None:
            every = range(self._start, self._start + self._count)
        for piece in self._slices:
            every = every[piece]
        return every

    def _known(self, what: str) -> range:
        if self._count is None:
            raise UsageError(
                f"{self!r} {what} while the graph is built: replicas=FILL takes the ranks "
                "left over at launch. Pass it whole, as one argument; inside the node it "
                "is a sequence of clients that has a length."
            )
        return self._select(range(0))

    def _counts_from_the_end(self) -> bool:
        pieces = self._slices
        return any((p.start or 0) < 0 or (p.stop or 0) < 0 or (p.step or 1) < 0 for p in pieces)

    def _key(self) -> tuple[object, ...]:
        slices = tuple((p.start, p.stop, p.step) for p in self._slices)
        return id(self.program), self.role_index, self._start, self._count, slices


class Deferred:
    """An argument that is built only in the node that uses it, as ``cls(*args, **kwargs)``.

    Handles in its arguments are found and become clients. Every node builds its own; where
    one node holds the same `Deferred` twice, it is built once.

    Parameters
    ----------
    cls : callable
        A class, or a function that returns the object.
    *args, **kwargs
        What to call it with.
    """

    __slots__ = ("args", "cls", "kwargs")

    def __init__(self, cls: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if not callable(cls):
            raise UsageError(
                f"Deferred: expected a class or function to call, got {type(cls).__name__}. "
                "Write Deferred(cls, *args), not Deferred(cls(*args))."
            )
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"Deferred({getattr(self.cls, '__qualname__', type(self.cls).__name__)})"


#: What stands for nodes: one, or a sequence.
Reference: TypeAlias = Handle | HandleSequence


def _variable(label: str) -> str:
    """Return a variable name to show in an example call."""
    return label if label.isidentifier() else "handle"


def _slice_text(piece: slice) -> str:
    start, stop, step = (
        "" if end is None else end for end in (piece.start, piece.stop, piece.step)
    )
    return f"{start}:{stop}" if step == "" else f"{start}:{stop}:{step}"
