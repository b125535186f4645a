"""What the optimizers of a team share: steps that all do alike, checkpoints, an end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from mpiml.collectives.alike import guarded
from mpiml.collectives.bucket import Bucket
from mpiml.collectives.labels import Label
from mpiml.collectives.ops import op_name
from mpiml.collectives.optimizers.shards import Shards
from mpiml.errors import ServiceGoneError, UsageError
from mpiml.optim import Coefficients, Optimizer

__all__ = ["Stepper"]

_T = TypeVar("_T")


class Stepper(ABC):
    """An optimizer whose state is divided; the base of those that users make.

    Collective over the members: `step`, `state_dict`, `load_state_dict`.

    Parameters
    ----------
    gradients : Bucket
        Where the members meet.
    optimizer : mpiml.optim.Optimizer
        With the same hyperparameters on all members.
    name : str, optional
        What messages call it.
    """

    where: ClassVar[str]  #: opens messages
    _shards: Shards

    def __init__(self, gradients: Bucket, optimizer: Optimizer, name: str | None) -> None:
        if not isinstance(gradients, Bucket):  # there is nobody yet whom one could tell
            raise UsageError(
                f"{self.where}: expected an mpiml.collectives.Bucket of gradients, got "
                f"{type(gradients).__qualname__}"
            )
        self.optimizer = optimizer
        self._gradients = gradients
        self._team = gradients.team
        self._name = name
        self._closed = False

    @property
    def steps(self) -> int:
        """How many steps have been done."""
        return self._shards.steps

    def step(self, op: Any = "mean") -> None:
        """Combine the gradients of all members, and do one step of the optimizer with them.

        Collective over the members.

        Parameters
        ----------
        op : {"mean", "sum"} or mpi4py.MPI.SUM
            How gradients are combined; float16 and bfloat16 in float32, and rounded once, as
            in `Bucket.allreduce`.

        Raises
        ------
        UsageError
            Members differ in what they do: in the operation, the number of the step or a
            hyperparameter. On all of them.
        ServiceGoneError
            This object is closed, or the bucket, here or by another member.
        Exception
            What ``lr``, where it is a function, raises; the others get a UsageError.
        """
        number = self.steps + 1
        label, coefficients = guarded(
            self._team,
            f"{self.where}.step",
            lambda: self._prepared(op, number),
            self._gradients.channel,
        )
        self._team.run(self._do, label, label, coefficients)
        self._shards.steps = number

    def _prepared(self, op: Any, number: int) -> tuple[Label, Coefficients]:
        """Return what members compare of a step, and its numbers."""
        where = f"{self.where}.step"
        gone = self._gone(where)
        if gone is not None:
            raise gone
        known = op_name(op, where)
        if known not in ("mean", "sum"):
            raise UsageError(f"{where}: op: expected 'mean' or 'sum', got {op!r}")
        # The layout was compared when it was made; all that may drift apart is in here.
        more = f"step={number}, {self.optimizer.described(number)}"
        label = Label(where, known, self._name, more=more, of=self._gradients.number)
        return label, self.optimizer.coefficients(number)

    @abstractmethod
    def _do(self, label: Label, coefficients: Coefficients) -> None:
        """Do a step. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything a checkpoint needs, whole and the same on all members.

        Collective over the members.

        Returns
        -------
        dict
            ``"optimizer"`` the hyperparameters, ``"step"`` how many were done, ``"params"``
            the parameters, those of 16 bits as float32, ``"state"`` for each name of
            ``optimizer.states`` a tree like the parameters. NumPy arrays; any number of
            members can load it, by `FusedOptimizer` and `ShardedOptimizer`.
        """
        return self._together("state_dict", self._gather)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, here or with another number of members.

        Collective over the members; each passes the same.

        Raises
        ------
        UsageError
            It is of other parameters or of another optimizer. On all members, and nothing is
            changed.
        """
        self._together("load_state_dict", lambda label: self._load(state, label))

    def _together(self, kind: str, work: Callable[[Label], _T]) -> _T:
        label = Label(f"{self.where}.{kind}", name=self._name)
        found: list[_T] = []

        def run() -> None:
            self._team.agree(self._gone(f"{self.where}.{kind}"), label)
            found.append(work(label))

        self._team.run(run, label)
        return found[0]

    def _gather(self, label: Label) -> dict[str, Any]:
        return self._shards.gather(self._team, label)

    @abstractmethod
    def _load(self, state: Mapping[str, Any], label: Label) -> None:
        """Take over a state. Collective."""

    def _gone(self, where: str) -> ServiceGoneError | None:
        if not self._closed:
            return None
        return ServiceGoneError(
            f"{where}: it is closed; use it before close(), or make another on all members"
        )

    def close(self) -> None:
        """Let go of the state; parameters stay readable. Local: call it on every member.

        The buckets stay open. A step that it comes to later is an error on all members.
        """
        self._closed = True
        self._shards.forget()

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Return sizes, for logs: bytes of the parameters, and of the state kept here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        team = self._team
        return (
            f"<{self.where}, {self.optimizer!r}, {self.steps} steps, member {team.index} of "
            f"{team.size}>"
        )
