"""What compression remembers from step to step, and what it counts.

For each member and array: how often it was reduced (the position of its random numbers), the
residual of error feedback, and what else a method keeps. Members are kept apart since
threads of one process may share one object.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.checks import shown
from mpiml.errors import UsageError

__all__ = ["Memory", "Remembers", "Slot", "Statistics"]


class Statistics(NamedTuple):
    """What compression did so far, all members that use the object together."""

    calls: int = 0  #: collective calls
    arrays: int = 0  #: arrays reduced
    bytes_before: int = 0  #: of these arrays
    bytes_sent: int = 0  #: of their payloads, each counted once: the sum of `nbytes`
    bytes_overhead: int = 0  #: of what came with them: agreement, headers, alignment

    @property
    def ratio(self) -> float:
        """How many times smaller the payloads are than the arrays; NaN before the first."""
        return self.bytes_before / self.bytes_sent if self.bytes_sent else float("nan")


class Slot:
    """What is remembered for one array of one member."""

    __slots__ = ("arrays", "spare", "step")

    def __init__(
        self,
        step: int = 0,
        arrays: dict[str, NDArray[Any]] | None = None,
        spare: NDArray[Any] | None = None,
    ) -> None:
        self.step = step  #: how often the array has been reduced
        self.arrays: dict[str, NDArray[Any]] = arrays or {}
        #: memory for the next residual: the last one must outlive a call that fails, and
        #: memory that is new in every step costs more than the arithmetic on it
        self.spare = spare

    def buffer(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return memory for the next residual."""
        if self.spare is None or self.spare.shape != shape or self.spare.dtype != dtype:
            self.spare = np.empty(shape, dtype)
        return self.spare

    def get(self, what: str, shape: tuple[int, ...], dtype: Any, name: str) -> Any:
        """Return an array, or None if there is none yet.

        Raises
        ------
        UsageError
            It is of another shape or dtype than the array that is now reduced.
        """
        kept = self.arrays.get(what)
        if kept is not None and (kept.shape != shape or kept.dtype != dtype):
            raise UsageError(
                f"{shown(name)}: this codec holds the {what} of another array under this name: "
                f"expected {shape} {np.dtype(dtype).name}, got {kept.shape} {kept.dtype.name}. "
                "Pass all arrays as one tree, give each its own name=, or use a codec object "
                "for each."
            )
        return kept


class Memory:
    """Slots by member and array name, and the counts.

    Parameters
    ----------
    kind : str
        Name of the class whose memory it is.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._members: dict[int, dict[str, Slot]] = {}
        self._counts: dict[int, Statistics] = {}
        self._loaded: frozenset[int] = frozenset()

    def of(self, member: int, title: str) -> dict[str, Slot]:
        """Return the slots of a member by array name.

        Raises
        ------
        UsageError
            A state of other members was loaded.
        """
        slots = self._members.get(member)
        if slots is None:
            if self._loaded:
                held = ", ".join(map(str, sorted(self._loaded)))
                raise UsageError(
                    f"this codec was given the state of member {held}, and this is member "
                    f"{member} ({title}). Each member loads what it saved itself; reset() "
                    "begins without residuals."
                )
            slots = self._members.setdefault(member, {})
        return slots

    def slot(self, slots: dict[str, Slot], name: str) -> Slot:
        """Return the slot of an array, a new one if there is none."""
        found = slots.get(name)
        return Slot() if found is None else found

    def commit(self, member: int, slots: Mapping[str, Slot], counts: Statistics) -> None:
        """Take over what a call that went well has changed."""
        self._members[member].update(slots)
        before = self._counts.get(member, Statistics())
        self._counts[member] = Statistics(*[a + b for a, b in zip(before, counts, strict=True)])

    def statistics(self) -> Statistics:
        """Return the counts of all members together."""
        return Statistics(*map(sum, zip(*self._counts.values(), strict=True)))

    def reset(self) -> None:
        """Forget everything but the counts."""
        self._members.clear()
        self._loaded = frozenset()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy: nested dicts with string keys, ints and arrays as leaves."""
        members = {
            str(member): {
                name: {"step": slot.step, **{k: v.copy() for k, v in slot.arrays.items()}}
                for name, slot in slots.items()
            }
            for member, slots in self._members.items()
        }
        return {"codec": self.kind, "members": members}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything but the counts by what `state_dict` returned.

        Raises
        ------
        UsageError
            It is of another codec, or no such dict.
        """
        kind = state.get("codec") if isinstance(state, Mapping) else None
        if kind != self.kind:
            raise UsageError(
                f"{self.kind}.load_state_dict: expected what state_dict() of a {self.kind} "
                f"returned, got {f'that of a {kind}' if kind else type(state).__name__}"
            )
        try:
            members = {
                int(member): {name: _slot(kept) for name, kept in slots.items()}
                for member, slots in state["members"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.kind}.load_state_dict: expected the members' arrays by name as "
                f"state_dict() returns them, got something else ({error!r})"
            ) from error
        self._members = members
        self._loaded = frozenset(members)


def _slot(kept: Mapping[str, Any]) -> Slot:
    arrays = {what: np.array(value) for what, value in kept.items() if what != "step"}
    return Slot(int(kept["step"]), arrays)


class Remembers(ABC):
    """What has a memory that its user may look at, save and empty."""

    @property
    @abstractmethod
    def memory(self) -> Memory:
        """What is remembered."""

    def statistics(self) -> Statistics:
        """Return what was sent so far. Local: no MPI."""
        return self.memory.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what later calls depend on.

        Local: no MPI.

        Returns
        -------
        dict
            ``{"codec": class name, "members": {index: {array name: {"step": int, ...}}}}``
            with ndarrays under ``"residual"`` and the like. Each member saves its own.
        """
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called: bitwise the same from there.

        Local: no MPI; to be called by all members before they go on.

        Raises
        ------
        UsageError
            It is the state of another class of codec, or none.
        """
        self.memory.load_state_dict(state)

    def reset(self) -> None:
        """Forget residuals, warm starts and positions of random numbers. Local: no MPI."""
        self.memory.reset()
