"""Downpour SGD: a worker that trains on a copy of the parameters, and talks to the servers rarely.

Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, algorithm 7.1. On the
servers belongs `mpiml.optim.Adagrad`, whose rate is that of each parameter by itself: gamma
over the root of the sum of its squared gradients (section 4.1).
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from mpiml.collectives.trees import flatten, host_array, unflatten, unlike
from mpiml.errors import UsageError
from mpiml.optim import SGD, Rate
from mpiml.optim_step import check_parameter
from mpiml.whole import whole_number

__all__ = ["Downpour", "DownpourStatistics"]


@dataclass(frozen=True)
class DownpourStatistics:
    """What a worker has done so far."""

    steps: int
    """Gradients taken in."""
    pulls: int
    """How often parameters were fetched, the first time too."""
    pushes: int
    """How often a sum of gradients was pushed."""


class Downpour:
    """A copy of the parameters that goes its own way between fetches.

    Local; not safe from several threads. Steps count from 0. Before step 0, and before each
    step whose number `fetch` divides, the parameters are fetched, and replace the copy. After
    each step whose number `push` divides, step 0 among them, the sum of the gradients since the
    last push is pushed, without waiting for it; only the next push waits, so that one at most
    is under way.

    What the copy has learned and not pushed yet is not in the parameters that the next fetch
    brings; it comes with a later one, as in the paper.

    Parameters
    ----------
    client : client of a ParameterServerNode
        Or what has ``pull() -> (tree, version)``, ``push(gradient, version)`` and
        ``futures.push``. The tree: arrays of float32 or float64.
    fetch, push : int
        n_fetch and n_push, >= 1.
    rate : float or callable
        Of the steps of the copy, > 0: a number, or a function of the number of steps done
        before. With ``fetch=1`` the copy never makes one.

    Raises
    ------
    UsageError
        An argument is out of range; the servers hold what is no array.

    Examples
    --------
    ::

        with Downpour(client, fetch=5, push=5, rate=0.01) as replica:
            for batch in batches:
                replica.step(gradient(replica.params, batch))
    """

    def __init__(self, client: Any, fetch: int = 1, push: int = 1, *, rate: Rate) -> None:
        self._fetch = whole_number("Downpour: fetch", fetch, 1)
        self._push = whole_number("Downpour: push", push, 1)
        self._rule = SGD(rate)
        self._client = client
        self._steps = self._pulls = self._pushes = 0
        self._under_way: Any = None  # the future of a push
        self._summed = 0  # gradients in _sum
        self._since = 0  # the version that the first of them was computed from
        tree, version = client.pull()
        self._version: int = version
        self._pulls = 1
        leaves, self._treedef, self._paths = flatten(tree, "Downpour: pull()")
        for leaf, path in zip(leaves, self._paths, strict=True):
            check_parameter(f"Downpour: pull(){path}", leaf)
        # a copy: what is pulled may be memory of the server, to be read only
        self._leaves = [np.array(leaf) for leaf in leaves]
        self._tree = unflatten(self._treedef, self._leaves)
        # one is filled while the other is on its way
        self._sum, self._sent = self._room(), self._room()

    @property
    def params(self) -> Any:
        """The copy, a tree of NumPy arrays, where gradients are to be computed.

        It stays the same tree; `step` changes the arrays.
        """
        return self._tree

    @property
    def version(self) -> int:
        """That of the last fetch."""
        return self._version

    def step(self, gradient: Any) -> None:
        """Take in a gradient that was computed from `params`.

        Parameters
        ----------
        gradient : tree of arrays
            As `params`, of any library and floating dtype. Free again afterwards.

        Raises
        ------
        UsageError
            It is another tree, or of other shapes; nothing has changed then.
        Exception
            What a pull, or the push before, has failed with. The step is done.
        """
        grads = self._checked(gradient)
        self._add(grads)
        push = self._steps % self._push == 0
        self._steps += 1
        fetch = self._steps % self._fetch == 0
        if not fetch:  # else the copy is about to be replaced
            for param, grad in zip(self._leaves, grads, strict=True):
                self._rule.apply(param, grad, (), self._steps)
        if push:
            self._start_push()
        if fetch:
            self._pull()

    def flush(self) -> None:
        """Push what has not been pushed yet, and wait until the servers have it.

        Raises
        ------
        Exception
            What a push has failed with.
        """
        if self._summed:
            self._start_push()
        self._settle()

    def statistics(self) -> DownpourStatistics:
        """Return what has been done so far."""
        return DownpourStatistics(self._steps, self._pulls, self._pushes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush, unless an error is on its way."""
        if kind is None:
            self.flush()

    def _checked(self, gradient: Any) -> list[Any]:
        leaves, treedef, _ = flatten(gradient, "Downpour.step: gradient")
        if treedef != self._treedef:
            raise UsageError(
                f"Downpour.step: expected a gradient like {unlike(self._treedef, treedef)}"
            )
        arrays = [host_array(leaf) for leaf in leaves]
        for array, param, path in zip(arrays, self._leaves, self._paths, strict=True):
            floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
            if array.shape != param.shape or not floating:
                raise UsageError(
                    f"Downpour.step: gradient{path}: expected floating-point numbers of shape "
                    f"{param.shape}, got {array.dtype}{array.shape}"
                )
        return arrays

    def _add(self, grads: list[Any]) -> None:
        first = not self._summed
        for total, grad in zip(self._sum, grads, strict=True):
            if first:
                total[...] = grad
            else:
                total += grad.astype(total.dtype, copy=False)
        if first:
            self._since = self._version
        self._summed += 1

    def _start_push(self) -> None:
        self._settle()
        gradient = unflatten(self._treedef, self._sum)
        self._under_way = self._client.futures.push(gradient, self._since)
        self._pushes += 1
        self._sum, self._sent = self._sent, self._sum
        self._summed = 0

    def _settle(self) -> None:
        """Wait for the push that is under way; raise what it has failed with, once."""
        future, self._under_way = self._under_way, None
        if future is None:
            return
        try:
            future.result()
        except BaseException:
            self._sent = self._room()  # one that was only given up may still be read
            raise

    def _pull(self) -> None:
        tree, version = self._client.pull()
        leaves, treedef, _ = flatten(tree, "Downpour: pull()")
        shapes = [leaf.shape for leaf in leaves]
        if treedef != self._treedef or shapes != [leaf.shape for leaf in self._leaves]:
            raise UsageError(
                f"Downpour: pull(): expected the tree of the first time, of shapes "
                f"{[leaf.shape for leaf in self._leaves]}, got shapes {shapes}"
            )
        for mine, theirs in zip(self._leaves, leaves, strict=True):
            mine[...] = theirs
        self._version = version
        self._pulls += 1

    def _room(self) -> list[Any]:
        return [np.empty_like(leaf) for leaf in self._leaves]
