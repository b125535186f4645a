"""Backup workers: of n + b gradients of a step the first n count. Pure state.

A worker computes its gradient on the parameters of step t and offers it together with t. The
first n of a step are averaged and applied, the step number grows by one, and the b others are
dropped when they come: they belong to parameters that are no more.

J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, "Revisiting Distributed Synchronous SGD",
2016. TensorFlow's SyncReplicasOptimizer drops by the same rule: a gradient whose local step is
smaller than the global step.
"""

from enum import Enum
from typing import NamedTuple

from mpiml.errors import UsageError
from mpiml.whole import whole_number

__all__ = ["Backup", "Drops", "Verdict"]


class Verdict(Enum):
    """What becomes of a gradient that was offered."""

    TAKE = "take"  #: it counts
    LAST = "last"  #: it counts and is the n-th: average, apply, announce the next step
    LATE = "late"  #: its step is over: drop it, and give the worker the current parameters

    @property
    def taken(self) -> bool:
        """Whether the gradient counts."""
        return self is not Verdict.LATE


class Drops(NamedTuple):
    """What became of the gradients so far."""

    steps: int  #: complete ones
    taken: tuple[int, ...]  #: gradients that counted, of each worker, the unfinished step's too
    dropped: tuple[int, ...]  #: gradients that came late, of each worker


class Backup:
    """Decide which gradients of a step count: the first n of n + b.

    Local: no MPI, no clock; for one thread, the one that receives the gradients. The order of
    calls is the order of arrival.

    Parameters
    ----------
    n : int
        Gradients that make a step, 1 or more; the update is their sum over n.
    b : int
        Workers beyond them, 0 or more. As many may be late in every step at no cost; with 0
        every step waits for all.
    step : int, optional
        Number of the first step: that of the checkpoint one goes on from.

    Raises
    ------
    UsageError
        A number is out of its range.
    """

    def __init__(self, n: int, b: int, *, step: int = 0) -> None:
        self.n = whole_number("Backup: n", n, 1)
        self.b = whole_number("Backup: b", b, 0)
        self._first = self._step = whole_number("Backup: step", step, 0)
        self._now: list[int] = []  # workers of the current step, as they came
        self._last: tuple[int, ...] = ()
        self._offered = [self._first - 1] * self.workers  # the newest step of each
        self._taken = [0] * self.workers
        self._dropped = [0] * self.workers

    def __repr__(self) -> str:
        return f"Backup({self.n}, {self.b})"

    @property
    def workers(self) -> int:
        """Number of workers, n + b."""
        return self.n + self.b

    @property
    def step(self) -> int:
        """The step that gradients are now collected for."""
        return self._step

    @property
    def arrived(self) -> tuple[int, ...]:
        """Workers whose gradients count in the current step, in the order they came."""
        return tuple(self._now)

    @property
    def last(self) -> tuple[int, ...]:
        """Workers whose gradients made the step before, in the order they came."""
        return self._last

    def offer(self, worker: int, step: int) -> Verdict:
        """Say what becomes of a gradient that has arrived.

        Local: no MPI. An offer that is refused changes nothing.

        Parameters
        ----------
        worker : int
            Whose it is, 0 to n + b - 1.
        step : int
            The step whose parameters it was computed on.

        Raises
        ------
        UsageError
            There is no such worker, the step has not begun, or the worker has offered a
            gradient of this step, or of a later one, before.
        """
        where = f"{self!r}.offer"
        worker = whole_number(f"{where}: worker", worker, 0, self.workers - 1)
        step = whole_number(f"{where}: step", step, self._first)
        if step > self._step:
            raise UsageError(
                f"{where}: step: expected at most {self._step}, the current one, got {step} of "
                f"worker {worker}. A worker takes its step from the parameters it was given."
            )
        newest = self._offered[worker]
        if step <= newest:
            before = "this step" if step == newest else f"step {newest}"
            raise UsageError(
                f"{where}: worker {worker} offers step {step} and has offered {before} before. "
                f"Offer each gradient once, in the order in which the worker sent them."
            )
        self._offered[worker] = step
        if step < self._step:
            self._dropped[worker] += 1
            return Verdict.LATE
        self._taken[worker] += 1
        self._now.append(worker)
        if len(self._now) < self.n:
            return Verdict.TAKE
        self._last = tuple(self._now)
        self._now.clear()
        self._step += 1
        return Verdict.LAST

    def statistics(self) -> Drops:
        """Return how many steps were made, and what was taken and dropped of each worker."""
        return Drops(self._step - self._first, tuple(self._taken), tuple(self._dropped))
