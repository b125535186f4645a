"""Optimizer state divided among the members: stage 1 of ZeRO.

Every member has parameters and gradients of its own, in buckets. A step combines the
gradients so that each member gets its stripes of the result, updates these stripes of the
parameters with the part of the optimizer's state that only it keeps, and gives the new stripes
to all (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 5.1). Parameters of 16 bits are kept in float32 besides, in stripes too.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpiml.collectives.alike import agree_on
from mpiml.collectives.bucket import Bucket
from mpiml.collectives.labels import Label
from mpiml.collectives.optimizers.mirror import FULL, LOW, Mirror
from mpiml.collectives.optimizers.shards import SAME, Shards, check_optimizer
from mpiml.collectives.optimizers.stepping import Stepper
from mpiml.errors import UsageError
from mpiml.optim import Coefficients, Optimizer
from mpiml.optim_step import apply

__all__ = ["ShardedOptimizer"]

_WHERE = "ShardedOptimizer"


class ShardedOptimizer(Stepper):
    """An optimizer whose state lies in stripes, one for each member.

    Collective over the members: construction, `step`, `state_dict`, `load_state_dict`. The
    result is that of ``gradients.allreduce`` followed by ``optimizer.apply`` on every member,
    to the last bit where the members share a host, with ``1 / size`` of the state.

    Parameters
    ----------
    params : Bucket
        The parameters, float32, float64, float16 or bfloat16, in host memory or on devices.
        At construction those of member 0 are given to all; those of 16 bits are kept in
        float32 besides.
    gradients : Bucket
        The gradients, in the same structure, shapes and dtypes, of the same members.
    optimizer : mpiml.optim.Optimizer
        With the same hyperparameters on all members.
    name : str, optional
        What messages call it. Compared among the members.

    Raises
    ------
    UsageError
        The buckets or the optimizer do not go together, or differ among the members.

    Examples
    --------
    ::

        params = mpiml.collectives.Bucket(comm, like=weights)
        gradients = mpiml.collectives.Bucket(comm, like=weights)
        params["w"][...] = weights["w"]
        optimizer = ShardedOptimizer(params, gradients, mpiml.optim.AdamW(1e-3))
        for batch in batches:
            gradients["w"][...] = gradient(params["w"], batch)
            optimizer.step("mean")
    """

    where = _WHERE

    def __init__(
        self,
        params: Bucket,
        gradients: Bucket,
        optimizer: Optimizer,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(gradients, optimizer, name)
        self._params = params
        label = Label(self.where, name=name)
        error: Exception | None = None
        said = leaves = ""
        try:
            said = check_optimizer(optimizer, self.where)
            _check(params, gradients)
            leaves = params.regions.digest_text()
        except Exception as caught:  # the others must hear of it
            error = caught
        agree_on(self._team, label.head, said, error, *SAME, label, leaves)
        params.broadcast(0)
        names = [r.dtype_name for r in params.regions.regions]
        layout = Mirror(params.regions, ["float32" if n in LOW else n for n in names])
        self._stripes = params.stripes
        self._own = [f[s] for f, s in zip(params.flat, self._stripes, strict=True)]
        with self._device():
            kept = [
                own.astype(np.float32) if name in LOW else own
                for own, name in zip(self._own, names, strict=True)
            ]
            self._shards = Shards(optimizer, layout, params.structure, self._stripes, kept)

    def _do(self, label: Label, coefficients: Coefficients) -> None:
        gradients, params = self._gradients.channel(label), self._params.channel(label)
        gradients.reduce_scatter(label.op, label)
        shards, who = self._shards, self.optimizer.name
        with self._device():
            for i, part in enumerate(self._stripes):
                grad = self._gradients.flat[i][part]
                kept = shards.params[i]
                apply(who, self.optimizer.rule, coefficients, kept, grad, shards.states[i])
            self._narrow()
        params.allgather(label)

    def _narrow(self) -> None:
        """Write the own stripes of parameters that are kept in float32 besides."""
        for own, kept in zip(self._own, self._shards.params, strict=True):
            if own is not kept:
                own[...] = kept

    def _device(self) -> AbstractContextManager[Any]:
        """Return what makes the parameters' device the current one; the thread may be another."""
        flat = self._params.flat[0]
        return nullcontext() if isinstance(flat, np.ndarray) else flat.device

    def _gather(self, label: Label) -> dict[str, Any]:
        with self._device():
            return super()._gather(label)

    def _load(self, state: Mapping[str, Any], label: Label) -> None:
        with self._device():
            self._shards.load(self._team, state, label)
            self._narrow()
        self._params.channel(label).allgather(label)

    def statistics(self) -> dict[str, Any]:
        """Return sizes, for logs: bytes of the parameters, and of the state kept here."""
        extra = sum(
            kept.nbytes
            for own, kept in zip(self._own, self._shards.params, strict=True)
            if own is not kept
        )
        return {
            "parameters": self._params.regions.nbytes,
            "state": self._shards.nbytes + extra,
            "steps": self.steps,
        }


def _check(params: Bucket, gradients: Bucket) -> None:
    """Refuse buckets that do not go together."""
    if not isinstance(params, Bucket):
        raise UsageError(
            f"{_WHERE}: params: expected an mpiml.collectives.Bucket, got "
            f"{type(params).__qualname__}. Make one like the parameters, and write them into it."
        )
    if gradients is params:
        raise UsageError(
            f"{_WHERE}: expected two buckets, one of parameters and one of gradients, got one for "
            "both. Make a second one like the parameters."
        )
    if gradients.team is not params.team:
        raise UsageError(
            f"{_WHERE}: expected buckets of the same members, got {params!r} and {gradients!r}"
        )
    ours, theirs = params.regions.digest_text(), gradients.regions.digest_text()
    if ours != theirs:
        pairs = zip(ours.split("\n"), theirs.split("\n"), strict=False)
        first = next(((a, b) for a, b in pairs if a != b), ("more", "fewer"))
        raise UsageError(
            f"{_WHERE}: expected gradients like the parameters, in the same dtypes, got "
            f"{first[0]} of the parameters and {first[1]} of the gradients"
        )
    wrong = {region.dtype_name for region in params.regions.regions} - {*FULL, *LOW}
    if wrong:
        raise UsageError(
            f"{_WHERE}: expected parameters of floats, got {', '.join(sorted(wrong))}"
        )
    if type(params.flat[0]) is not type(gradients.flat[0]):
        raise UsageError(
            f"{_WHERE}: expected both buckets in host memory, or both on devices, got "
            f"{type(params.flat[0]).__module__} and {type(gradients.flat[0]).__module__}"
        )
