"""What `Program.add_node` takes beside the node: replicas, placement, settings of a role."""

from typing import Any, Final, NamedTuple, NoReturn

from mpiml.errors import UsageError
from mpiml.whole import as_whole

__all__ = ["FILL", "Fill", "Placement", "Settings", "check_label", "check_replicas"]


class Fill(int):
    """The type of `FILL`: an int, so that it may be the default of an ``int`` parameter."""

    def __new__(cls) -> "Fill":
        """Return `FILL`: there is one."""
        return globals().get("FILL") or super().__new__(cls, -1)

    def __repr__(self) -> str:
        return "FILL"

    def __format__(self, spec: str) -> str:
        return format("FILL", spec)

    def __reduce__(self) -> str:  # copies and pickles are the same object
        return "FILL"


#: ``replicas=FILL``: as many as ranks are left over, at least one. One role per program.
FILL: Final = Fill()


class Placement:
    """Where the vertices of a role must go; honoured, or refused with the reason.

    Parameters
    ----------
    host : str, optional
        Name of the host that all of them go to.
    spread : bool
        Spread them over the hosts as evenly as possible.
    num_gpus : int
        GPUs of one vertex.
    num_cpus : int, optional
        Cores of one vertex.
    with_ : str, optional
        Label of another role: replica i goes to the host of its replica i.

    Raises
    ------
    UsageError
        A value has the wrong type or range, or two of them contradict each other.
    """

    __slots__ = ("host", "num_cpus", "num_gpus", "spread", "with_")

    host: str | None
    spread: bool
    num_gpus: int
    num_cpus: int | None
    with_: str | None

    def __init__(
        self,
        host: str | None = None,
        spread: bool = False,
        num_gpus: int = 0,
        num_cpus: int | None = None,
        with_: str | None = None,
    ) -> None:
        for key, text in (("host", host), ("with_", with_)):
            if text is not None and (not isinstance(text, str) or not text):
                raise UsageError(f"placement {key}=: expected a name, got {text!r}")
        if not isinstance(spread, bool):
            raise UsageError(f"placement spread=: expected a bool, got {spread!r}")
        if host is not None and (spread or with_ is not None):
            other = "spread=True" if spread else f"with_={with_!r}"
            raise UsageError(f"placement host={host!r} and {other} contradict each other")
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "spread", spread)
        object.__setattr__(self, "num_gpus", _count("placement num_gpus=", num_gpus, 0))
        cpus = None if num_cpus is None else _count("placement num_cpus=", num_cpus, 1)
        object.__setattr__(self, "num_cpus", cpus)
        object.__setattr__(self, "with_", with_)

    @classmethod
    def of(cls, given: Any, where: str) -> "Placement":
        """Return the placement that `add_node` was given: None, a dict or a Placement.

        Raises
        ------
        UsageError
            It is none of these, or has a key or value that is not known; names `where`.
        """
        if isinstance(given, cls):
            return given
        if given is None:
            return cls()
        if not isinstance(given, dict):
            raise UsageError(
                f"{where}: placement= expected a dict or mpiml.Placement, got "
                f"{type(given).__name__}. Pass placement=dict(host=..., spread=True, "
                "num_gpus=1, num_cpus=2, with_='label')."
            )
        keys = {"with_" if key == "with" else key: value for key, value in given.items()}
        if unknown := [key for key in keys if key not in cls.__slots__]:
            raise UsageError(
                f"{where}: placement= has no setting {unknown[0]!r}. "
                f"It has {', '.join(cls.__slots__)}."
            )
        try:
            return cls(**keys)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Placement cannot be changed: build another with {name}=")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        given = (f"{k}={v!r}" for k, v in zip(self.__slots__, self._key(), strict=True))
        plain = {"host=None", "num_cpus=None", "num_gpus=0", "spread=False", "with_=None"}
        return f"Placement({', '.join(text for text in given if text not in plain)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.host, self.spread, self.num_gpus, self.num_cpus, self.with_)

    def _key(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


class Settings(NamedTuple):
    """The settings of the runtime for one node, as `add_node` was given them."""

    concurrency: int = 1
    """Methods of a service that may run at once."""
    allow: tuple[str, ...] | None = None
    """The only methods that are served, or None for all public ones."""
    on_failure: str = "abort"
    daemon: bool = False
    """The program does not wait for this body to return."""

    @classmethod
    def of(
        cls, where: str, concurrency: Any, allow: Any, on_failure: Any, daemon: Any
    ) -> "Settings":
        """Check what `add_node` was given.

        Raises
        ------
        UsageError
            A value has the wrong type or range; names `where`.
        """
        if isinstance(allow, str) or (
            allow is not None and not isinstance(allow, (list, tuple, set, frozenset))
        ):
            raise UsageError(f"{where}: allow= expected a list of method names, got {allow!r}")
        if allow is not None and not all(isinstance(name, str) for name in allow):
            raise UsageError(f"{where}: allow= expected method names (str), got {allow!r}")
        if not isinstance(on_failure, str):
            raise UsageError(f"{where}: on_failure= expected 'abort', got {on_failure!r}")
        if not isinstance(daemon, bool):
            raise UsageError(f"{where}: daemon= expected a bool, got {daemon!r}")
        return cls(
            concurrency=_count(f"{where}: concurrency=", concurrency, 1),
            allow=None if allow is None else tuple(sorted(set(allow))),
            on_failure=on_failure,
            daemon=daemon,
        )


def check_label(label: object, where: str) -> str:
    """Return `label` if it can name a role.

    Raises
    ------
    UsageError
        It is no text, empty, or holds white space or a slash; names `where`.
    """
    if not isinstance(label, str) or not label:
        raise UsageError(f"{where}: label= expected a name, got {label!r}")
    if "/" in label or any(not c.isprintable() or c.isspace() for c in label):
        raise UsageError(
            f"{where}: label={label!r} has white space or a '/': it stands in log prefixes "
            "as [label/index]. Use letters, digits, '_', '-' or '.'."
        )
    return label


def check_replicas(replicas: Any, where: str) -> int:
    """Return `replicas` as an int of at least 1, or as `FILL`.

    Raises
    ------
    UsageError
        It is neither; names `where`.
    """
    if isinstance(replicas, Fill):
        return FILL
    return _count(f"{where}: replicas=", replicas, 1, " or mpiml.FILL")


def _count(what: str, given: Any, least: int, otherwise: str = "") -> int:
    """Return `given` as an int of at least `least`; NumPy's integers are integers too."""
    number = None if isinstance(given, Fill) else as_whole(given)
    if number is None or number < least:
        raise UsageError(
            f"{what} expected an integer of at least {least}{otherwise}, got {given!r}"
        )
    return number
