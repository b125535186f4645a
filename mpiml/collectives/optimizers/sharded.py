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
from mpiml.collectives.ops import op_name
from mpiml.collectives.optimizers.mirror import FULL, LOW, Mirror
from mpiml.collectives.optimizers.shards import SAME, Shards
from mpiml.errors import UsageError
from mpiml.optim import Coefficients, Optimizer
from mpiml.optim_step import apply

__all__ = ["ShardedOptimizer"]

_WHERE = "ShardedOptimizer"


class ShardedOptimizer:
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

    def __init__(
        self,
        params: Bucket,
        gradients: Bucket,
        optimizer: Optimizer,
        *,
        name: str | None = None,
    ) -> None:
        self._params = params
        self._gradients = gradients
        self._name = name
        self._team = params.team
        self.optimizer = optimizer
        if gradients.team is not self._team:
            raise UsageError(
                f"{_WHERE}: expected buckets of the same members, got {params!r} and "
                f"{gradients!r}"
            )
        label = Label(_WHERE, name=name)
        error = _differ(params, gradients)
        said = f"{optimizer.state_dict()!r}\n{params.regions.digest_text()}"
        agree_on(self._team, label.head, said, error, *SAME, label)
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
        self._last: tuple[tuple[str, float], Label] | None = None

    @property
    def steps(self) -> int:
        """How many steps have been done."""
        return self._shards.steps

    def step(self, op: str = "mean") -> None:
        """Combine the gradients of all members, and do one step of the optimizer with them.

        Collective over the members. The gradients are undefined afterwards, apart from the
        own stripes.

        Parameters
        ----------
        op : {"mean", "sum"}
            How gradients are combined, as in `Bucket.reduce_scatter`.

        Raises
        ------
        UsageError
            Members differ in what they do, in the learning rate too.
        ServiceGoneError
            A bucket is closed, here or by another member.
        """
        step = self._shards.steps + 1
        coefficients = self.optimizer.coefficients(step)
        label = self._labelled(op, self.optimizer.rate(step))
        self._team.run(lambda: self._do(coefficients, label), label)
        self._shards.steps = step

    def _labelled(self, op: str, rate: float) -> Label:
        """Return what members compare of a step; made again when the learning rate changes."""
        if self._last is None or self._last[0] != (op, rate):
            where, regions = f"{_WHERE}.step", self._gradients.regions
            known = op_name(op, where)
            if known not in ("mean", "sum"):
                raise UsageError(f"{where}: op: expected 'mean' or 'sum', got {op!r}")
            more = f"lr={rate!r}"
            label = Label(where, known, self._name, None, regions.digest_text(), more)
            self._last = (op, rate), label
        return self._last[1]

    def _do(self, coefficients: Coefficients, label: Label) -> None:
        gradients, params = self._gradients.channel(label), self._params.channel(label)
        gradients.reduce_scatter(label.op, label)
        shards, who = self._shards, self.optimizer.name
        with self._device():
            for i, part in enumerate(self._stripes):
                grad = self._gradients.flat[i][part]
                kept = shards.params[i]
                apply(who, self.optimizer.rule, coefficients, kept, grad, shards.states[i])
            self._round()
        params.allgather(label)

    def _round(self) -> None:
        """Write the own stripes of parameters that are kept in float32 besides."""
        for own, kept in zip(self._own, self._shards.params, strict=True):
            if own is not kept:
                own[...] = kept

    def _device(self) -> AbstractContextManager[Any]:
        """Return what makes the parameters' device the current one; the thread may be another."""
        flat = self._params.flat[0]
        return nullcontext() if isinstance(flat, np.ndarray) else flat.device

    def state_dict(self) -> dict[str, Any]:
        """Return everything a checkpoint needs, whole and the same on all members.

        Collective over the members.

        Returns
        -------
        dict
            ``"optimizer"`` the hyperparameters, ``"step"`` how many were done, ``"params"``
            the parameters, those of 16 bits as float32, ``"state"`` for each name of
            ``optimizer.states`` a tree like the parameters. NumPy arrays; any number of
            members can load it, and a `FusedOptimizer` too.
        """
        label = Label(f"{_WHERE}.state_dict", name=self._name)
        found: list[dict[str, Any]] = []

        def work() -> None:
            with self._device():
                found.append(self._shards.gather(self._team, label))

        self._team.run(work, label)
        return found[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, here or with another number of members.

        Collective over the members; each passes the same.

        Raises
        ------
        UsageError
            It is of other parameters or of another optimizer. On all members, and nothing is
            changed.
        """
        label = Label(f"{_WHERE}.load_state_dict", name=self._name)

        def work() -> None:
            with self._device():
                self._shards.load(self._team, state, label)
                self._round()
            self._params.channel(label).allgather(label)

        self._team.run(work, label)

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


def _differ(params: Bucket, gradients: Bucket) -> UsageError | None:
    """Return what is wrong with the buckets, or None."""
    ours, theirs = params.regions.digest_text(), gradients.regions.digest_text()
    if ours != theirs:
        pairs = zip(ours.split("\n"), theirs.split("\n"), strict=False)
        first = next(((a, b) for a, b in pairs if a != b), ("more", "fewer"))
        return UsageError(
            f"{_WHERE}: expected gradients like the parameters, in the same dtypes, got "
            f"{first[0]} of the parameters and {first[1]} of the gradients"
        )
    wrong = {region.dtype_name for region in params.regions.regions} - {*FULL, *LOW}
    if wrong:
        return UsageError(
            f"{_WHERE}: expected parameters of floats, got {', '.join(sorted(wrong))}"
        )
    if type(params.flat[0]) is not type(gradients.flat[0]):
        return UsageError(
            f"{_WHERE}: expected both buckets in host memory, or both on devices, got "
            f"{type(params.flat[0]).__module__} and {type(gradients.flat[0]).__module__}"
        )
    return None
