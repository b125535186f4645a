"""What an optimizer keeps for the stripes of one member, and the same gathered for a checkpoint.

A checkpoint holds whole arrays, in the structure of the parameters: it can be loaded by any
number of members.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpiml.arrays import namespace
from mpiml.collectives.labels import Label
from mpiml.collectives.optimizers.mirror import FULL, Mirror
from mpiml.collectives.regions import Leaf, specs_of
from mpiml.collectives.team import Team
from mpiml.collectives.trees import flatten, host_array, unflatten
from mpiml.errors import UsageError
from mpiml.libraries import family
from mpiml.optim import Optimizer

__all__ = ["SAME", "Shards", "check_optimizer"]

#: what members must give alike, and what to do where they do not
SAME = ("optimizer and parameters", "Build both the same way on every member.")

_CHUNK = 64 << 20  # bytes that all members together send at a time
_PLACE = 8  # bytes of the number of the first element sent


class Shards:
    """The parameters and the state of one member's stripes.

    Collective over the members: `gather`.

    Parameters
    ----------
    optimizer : Optimizer
        Whose state it is.
    layout : Mirror
        Of all parameters.
    treedef
        Their structure.
    stripes : sequence of slice
        The member's part of each region.
    params : sequence of arrays
        These parts of the parameters, float32 or float64; changed by loading.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Mirror,
        treedef: Any,
        stripes: Sequence[slice],
        params: Sequence[Any],
    ) -> None:
        self.optimizer = optimizer
        self.layout = layout
        self.stripes = tuple(stripes)
        self.params = tuple(params)
        self.states = tuple(optimizer.init(param) for param in params)
        self.steps = 0
        self._treedef = treedef

    @property
    def nbytes(self) -> int:
        """Bytes of the state that this member keeps."""
        return sum(array.nbytes for state in self.states for array in state)

    def forget(self) -> None:
        """Let go of the state."""
        self.states = tuple(() for _ in self.params)

    def gather(self, team: Team, label: Label) -> dict[str, Any]:
        """Return hyperparameters, number of steps, parameters and state, whole.

        Collective over the members; the same on all of them.
        """
        state = {
            name: self._whole(team, [kept[i] for kept in self.states], label)
            for i, name in enumerate(self.optimizer.states)
        }
        return {
            "optimizer": self.optimizer.state_dict(),
            "step": self.steps,
            "params": self._whole(team, self.params, label),
            "state": state,
        }

    def _whole(self, team: Team, own: Sequence[Any], label: Label) -> Any:
        memory = np.zeros(self.layout.nbytes, np.uint8)
        for flat, part, array in zip(self.layout.flat(memory), self.stripes, own, strict=True):
            _gather(team, flat, part.start, host_array(array), label)
        return unflatten(self._treedef, self.layout.views(memory))

    def load(self, team: Team, state: Mapping[str, Any], label: Label) -> None:
        """Take the own stripes of what `gather` returned.

        Collective over the members. Nothing is changed if it raises.

        Raises
        ------
        UsageError
            It is not of these parameters, or not of this optimizer. On all members.
        """
        error: UsageError | None = None
        try:
            optimizer, params, states = self._checked(state, label.head)
        except UsageError as caught:
            error = caught
        except Exception as caught:  # of an object that is nothing like a state
            error = UsageError(
                f"{label.head}: expected what state_dict() returned, got {type(state).__name__}: "
                f"{type(caught).__name__}: {caught}"
            )
        team.agree(error, label)
        self.optimizer.load_state_dict(optimizer)
        self.steps = int(state["step"])
        for target, source in zip(self.params, params, strict=True):
            _put(target, source)
        for region, targets in enumerate(self.states):
            for target, source in zip(targets, states, strict=True):
                _put(target, source[region])

    def _checked(self, state: Mapping[str, Any], where: str) -> tuple[Any, Any, Any]:
        """Return hyperparameters, and the own stripes of parameters and of each state."""
        missing = {"optimizer", "step", "params", "state"} - set(state)
        if missing:
            raise UsageError(f"{where}: expected what state_dict() returned, without {missing}")
        kept, names = state["state"], self.optimizer.states
        if set(kept) != set(names):
            raise UsageError(f"{where}: state: expected {list(names)}, got {sorted(kept)}")
        if not isinstance(state["step"], (int, np.integer)) or state["step"] < 0:
            raise UsageError(f"{where}: step: expected a number >= 0, got {state['step']!r}")
        params = self._parts(state["params"], f"{where}: params")
        parts = [self._parts(kept[name], f"{where}: {name}") for name in names]
        copy.copy(self.optimizer).load_state_dict(state["optimizer"])  # raises, or nothing
        return state["optimizer"], params, parts

    def _parts(self, tree: Any, where: str) -> list["np.ndarray[Any, Any]"]:
        """Return the own stripes of a tree of whole arrays."""
        leaves, _, paths = flatten(tree, where)
        _compare(self.layout.leaves, specs_of(leaves, paths), where)
        memory = np.zeros(self.layout.nbytes, np.uint8)
        for leaf, view in zip(leaves, self.layout.views(memory), strict=True):
            view[...] = host_array(leaf)
        flats = self.layout.flat(memory)
        return [flat[part] for flat, part in zip(flats, self.stripes, strict=True)]


def check_optimizer(optimizer: Any, where: str) -> str:
    """Return what members compare of an optimizer; refuse what is none. Local.

    Raises
    ------
    UsageError
        It is none of `mpiml.optim`, or one of its classes.
    """
    if isinstance(optimizer, Optimizer):
        return repr(optimizer.state_dict())
    got = type(optimizer).__qualname__
    if isinstance(optimizer, type):
        got = f"the class {optimizer.__qualname__} itself"
    raise UsageError(
        f"{where}: optimizer: expected an optimizer of mpiml.optim, such as "
        f"mpiml.optim.Adam(1e-3), got {got}"
    )


def _compare(expected: Sequence[Leaf], got: Sequence[Leaf], where: str) -> None:
    if len(got) != len(expected):
        raise UsageError(f"{where}: expected {len(expected)} arrays, got {len(got)}")
    for leaf, found in zip(expected, got, strict=True):
        if found[:2] != leaf[:2] or found.dtype_name not in FULL:
            raise UsageError(
                f"{where}: expected an array {leaf.path} of shape {leaf.shape}, float32 or "
                f"float64, got {found.text()}"
            )


def _gather(
    team: Team,
    whole: "np.ndarray[Any, Any]",
    low: int,
    own: "np.ndarray[Any, Any]",
    label: Label,
) -> None:
    """Fill a region with the stripes of all members; hosts that hold the same send it twice."""
    size = whole.itemsize
    step = max(_CHUNK // team.size // size, 1)
    for at in range(0, max(len(whole), 1), step):
        part = own[at : at + step]
        record = (low + at).to_bytes(_PLACE, "little") + part.tobytes() if len(part) else b""
        everyone = team.exchange(record, label)
        if not any(everyone):
            return
        for said in everyone:
            if said:
                first = int.from_bytes(said[:_PLACE], "little")
                values = np.frombuffer(said, whole.dtype, offset=_PLACE)
                whole[first : first + len(values)] = values


def _put(target: Any, source: "np.ndarray[Any, Any]") -> None:
    target[...] = source if family(type(target)) is None else namespace(target).asarray(source)
