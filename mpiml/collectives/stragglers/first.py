"""The mean of the first n gradients of each step: backup workers on messages."""

from typing import Any, ClassVar

from mpiml.collectives.stragglers.backup import Backup
from mpiml.collectives.stragglers.gathered import Gathered
from mpiml.collectives.stragglers.rules import FirstSteps, Rule
from mpiml.errors import UsageError
from mpiml.whole import whole_number

__all__ = ["BackupGradient"]

_TYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


class BackupGradient(Gathered):
    """The mean of the gradients of the n members that are first in a step.

    One member collects, and decides who was first: all get the same bits, of the same members.
    Gradients of a step that is over are dropped (J. Chen, X. Pan, R. Monga, S. Bengio, R.
    Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016; TensorFlow's
    SyncReplicasOptimizer: local step < global step).

    Collective over the members: construction. All members take the same steps, each in its own
    time.

    Parameters
    ----------
    n_needed : int
        Gradients that make a step, 1 to the number of members; the others are backups.
    comm, like, slack, at, step, name
        See `CodedGradient`. Arrays of floating-point or complex numbers.

    Raises
    ------
    UsageError
        `n_needed` is out of range, or members differ. On all members.

    Examples
    --------
    ::

        with BackupGradient(3, comm, like=weights) as backup:  # of 4 members
            for batch in batches:
                weights -= lr * backup.mean(lambda: gradient(weights, batch))
    """

    where: ClassVar[str] = "BackupGradient"

    def __init__(
        self,
        n_needed: int,
        comm: Any = None,
        *,
        like: Any,
        slack: int = 8,
        at: int = 0,
        step: int = 0,
        name: str | None = None,
    ) -> None:
        self.n_needed = n_needed
        super().__init__(comm, like, slack, at, step, name)

    def mean(self, gradient: Any, *, timeout: float | None = None) -> Any:
        """Return the mean of the first n gradients of this step; `used` tells whose.

        Waits until n members have come to it, this one or not.

        Parameters
        ----------
        gradient : function or tree of ndarrays
            A function without arguments is not called where the step is over already: so a
            member that was held back catches up without computing.
        timeout : float, optional
            Seconds that the result is waited for, > 0.

        Returns
        -------
        tree of ndarrays
            Like `like`; new arrays. Added in ascending order of the members; float16 and
            bfloat16 in float32.

        Raises
        ------
        UsageError
            The gradient is not like `like`. On this member: the others go on, and this one may
            call again.
        ServiceGoneError
            It is closed; or fewer members are left than are needed, which it names.
        DeadlineError
            No result in time; says who is waited for. Call again to wait on.
        """
        return self._gather(
            "mean", gradient if callable(gradient) else lambda: gradient, timeout
        )

    def _compared(self) -> dict[str, Any]:
        size = self._team.size
        self.n_needed = whole_number(f"{self.where}: n_needed", self.n_needed, 1, size)
        for dtype in self._blocks.dtypes:
            if dtype.name not in _TYPES:
                raise UsageError(
                    f"{self.where}: like: expected one of the dtypes {', '.join(_TYPES)}, of which "
                    f"there is a mean, got {dtype.name}"
                )
        return {"n_needed": self.n_needed}

    def _rule(self, step: int) -> Rule:
        backups = self._team.size - self.n_needed
        return FirstSteps(Backup(self.n_needed, backups, step=step))
