"""On the ranks: allreduce and an optimizer's step on every rank, beside both in one pass."""

from collections.abc import Callable
from typing import Any

import numpy as np

import mpiml._native as native
from mpiml import optim
from mpiml.bench.allreduce_rounds import Way, expected, fill_value, in_turn
from mpiml.collectives import Bucket, FusedOptimizer

__all__ = ["OPTIMIZERS", "Reference", "steps"]

OPTIMIZERS = {"sgd": optim.SGD, "adam": optim.Adam}


class Reference:
    """One parameter that gets the same steps, to compare with.

    Parameters
    ----------
    optimizer
        Whose steps they are.
    param
        Where the parameters are looked at: (n,) float32, all alike.
    """

    def __init__(self, optimizer: optim.Optimizer, param: Any) -> None:
        self._optimizer = optimizer
        self._found = param
        self._param = np.zeros(1, np.float32)
        self._state = optimizer.init(self._param)
        self._steps = 0

    def check(self, gradient: float, whole: bool) -> None:
        """Do the next step here, and compare; raises AssertionError.

        Parameters
        ----------
        gradient
            What all elements got.
        whole
            Whether to look at all parameters.
        """
        self._steps += 1
        grad = np.full(1, gradient, np.float32)
        _update(self._optimizer, self._param, grad, self._state, self._steps)
        found, (wanted,) = self._found, self._param
        good = bool((found == wanted).all()) if whole else found[0] == wanted == found[-1]
        if not good:
            raise AssertionError(
                f"{self._optimizer.name}, step {self._steps}: expected {wanted!r} everywhere, "
                f"got {found[0]!r} .. {found[-1]!r}"
            )


def _update(optimizer: optim.Optimizer, param: Any, grad: Any, state: Any, step: int) -> None:
    """Do one step with the native kernel. Local."""
    native.update(
        optimizer.rule, param.itemsize, param, grad, tuple(state), optimizer.coefficients(step)
    )


def steps(comm: Any, nbytes: int, how: list[int]) -> dict[str, dict[str, list[float]]]:
    """Time a step of each optimizer on gradients of float32.

    Collective over `comm`, whose ranks share a host.

    Parameters
    ----------
    comm
        The communicator.
    nbytes
        Of the gradients of a rank.
    how
        Rounds, repetitions of a block, and those before them.

    Returns
    -------
    dict
        Optimizer -> ``"apart"`` and ``"fused"`` -> seconds.
    """
    like = {"x": np.broadcast_to(np.float32(0), nbytes // 4)}
    found = {}
    for name, kind in OPTIMIZERS.items():
        optimizer = kind(0.01)
        with Bucket(comm, like) as bucket, FusedOptimizer(bucket, like, optimizer) as model:
            ways = {
                "apart": _apart(comm, bucket, optimizer),
                "fused": _way(comm, bucket, Reference(optimizer, model["x"]), model.step),
            }
            found[name] = in_turn(comm, ways, *how)
        del bucket, model, ways  # their memory, before the next
    return found


def _apart(comm: Any, bucket: Any, optimizer: optim.Optimizer) -> Way:
    gradient = bucket["x"]
    param = np.zeros_like(gradient)
    state = optimizer.init(param)
    done = [0]

    def run() -> None:
        done[0] += 1
        bucket.allreduce("mean")
        _update(optimizer, param, gradient, state, done[0])

    return _way(comm, bucket, Reference(optimizer, param), run)


def _way(comm: Any, bucket: Any, reference: Reference, run: Callable[[], None]) -> Way:
    gradient = bucket["x"]

    def check(i: int, whole: bool) -> None:
        reference.check(expected(i, comm.size) / comm.size, whole)

    return Way(lambda i: gradient.fill(fill_value(i, comm.rank)), run, check)
