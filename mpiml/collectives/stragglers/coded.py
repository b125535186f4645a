"""The full gradient from any n - s of n members: gradient coding on messages."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np

from mpiml.collectives.stragglers.coding import GradientCode
from mpiml.collectives.stragglers.gathered import Gathered
from mpiml.collectives.stragglers.rules import CodedSteps, Rule
from mpiml.errors import UsageError

__all__ = ["CodedGradient"]


class CodedGradient(Gathered):
    """The exact gradient of all partitions of the data, without waiting for s slow members.

    Each member computes the gradients of `partitions` and sends one combination of them. One
    member collects: as soon as what has come can be decoded, all get the sum, the same bits on
    every member. What comes later is dropped.

    R. Tandon, Q. Lei, A. G. Dimakis, N. Karampatziakis, "Gradient Coding: Avoiding Stragglers
    in Distributed Learning", ICML 2017.

    Collective over the members: construction. All members take the same steps, each in its own
    time.

    Parameters
    ----------
    coding : GradientCode
        `FractionalRepetition` or `Cyclic`, for as many workers as there are members; the same
        matrix B on all of them, which is compared.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    like : tree of ndarrays
        Structure, shapes and dtypes of a gradient, in host memory; its values do not matter.
    slack : int
        How many steps others may be ahead of a member, 1 or more; then they wait for it. So
        many results lie with the collector at most.
    at : int
        The member in whose process the others' messages are collected. It may be late as any
        other, since a thread does this meanwhile, but its process must live.
    step : int
        Number of the first step: that of the checkpoint one goes on from.
    name : str, optional
        What messages call it. Compared among the members.

    Raises
    ------
    UsageError
        The code is for another number of members, or cannot combine these dtypes; members
        differ. On all members.

    Examples
    --------
    ::

        code = FractionalRepetition(4, 1)
        with CodedGradient(code, comm, like=weights) as coded:
            for _ in range(steps):
                weights -= lr * coded.sum(lambda part: gradient(weights, data[part]))
    """

    where: ClassVar[str] = "CodedGradient"

    def __init__(
        self,
        coding: GradientCode,
        comm: Any = None,
        *,
        like: Any,
        slack: int = 8,
        at: int = 0,
        step: int = 0,
        name: str | None = None,
    ) -> None:
        self.coding = coding
        super().__init__(comm, like, slack, at, step, name)

    @property
    def partitions(self) -> tuple[int, ...]:
        """Those that this member computes the gradients of, in the order of `sum`."""
        return self.coding.assignment(self._team.index)

    def sum(
        self,
        gradients: Callable[[int], Any] | Sequence[Any] | Mapping[int, Any],
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return the sum of the gradients of all partitions at this step.

        Waits until enough members have come to it, this one or not.

        Parameters
        ----------
        gradients : function, sequence or mapping
            A function returns the gradient of a partition, given its number, and is not called
            where the step is over already: so a member that was held back catches up without
            computing. Else the trees, in the order of `partitions`, or by partition.
        timeout : float, optional
            Seconds that the result is waited for, > 0.

        Returns
        -------
        tree of ndarrays
            Like `like`; new arrays.

        Raises
        ------
        UsageError
            The gradients are not of these partitions, or not like `like`. On this member: the
            others go on, and this one may call again.
        ServiceGoneError
            It is closed; or fewer members are left than are needed, which it names.
        DeadlineError
            No result in time; says who is waited for. Call again to wait on.
        """

        def make() -> Any:
            return self.coding.encode(self._team.index, self._by_partition(gradients))

        return self._gather("sum", make, timeout)

    def _by_partition(self, gradients: Any) -> Mapping[int, Any]:
        parts = self.partitions
        if callable(gradients):
            return {part: gradients(part) for part in parts}
        if isinstance(gradients, Mapping):
            return gradients
        found = list(gradients) if isinstance(gradients, Sequence) else None
        if found is None or len(found) != len(parts):
            got = type(gradients).__name__ if found is None else f"{len(found)} trees"
            raise UsageError(
                f"{self.where}.sum: gradients: expected a function of the partition, or a tree for "
                f"each of the partitions {list(parts)}, got {got}"
            )
        return dict(zip(parts, found, strict=True))

    def _compared(self) -> dict[str, Any]:
        coding, size = self.coding, self._team.size
        if not isinstance(coding, GradientCode):
            raise UsageError(
                f"{self.where}: coding: expected FractionalRepetition or Cyclic, got {coding!r}"
            )
        if coding.n != size:
            raise UsageError(
                f"{self.where}: coding: expected a code for the {size} members of "
                f"{self._team.title}, got {coding!r}. Make it with n={size}."
            )
        probe = [np.zeros(1, dtype) for dtype in self._blocks.dtypes]
        coding.encode(
            0, {part: probe for part in coding.assignment(0)}
        )  # or it refuses a dtype
        digest = blake2b(np.ascontiguousarray(coding.matrix).tobytes(), digest_size=8)
        return {
            "coding": coding,
            "the matrix B": f"values with the digest {digest.hexdigest()}",
        }

    def _rule(self, step: int) -> Rule:
        return CodedSteps(self.coding, step)
