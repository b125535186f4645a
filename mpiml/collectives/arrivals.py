"""Messages of the mail that have come: the head of each, and its body or where that is."""

from typing import Any, NamedTuple

__all__ = ["Apart", "Arrival"]


class Apart:
    """A body that comes in a message of its own.

    Attributes
    ----------
    memory
        Where it comes, once it has been asked for.
    requests : list or None
        For it; None: it has not been asked for.
    """

    __slots__ = ("memory", "nbytes", "requests")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory: Any = None
        self.requests: list[Any] | None = None


class Arrival(NamedTuple):
    """A message that has come, its body perhaps not yet."""

    source: int
    head: bytes
    nbytes: int  #: of the body; -1: it has none
    body: Any  #: the memory of a member here, bytes that came with the head, or an `Apart`
    sending: Any  #: of a member here, to be told when its memory is free
    rank: int  #: where the body is to come from, and
    tag: int  #: by which tag; 0: it is here
