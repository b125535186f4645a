"""Gradient coding: the sum of all gradients from any n - s of n workers.

The data are cut into n partitions. Worker i holds s + 1 of them and sends one message, the
combination ``sum_j B[i, j] g_j`` of their gradients; of any n - s rows of B some combination is
the vector of ones, and the same combination of the messages is the full sum: s workers may be
missing and nothing is lost. Each worker computes s + 1 times as much.

R. Tandon, Q. Lei, A. G. Dimakis, N. Karampatziakis, "Gradient Coding: Avoiding Stragglers in
Distributed Learning", ICML 2017: its fractional repetition and cyclic repetition schemes.
"""

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.stragglers.combining import Trees
from mpiml.errors import UsageError
from mpiml.whole import whole_number

__all__ = ["FractionalRepetition", "GradientCode"]


class GradientCode(ABC):
    """Who computes what, what each sends, and how the sum is put together.

    Local: no MPI. Made alike on all workers and where messages are decoded; does not change.

    Parameters
    ----------
    n : int
        Workers, and partitions of the data; 1 or more.
    s : int
        Workers that may be missing, 0 to n - 1.

    Raises
    ------
    UsageError
        `s` is negative, or not smaller than `n`.
    """

    def __init__(self, n: int, s: int) -> None:
        name = type(self).__name__
        self.n = whole_number(f"{name}: n", n, 1)
        self.s = whole_number(f"{name}: s", s)
        if not 0 <= self.s < self.n:
            why = "nobody would be left to send" if self.s > 0 else "it is a number of workers"
            raise UsageError(
                f"{name}: s: expected 0 to n - 1 = {self.n - 1} workers that may be missing, "
                f"got {self.s}: {why}"
            )
        self._matrix = self._build()
        self._matrix.flags.writeable = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n}, {self.s})"

    @property
    def matrix(self) -> NDArray[np.float64]:
        """B, shape (n, n), read-only: row i is what worker i multiplies gradients with."""
        return self._matrix

    @abstractmethod
    def assignment(self, worker: int) -> tuple[int, ...]:
        """Return the s + 1 partitions that a worker computes the gradients of."""

    @abstractmethod
    def enough(self, workers: Iterable[int]) -> bool:
        """Tell whether the messages of these workers suffice: those of any n - s do."""

    @abstractmethod
    def coefficients(self, workers: Iterable[int]) -> NDArray[np.float64]:
        """Return what the workers' messages are multiplied with, shape (n,); 0: not used."""

    @abstractmethod
    def encode(self, worker: int, gradients: Mapping[int, Any]) -> Any:
        """Return what a worker sends, a tree like each of the gradients."""

    @abstractmethod
    def decode(self, messages: Mapping[int, Any] | Iterable[tuple[int, Any]]) -> Any:
        """Return the sum of the gradients of all n partitions."""

    @abstractmethod
    def _build(self) -> NDArray[np.float64]:
        """Return B."""

    def _worker(self, worker: Any, where: str) -> int:
        return whole_number(f"{where}: worker", worker, 0, self.n - 1)

    def _workers(self, workers: Iterable[int], where: str) -> tuple[int, ...]:
        """Return the workers in ascending order; refuse strangers and doubles."""
        numbers = sorted(self._worker(worker, where) for worker in workers)
        for one, other in itertools.pairwise(numbers):
            if one == other:
                raise UsageError(f"{where}: worker {one} is there twice. Each counts once.")
        return tuple(numbers)

    def _few(self, workers: Sequence[int], where: str, why: str) -> UsageError:
        missing = ", ".join(str(i) for i in range(self.n) if i not in workers)
        return UsageError(
            f"{where}: expected messages of {self.n - self.s} of {self.n} workers, got "
            f"{len(workers)}; missing: {missing}. {why}"
        )

    def _given(self, worker: int, gradients: Mapping[int, Any]) -> tuple[Trees, list[int]]:
        """Return a worker's gradients, and their partitions in ascending order."""
        where = f"{self!r}.encode"
        held = sorted(self.assignment(worker))
        given = {whole_number(f"{where}: partition", j): tree for j, tree in gradients.items()}
        if given.keys() != set(held):
            raise UsageError(
                f"{where}: worker {worker} holds the partitions {held}, got gradients of "
                f"{sorted(given)}. Pass the gradient of each partition of assignment({worker})."
            )
        return Trees(given, "partition", where), held

    def _arrived(self, messages: Any, where: str) -> tuple[Trees, tuple[int, ...]]:
        """Return the messages, and who sent them, in ascending order."""
        pairs = list(messages.items() if isinstance(messages, Mapping) else messages)
        workers = self._workers((worker for worker, _ in pairs), where)
        if not workers:
            raise self._few(workers, where, "Wait for more.")
        return Trees({operator.index(i): tree for i, tree in pairs}, "worker", where), workers


class FractionalRepetition(GradientCode):
    """Groups of s + 1 workers hold the same s + 1 partitions and send their plain sum.

    Worker i is in group ``i % (n // (s + 1))``: neighbours, which often share a host, are in
    different groups, so that a slow host is not all of a group.

    Exact: whole numbers give the serial sum, and floating-point numbers the same bits
    whichever workers are missing: the sum of the groups' sums, each added in ascending order.
    Only one message of each group is used, so that fewer than n - s may do: `enough`.

    Parameters
    ----------
    n, s : int
        See `GradientCode`; s + 1 must divide n.

    Raises
    ------
    UsageError
        A number is out of its range, or s + 1 does not divide n.
    """

    def _build(self) -> NDArray[np.float64]:
        if self.n % (self.s + 1):
            raise UsageError(
                f"{self!r}: expected a number of workers that s + 1 = {self.s + 1} divides, got "
                f"{self.n}. Use Cyclic({self.n}, {self.s}), which takes any, or another number."
            )
        self.groups = self.n // (self.s + 1)  #: number of groups
        matrix = np.zeros((self.n, self.n))
        for i in range(self.n):
            matrix[i, list(self.assignment(i))] = 1
        return matrix

    def assignment(self, worker: int) -> tuple[int, ...]:
        """Return the s + 1 partitions that a worker computes the gradients of."""
        group = self._worker(worker, f"{self!r}.assignment") % self.groups
        return tuple(range(group * (self.s + 1), (group + 1) * (self.s + 1)))

    def enough(self, workers: Iterable[int]) -> bool:
        """Tell whether these workers suffice: whether one of each group is there."""
        return len(self._senders(self._workers(workers, f"{self!r}.enough"))) == self.groups

    def coefficients(self, workers: Iterable[int]) -> NDArray[np.float64]:
        """Return 1 for the first worker of each group, shape (n,); 0 for all others.

        Raises
        ------
        UsageError
            A group has sent nothing; says who is missing.
        """
        where = f"{self!r}.coefficients"
        chosen = np.zeros(self.n)
        chosen[self._chosen(self._workers(workers, where), where)] = 1
        return chosen

    def encode(self, worker: int, gradients: Mapping[int, Any]) -> Any:
        """Return the sum of a worker's gradients, in ascending order of their partitions.

        Parameters
        ----------
        worker : int
        gradients : mapping of int to tree of ndarrays
            Of each partition of ``assignment(worker)``; trees alike, of any dtype that can be
            summed. Not changed.

        Raises
        ------
        UsageError
            A gradient is missing or too many, or they are not alike; names the leaf.
        """
        trees, held = self._given(worker, gradients)
        return trees.total(held)

    def decode(self, messages: Mapping[int, Any] | Iterable[tuple[int, Any]]) -> Any:
        """Return the sum of the gradients of all n partitions.

        Parameters
        ----------
        messages : mapping of int to tree of ndarrays, or (worker, tree) pairs
            Worker and what it sent; n - s of them, or one at least of each group.

        Raises
        ------
        UsageError
            A group has sent nothing; a worker is unknown, or there twice; the trees differ.
        """
        where = f"{self!r}.decode"
        trees, workers = self._arrived(messages, where)
        return trees.total(self._chosen(workers, where))

    def _senders(self, workers: Sequence[int]) -> dict[int, int]:
        """Return the first worker of each group that has one."""
        return {i % self.groups: i for i in reversed(workers)}

    def _chosen(self, workers: Sequence[int], where: str) -> list[int]:
        senders = self._senders(workers)
        for group in range(self.groups):
            if group not in senders:
                of = ", ".join(map(str, range(group, self.n, self.groups)))
                raise self._few(workers, where, f"Wait for one of {of}.")
        return [senders[group] for group in range(self.groups)]
