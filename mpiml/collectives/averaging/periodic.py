"""What the rules share by which members train apart and meet now and then."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from mpiml.collectives.alike import agree_on, guarded
from mpiml.collectives.averaging.replica import Replica, meeting_of, put, team_for
from mpiml.collectives.labels import Label
from mpiml.collectives.optimizers.shards import SAME, check_optimizer
from mpiml.collectives.trees import host_array
from mpiml.errors import ServiceGoneError, UsageError
from mpiml.optim import Coefficients, Optimizer
from mpiml.optim_step import apply
from mpiml.whole import whole_number

__all__ = ["Periodic", "Step"]


class Step(NamedTuple):
    """One step, checked, before anything is changed."""

    grads: Any  #: as they were passed
    leaves: list[Any]  #: the same, taken apart
    coefficients: Coefficients
    plan: Any  #: of the meeting that belongs to the step; None: there is none


class Periodic(ABC):
    """Parameters that each member trains by itself, and what they do when they meet.

    Collective over the members: construction, `meet`, `load_state_dict`; and `step` where it
    is one in which they meet. All members must make the same number of steps.

    Parameters
    ----------
    params : Bucket, array or tree of arrays, float32 or float64
        NumPy or CuPy arrays, trained in place. At construction those of member 0 are given to
        all.
    optimizer : mpiml.optim.Optimizer
        The local one. Its state stays with the member.
    every : int
        From so many steps on members meet, >= 1.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node, or the
        members of the bucket.
    name : str, optional
        What messages call it. Compared among the members.
    """

    where: ClassVar[str]  #: opens messages

    def __init__(
        self, params: Any, optimizer: Optimizer, every: int, comm: Any, name: str | None
    ) -> None:
        self._team = team = team_for(params, comm, self.where)
        self.optimizer = optimizer
        self._name = name
        self._steps = self._since = self._reductions = self._here = 0
        self._closed = False
        label = Label(self.where, name=name)
        error: Exception | None = None
        said = text = ""
        try:
            self.every = whole_number(f"{self.where}: every", every, 1)
            said = f"every={every}\noptimizer={check_optimizer(optimizer, self.where)}"
            self._replica = Replica(params, team, self.where)
            text = self._replica.text
            said += "".join([f"\n{name}={value!r}" for name, value in self._compared().items()])
        except Exception as caught:  # the others must hear of it
            error = caught
        with team.round(label):
            agree_on(team, label.head, said, error, *SAME, label, text)
            self._replica.start(label)
        self._states = [optimizer.init(leaf) for leaf in self._replica.leaves]

    # -- what a rule says of itself ------------------------------------------------------------

    def _compared(self) -> dict[str, Any]:
        """Return what else members compare; refuse arguments that are out of range. Local."""
        return {}

    @abstractmethod
    def _plan(self, number: int) -> Any:
        """Return what `_meet` needs, after `number` steps. Local; may call the user's code."""

    @abstractmethod
    def _meet(self, plan: Any) -> None:
        """Do what members do when they meet. Collective over them."""

    def _met_in(self, grads: Any) -> Any:
        """Return the bucket in which members meet in the next step; another: in none."""
        return None

    def _joint(self) -> bool:
        """Tell whether members meet in the next step."""
        return self._since + 1 >= self.every

    def _meets_first(self) -> bool:
        """Tell whether what members meet in comes before anything is changed.

        It is an error on all of them then, where one cannot take part. Otherwise they ask each
        other before.
        """
        return False

    def _advance(self, step: Step) -> None:
        """Do a step: that of the optimizer, and then what members do when they meet."""
        self._local(step.leaves, step.coefficients)
        if step.plan is not None:
            self._meet(step.plan)
            self._since = 0

    # -- steps ---------------------------------------------------------------------------------

    @property
    def params(self) -> Any:
        """The member's parameters, where its gradients are to be computed."""
        return self._replica.tree

    @property
    def steps(self) -> int:
        """How many steps have been done."""
        return self._steps

    @property
    def members(self) -> int:
        """How many members there are."""
        return self._team.size

    def step(self, grads: Any) -> None:
        """Do one step with the gradients of this member.

        Collective over the members where they meet in it; otherwise local.

        Parameters
        ----------
        grads : Bucket, array or tree of arrays
            Like the parameters; of any floating dtype.

        Raises
        ------
        UsageError
            The gradients are not like the parameters; where members meet, on all of them.
            Members differ in what they do.
        ServiceGoneError
            This object is closed.
        """
        where = f"{self.where}.step"
        if not self._joint():
            self._advance(self._ready(grads))
        elif self._meets_first():
            meeting = meeting_of(self._met_in(grads), self._team)
            self._advance(guarded(self._team, where, lambda: self._ready(grads), meeting))
        else:
            label = Label(where, name=self._name)
            with self._team.round(label):
                self._advance(self._agreed(grads, label))

    def meet(self) -> None:
        """Do now what members do when they meet; the next time is `every` steps from here.

        Collective over the members. Use it at the end of training, or before a checkpoint
        that another number of members is to load. Does nothing right after a meeting.
        """
        where = f"{self.where}.meet"
        if self._since == 0:  # nobody comes
            self._check_open(where)
            return
        meeting = meeting_of(self._met_in(None), self._team)
        self._meet(guarded(self._team, where, self._ready_to_meet, meeting))
        self._since = 0

    def _ready(self, grads: Any) -> Step:
        """Check a step, and compute its numbers: what may raise on one member alone."""
        where = f"{self.where}.step"
        self._check_open(where)
        leaves = self._replica.matched(grads, f"{where}: grads")
        number = self._steps + 1
        coefficients = self.optimizer.coefficients(number)
        plan = self._plan(number) if self._joint() else None
        return Step(grads, leaves, coefficients, plan)

    def _ready_to_meet(self) -> Any:
        self._check_open(f"{self.where}.meet")
        return self._plan(self._steps)

    def _agreed(self, grads: Any, label: Label) -> Step:
        """Return the step once all members can do theirs. Collective over them."""
        error: Exception | None = None
        try:
            step = self._ready(grads)
        except Exception as caught:  # the others must hear of it
            error = caught
        said = f"the number {self._steps + 1}"
        cure = "Make the same number of steps on every member."
        agree_on(self._team, label.head, said, error, "step", cure, label)
        return step

    def _local(self, grads: list[Any], coefficients: Coefficients) -> None:
        """Do a step of the optimizer. Local."""
        who, rule = self.optimizer.name, self.optimizer.rule
        for leaf, grad, state in zip(self._replica.leaves, grads, self._states, strict=True):
            apply(who, rule, coefficients, leaf, grad, state)
        self._steps += 1
        self._since += 1
        self._here += 1

    def _called(self, what: str) -> str:
        """Return the name of a reduction, which members compare."""
        return f"{self.where}{'' if self._name is None else f' {self._name!r}'}: {what}"

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ServiceGoneError(
                f"{where}: it is closed; use it before close(), or make another on all members"
            )

    # -- checkpoints ---------------------------------------------------------------------------

    def _numbers(self) -> dict[str, Any]:
        """Return the plain values of a checkpoint, by name; `_resume` sets them."""
        return {"step": self._steps, "since": self._since}

    def _resume(self, numbers: Mapping[str, Any]) -> None:
        self._steps, self._since = int(numbers["step"]), int(numbers["since"])

    def _trees(self) -> dict[str, list[Any]]:
        """Return the arrays that a checkpoint holds, one for each parameter, by name."""
        return {"params": self._replica.leaves, **self._by_name(self.optimizer, self._states)}

    def _by_name(self, optimizer: Optimizer, states: Any, before: str = "") -> Any:
        return {
            f"{before}{name}": [state[i] for state in states]
            for i, name in enumerate(optimizer.states)
        }

    def _optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers, by the name under which a checkpoint keeps them."""
        return {"optimizer": self.optimizer}

    def _alike(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of the trees of a checkpoint that are the same on all members."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return everything a checkpoint of this member needs, as copies in host memory.

        Local: each member keeps its own, for it has parameters and state of its own. To go on
        with another number of members, `meet` first, and load the one of member 0 on all.
        """
        self._check_open(f"{self.where}.state_dict")
        named = {name: optimizer.state_dict() for name, optimizer in self._optimizers().items()}
        trees = {name: self._replica.copied(leaves) for name, leaves in self._trees().items()}
        return {"rule": self.where, **named, **self._numbers(), "arrays": trees}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Collective over the members; each passes its own, of the same step.

        Raises
        ------
        UsageError
            It is of other parameters or another rule, or members differ in the step, the
            hyperparameters or in what they have in common. On all members, and nothing is
            changed.
        """
        where = f"{self.where}.load_state_dict"
        label = Label(where, name=self._name)
        error: Exception | None = None
        said = ""
        found: dict[str, list[Any]] = {}
        try:
            self._check_open(where)
            found = self._checked(state, where)
            said = self._said(state, found)
        except (UsageError, ServiceGoneError) as caught:
            error = caught
        except Exception as caught:  # of an object that is nothing like a state
            error = UsageError(
                f"{where}: expected what state_dict() returned, got {type(state).__name__}: "
                f"{type(caught).__name__}: {caught}"
            )
        cure = "Load checkpoints of one moment on all members."
        with self._team.round(label):
            agree_on(self._team, label.head, said, error, "state", cure, label)
        for name, optimizer in self._optimizers().items():
            optimizer.load_state_dict(state[name])
        self._resume(state)
        for name, leaves in self._trees().items():
            put(leaves, found[name])

    def _checked(self, state: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
        """Return the arrays of a state; raise where it is not one of this rule. Local."""
        numbers, optimizers, trees = self._numbers(), self._optimizers(), self._trees()
        names = {"rule", "arrays", *numbers, *optimizers}
        if state["rule"] != self.where or set(state) != names:
            raise UsageError(
                f"{where}: expected rule={self.where!r} and {sorted(names)}, got "
                f"rule={state['rule']!r} and {sorted(state)}"
            )
        for name, value in numbers.items():
            if isinstance(value, bool | float):
                type(value)(state[name])  # raises, or nothing
            else:
                whole_number(f"{where}: {name}", state[name], 0)
        for name, optimizer in optimizers.items():
            copy.copy(optimizer).load_state_dict(state[name])  # raises, or nothing
        if set(state["arrays"]) != set(trees):
            raise UsageError(
                f"{where}: arrays: expected {sorted(trees)}, got {sorted(state['arrays'])}"
            )
        return {
            name: self._replica.kept(tree, f"{where}: {name}")
            for name, tree in state["arrays"].items()
        }

    def _said(self, state: Mapping[str, Any], found: Mapping[str, list[Any]]) -> str:
        """Return what members compare of a state."""
        lines = [f"{name}={state[name]!r}" for name in (*self._numbers(), *self._optimizers())]
        for name in self._alike(state):
            digest = blake2b(digest_size=8)
            for leaf in found[name]:
                digest.update(np.ascontiguousarray(host_array(leaf)).tobytes())
            lines.append(f"{name}: values with the digest {digest.hexdigest()}")
        return "\n".join(lines)

    # -- its end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the state; parameters stay. Local: call it on every member.

        What is called later is an error, on all members where they meet in it.
        """
        self._closed = True
        self._states = [() for _ in self._states]

    def statistics(self) -> dict[str, Any]:
        """Return what this member did since construction, for logs.

        Returns
        -------
        dict
            ``"steps"`` in all, ``"reductions"`` that it took part in, ``"bytes"`` that it
            brought to them, and ``"reductions_saved"`` and ``"bytes_saved"`` against a
            reduction of the gradients, in the parameters' dtypes, in each step.
        """
        size = self._replica.nbytes
        return {
            "members": self.members,
            "steps": self._steps,
            "reductions": self._reductions,
            "bytes": self._reductions * size,
            "reductions_saved": self._here - self._reductions,
            "bytes_saved": (self._here - self._reductions) * size,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<{self.where}, {self.optimizer!r}, every={self.every}, {self._steps} steps, member "
            f"{self._team.index} of {self.members}>"
        )
