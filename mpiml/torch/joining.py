"""`join`: members that have different numbers of batches."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mpiml.collectives.requests import Request
from mpiml.errors import UsageError
from mpiml.torch.parcels import Parcel
from mpiml.torch.reducing import Reduction

__all__ = ["Join"]


class Join:
    """A block that members leave one after another, and the last one for all.

    Collective over the members: entering it and leaving it. Every backward in it, and the same
    on a member that has left its loop, begins with a message of a byte for each member: who
    has data. Nobody has any more: that is the end.

    Parameters
    ----------
    reduction : Reduction
        Whose backwards.
    send_all : callable
        Gives everybody the parameters and buffers of a member.
    step : callable, optional
        Called after each gradient of the others.
    """

    def __init__(
        self,
        reduction: Reduction,
        send_all: Callable[[int], None],
        step: Callable[[], Any] | None = None,
    ) -> None:
        self._reduction = reduction
        self._send_all = send_all
        self._step = step
        self._request: Request | None = None
        self._here: list[int] = []  # who had data in the last backward

    def __enter__(self) -> "Join":
        if self._reduction.join is not None:
            raise UsageError(f"{self._reduction.title}: join() inside of join()")
        self._reduction.join = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._follow()
        finally:
            self._reduction.join = None

    def announce(self) -> None:
        """Begin to tell the others that this member has data."""
        self._say(True)

    def settle(self, op: str, parcels: Sequence[Parcel]) -> int:
        """Correct a mean over all for those without data; return the first with data."""
        everybody = self._reduction.team.size
        if op == "mean" and len(self._here) < everybody:
            for parcel in parcels:
                parcel.scale(everybody / len(self._here))
        return self._here[0]

    def _say(self, here: bool) -> None:
        control = self._reduction.control
        control["here"][:] = 0
        control["here"][self._reduction.team.index] = here
        self._request = control.iallreduce("max", name="who has data")

    def listen(self) -> bool:
        """Wait until it is known who has data; return whether anybody has."""
        if self._request is None:
            return True
        self._request.wait()
        self._request = None
        here = np.flatnonzero(self._reduction.control["here"]).tolist()
        if here:
            self._here = here
        return bool(here)

    def _follow(self) -> None:
        """Take part in the backwards of the others, with zeros, until there are none."""
        reduction = self._reduction
        while True:
            reduction.team.begin_round(reduction.label)
            try:
                self._say(False)
                more = self.listen()
            except BaseException:
                reduction.team.end_round()
                raise
            if not more:
                reduction.team.end_round()
                break
            reduction.active = True
            for slot in reduction.slots:
                slot.param.grad = None
            reduction.finish()
            if self._step is not None:
                self._step()
        someone_followed = 0 < len(self._here) < reduction.team.size
        if self._step is None and someone_followed:
            self._send_all(self._here[0])
