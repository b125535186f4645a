"""Gradients combined and applied in one pass, to parameters that a host holds once.

After an allreduce every member does the same optimizer step on its own copy of parameters
and state. Here each member combines a stripe of the gradients, block by block, and does the
step for that stripe on the one copy of the host, while the block is in the first cache: the
sum is never written to memory, and what the optimizer keeps lies only with the stripe's owner
(the state is partitioned as in ZeRO, Rajbhandari et al. 2020, stage 1).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpiml._native import Plan
from mpiml.collectives.alike import agree_on
from mpiml.collectives.arena import Arena, make_arena, private_arena
from mpiml.collectives.bucket import Bucket
from mpiml.collectives.in_host import ALL, OWN, SHARED
from mpiml.collectives.labels import Label
from mpiml.collectives.ops import op_code
from mpiml.collectives.optimizers.mirror import mirror_of
from mpiml.collectives.optimizers.shards import SAME, Shards, check_optimizer
from mpiml.collectives.optimizers.stepping import Stepper
from mpiml.collectives.regions import specs_of, stripe
from mpiml.collectives.team import Team
from mpiml.collectives.trees import flatten, host_array, unflatten
from mpiml.errors import SharedMemoryError, UsageError
from mpiml.optim import Coefficients, Optimizer

__all__ = ["FusedOptimizer"]

_CHUNK = 8 << 20  # bytes sent at a time to other hosts, at the start


class FusedOptimizer(Stepper):
    """Parameters that a host holds once, updated from a bucket of gradients in one pass.

    Collective over the bucket's members: construction, `step`, `state_dict`,
    `load_state_dict`. The result is that of `Bucket.allreduce` followed by
    ``optimizer.apply`` on every member, to the last bit.

    Parameters
    ----------
    bucket : Bucket
        The gradients: like the parameters, in the same dtype, or in float16 or bfloat16.
        They keep what the member wrote, where there is one host; on several they are
        overwritten.
    params : array or tree of arrays, float32 or float64
        Initial values; those of member 0 are taken. NumPy, CuPy, torch or JAX; not kept.
    optimizer : mpiml.optim.Optimizer
        With the same hyperparameters on all members.
    name : str, optional
        What messages call it. Compared among the members.

    Attributes
    ----------
    tree
        The parameters, in the structure of `params`: read-only NumPy arrays, the same memory
        for all members of a host. They change in `step` only, while no member is outside
        of it.
    steps : int
        Steps done.

    Raises
    ------
    UsageError
        Parameters, gradients or optimizer do not go together, or differ among the members.
    SharedMemoryError
        A host has no room for the parameters. On all members.

    Examples
    --------
    ::

        gradients = mpiml.collectives.Bucket(comm, like=weights)
        model = FusedOptimizer(gradients, weights, mpiml.optim.Adam(1e-3))
        for batch in batches:
            gradients["w"][...] = gradient(model["w"], batch)
            model.step("mean")
    """

    where = "FusedOptimizer"

    def __init__(
        self, bucket: Bucket, params: Any, optimizer: Optimizer, *, name: str | None = None
    ) -> None:
        super().__init__(bucket, optimizer, name)
        label = Label(self.where, name=name)
        error: Exception | None = None
        said = text = ""
        try:
            said = check_optimizer(optimizer, self.where)
            if not bucket.on_host:
                raise UsageError(
                    f"{self.where}: bucket: expected gradients in host memory, got some on a "
                    "device. Use mpiml.collectives.ShardedOptimizer for these."
                )
            team = self._near = bucket.channel(label).team
            leaves, treedef, paths = flatten(params, f"{self.where}: params")
            specs = specs_of(leaves, paths)
            layout = mirror_of(bucket.regions, specs, self.where)
            text = "\n".join([leaf.text() for leaf in specs])
        except Exception as caught:  # the others must hear of it
            error = caught
        agree_on(self._team, label.head, said, error, *SAME, label, text)
        self._arena = _room(bucket, team, layout.nbytes, label)
        self._memory = memory = self._arena.shared(layout.nbytes)
        if team.index == 0:
            for view, leaf in zip(layout.views(memory), leaves, strict=True):
                view[...] = host_array(leaf)
        self._spread(label)
        self._tree = unflatten(treedef, layout.views(memory.toreadonly()))
        place, members = team.local.index(team.index), len(team.local)
        self._stripes = [
            slice(*stripe(r.count, r.itemsize, place, members)) for r in bucket.regions.regions
        ]
        parts = [f[s] for f, s in zip(layout.flat(memory), self._stripes, strict=True)]
        self._shards = Shards(optimizer, layout, treedef, self._stripes, parts)
        self._plans: dict[str, Plan] = {}

    def _spread(self, label: Label) -> None:
        """Bring member 0's values to all hosts. Collective over the members."""
        team, memory = self._near, self._memory
        first = team.index == team.local[0]
        length = len(memory) if team.several_hosts else 0
        for at in range(0, length, _CHUNK):
            part = memory[at : at + _CHUNK]
            values = team.exchange(bytes(part) if team.index == 0 else b"", label)[0]
            if first and team.index != 0:
                part[:] = values
        team.exchange(b"", label)

    @property
    def tree(self) -> Any:
        """The parameters of the host, read-only."""
        return self._tree

    def __getitem__(self, key: Any) -> Any:
        return self._tree[key]

    def _do(self, label: Label, coefficients: Coefficients) -> None:
        channel, plan = self._gradients.channel(label), self._plan(label.op)
        plan.set_coefficients(coefficients)
        if self._near.several_hosts:
            channel.allreduce(label.op, label)
        channel.run(plan, label)

    def _plan(self, op: str) -> Plan:
        """Return the steps of one member; the sum of a stripe stays in the first cache."""
        plan = self._plans.get(op)
        if plan is None:
            plan = self._written(op)
            self._plans[op] = plan  # whole, or not at all
        return plan

    def _written(self, op: str) -> Plan:
        plan = Plan()
        where = ALL
        if self._near.several_hosts:  # combined before, since messages are needed
            op = "sum"
            where = OWN if self._gradients.result is self._gradients.tree else SHARED
        plan.sync()
        for i, region in enumerate(self._gradients.regions.regions):
            part, param = self._stripes[i], self._shards.params[i]
            if part.stop > part.start:
                code = op_code(op, region.dtype_name, "FusedOptimizer.step")
                at = region.offset + part.start * region.itemsize
                plan.update(
                    region.code, code, self._near.size, at, part.stop - part.start, where,
                    self.optimizer.rule, param.dtype == np.float64, param, self._shards.states[i],
                )  # fmt: skip
        plan.sync()
        return plan

    def _load(self, state: Mapping[str, Any], label: Label) -> None:
        self._shards.load(self._team, state, label)
        self._team.exchange(b"", label)  # all have written their part of the parameters

    def close(self) -> None:
        """Let go of the state and the shared memory; views stay readable. Local.

        Call it on every member. The bucket stays open. A step that it comes to later is an
        error on all members.
        """
        super().close()
        self._plans.clear()
        self._arena.gang.leave()

    def statistics(self) -> dict[str, Any]:
        """Return sizes, for logs: bytes of the host's parameters, of this member's state."""
        return {
            "parameters": len(self._memory),
            "state": self._shards.nbytes,
            "steps": self.steps,
        }


def _room(bucket: Bucket, team: Team, nbytes: int, label: Label) -> Arena:
    """Return memory for the host's parameters. Collective over the members."""
    if bucket.team.local != team.local:  # the bucket does without shared memory
        return private_arena(team, 0, label, shared=nbytes)
    arena = make_arena(team, 0, label, shared=nbytes)
    if isinstance(arena, SharedMemoryError):
        raise arena
    return arena
