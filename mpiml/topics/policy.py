"""What a topic does when a subscriber is slow."""

from typing import Any, Final

from mpiml.errors import UsageError
from mpiml.whole import whole_number

__all__ = ["BLOCK", "DROP_OLDEST", "LATEST", "Keep", "Policy", "as_policy"]

BLOCK: Final = "block"
DROP_OLDEST: Final = "drop_oldest"
LATEST: Final = "latest"  #: only the newest message counts


class Keep:
    """Keep up to n messages that a subscriber has not taken yet, for each publisher.

    Parameters
    ----------
    n : int
        >= 1.
    on_full : str
        ``"block"``: the publisher waits, nothing is lost. ``"drop_oldest"``: the oldest goes, and
        is counted.

    Raises
    ------
    UsageError
        Something else.
    """

    __slots__ = ("n", "on_full")

    def __init__(self, n: int, on_full: str = BLOCK) -> None:
        if on_full not in (BLOCK, DROP_OLDEST):
            raise UsageError(
                f"Keep: on_full: expected {BLOCK!r} or {DROP_OLDEST!r}, got {on_full!r}"
            )
        self.n = whole_number("Keep: n", n, 1)
        self.on_full = on_full

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keep):
            return False
        return (self.n, self.on_full) == (other.n, other.on_full)

    def __hash__(self) -> int:
        return hash((self.n, self.on_full))

    def __repr__(self) -> str:
        return f"Keep({self.n}, on_full={self.on_full!r})"


Policy = str | Keep


def as_policy(value: Any, where: str) -> Policy:
    """Return the policy of a topic.

    Raises
    ------
    UsageError
        It is none.
    """
    if isinstance(value, Keep) or value == LATEST:
        return value  # type: ignore[no-any-return]
    raise UsageError(f"{where}: policy: expected {LATEST!r} or mpiml.Keep(n), got {value!r}")
