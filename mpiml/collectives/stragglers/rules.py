"""When the gradients of a step suffice, and what is made of them: the rules of a collector."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from mpiml.collectives.ops import dtype_name
from mpiml.collectives.stragglers.backup import Backup, Verdict
from mpiml.collectives.stragglers.coding import GradientCode
from mpiml.collectives.trees import flatten, unflatten
from mpiml.errors import UsageError

__all__ = ["CodedSteps", "FirstSteps", "Pace", "Rule"]

_NARROW: Final = ("float16", "bfloat16")  # added in float32


class Rule(ABC):
    """Decides for one step after another whose gradients count.

    Local: no MPI, no clock; the order of calls is the order of arrival.
    """

    @property
    @abstractmethod
    def step(self) -> int:
        """The step that gradients are now collected for."""

    @property
    @abstractmethod
    def arrived(self) -> tuple[int, ...]:
        """Whose gradients of this step are there."""

    @abstractmethod
    def offer(self, member: int, step: int) -> Verdict:
        """Say what becomes of a gradient that has arrived."""

    @abstractmethod
    def enough(self, members: Iterable[int]) -> bool:
        """Tell whether the gradients of these members would make a step."""

    @abstractmethod
    def used(self, members: Iterable[int]) -> tuple[int, ...]:
        """Return those of the members whose gradients are in the result, ascending."""

    @abstractmethod
    def combine(self, messages: Mapping[int, Any]) -> Any:
        """Return the result, a tree, of what the members have sent."""


class CodedSteps(Rule):
    """A step is complete when what is there can be decoded.

    Parameters
    ----------
    code : GradientCode
    step : int
        The first.
    """

    def __init__(self, code: GradientCode, step: int) -> None:
        self._code = code
        self._step = step
        self._now: list[int] = []

    @property
    def step(self) -> int:
        """The step that messages are now collected for."""
        return self._step

    @property
    def arrived(self) -> tuple[int, ...]:
        """Whose messages of this step are there, in the order they came."""
        return tuple(self._now)

    def offer(self, member: int, step: int) -> Verdict:
        """Say what becomes of a message: one of a step before is dropped.

        Raises
        ------
        UsageError
            The step has not begun, or the member has sent one of this step before.
        """
        if step > self._step or (step == self._step and member in self._now):
            raise UsageError(
                f"{self._code!r}: expected member {member} to send one message for each step, now "
                f"of step {self._step}, got another of step {step}"
            )
        if step < self._step:
            return Verdict.LATE
        self._now.append(member)
        if not self._code.enough(self._now):
            return Verdict.TAKE
        self._step += 1
        self._now.clear()
        return Verdict.LAST

    def enough(self, members: Iterable[int]) -> bool:
        """Tell whether the messages of these members could be decoded."""
        return self._code.enough(members)

    def used(self, members: Iterable[int]) -> tuple[int, ...]:
        """Return those whose messages are not multiplied with 0."""
        return tuple(np.flatnonzero(self._code.coefficients(members)).tolist())

    def combine(self, messages: Mapping[int, Any]) -> Any:
        """Return the sum of the gradients of all partitions."""
        return self._code.decode(messages)


class FirstSteps(Rule):
    """A step is complete when n gradients are there, whosesoever.

    Parameters
    ----------
    backup : Backup
    """

    def __init__(self, backup: Backup) -> None:
        self._backup = backup

    @property
    def step(self) -> int:
        """The step that gradients are now collected for."""
        return self._backup.step

    @property
    def arrived(self) -> tuple[int, ...]:
        """Whose gradients of this step are there, in the order they came."""
        return self._backup.arrived

    def offer(self, member: int, step: int) -> Verdict:
        """Say what becomes of a gradient: see `Backup.offer`."""
        return self._backup.offer(member, step)

    def enough(self, members: Iterable[int]) -> bool:
        """Tell whether they are n or more."""
        return len(set(members)) >= self._backup.n

    def used(self, members: Iterable[int]) -> tuple[int, ...]:
        """Return them all."""
        return tuple(sorted(members))

    def combine(self, messages: Mapping[int, Any]) -> Any:
        """Return the mean, added in ascending order of the members; narrow types in float32."""
        trees = [flatten(messages[member])[:2] for member in sorted(messages)]
        treedef = trees[0][1]
        rows = zip(*[leaves for leaves, _ in trees], strict=True)
        return unflatten(treedef, [_mean(row) for row in rows])


def _mean(arrays: Any) -> Any:
    own = arrays[0].dtype
    work = np.dtype(np.float32) if dtype_name(arrays[0]) in _NARROW else own
    total = arrays[0].astype(work)
    for array in arrays[1:]:
        np.add(total, array.astype(work, copy=False), out=total)
    np.divide(total, len(arrays), out=total)
    return total.astype(own, copy=False)


class Pace:
    """Where members are, who has left, and how far the others may be ahead. Pure state.

    Parameters
    ----------
    members : int
        Their number.
    slack : int
        Results that may wait for a member that has not taken them, 1 or more.
    step : int
        The first.

    Attributes
    ----------
    gone : dict
        By member that takes part no more, why.
    """

    def __init__(self, members: int, slack: int, step: int) -> None:
        self.slack = slack
        self.gone: dict[int, str] = {}
        self._steps = [step] * members  # the one each is in

    @property
    def live(self) -> tuple[int, ...]:
        """Members that still take part, ascending."""
        return tuple([m for m in range(len(self._steps)) if m not in self.gone])

    def took(self, member: int, step: int) -> None:
        """Note that a member has the result of a step."""
        self._steps[member] = max(self._steps[member], step + 1)

    def leave(self, member: int, why: str) -> None:
        """Note that a member takes part no more; the first reason stays."""
        self.gone.setdefault(member, why)

    def behind(self, step: int) -> tuple[int, ...]:
        """Return those for whom a result of this step must wait."""
        return tuple([m for m in self.live if step - self._steps[m] >= self.slack])
