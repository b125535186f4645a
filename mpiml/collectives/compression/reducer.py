"""One compressed allreduce from start to end, whatever the method: check, agree, send, commit.

A member that cannot go on (NaN, a wrong dtype, an error in the user's own codec) must not leave
the others waiting. So a call begins with a record of 24 bytes from each member, says whether it
can go on and what it is about to do, and all of them raise the same error or none. Residuals
and counts change only after the last message, so a call that failed can be repeated.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.checks import check_array, check_op, shown, work_dtype
from mpiml.collectives.compression.exchange import RECORD_BYTES, Exchange, agree
from mpiml.collectives.compression.state import Memory, Remembers, Slot, Statistics
from mpiml.collectives.ops import dtype_name
from mpiml.errors import UsageError

__all__ = ["Job", "Reducer", "Refused", "Transfer", "Work"]


class Work(NamedTuple):
    """One array on its way through a call."""

    name: str  #: under which it is remembered
    source: NDArray[Any]  #: what the user gave, not changed
    dtype: "np.dtype[Any]"  #: what is computed in: float32 or float64
    slot: Slot  #: what is remembered from before, not changed


class Job:
    """What `Reducer._prepare` made of the arrays of one call."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self.lines = [""] * len(works)  #: of each array, what else members must agree on
        self.length = 0  #: bytes of what will be gathered
        self.sent = 0  #: bytes of the payloads
        self.overhead = 0  #: bytes of what is sent beside them
        self.slots: list[Slot] = []  #: what is remembered after the call


class Transfer(NamedTuple):
    """Where the numbers of a call go."""

    exchange: Exchange
    lengths: Sequence[int]  #: of what each member gathers
    members: int  #: how many there are behind `exchange`
    totals: Sequence[NDArray[Any]]  #: for the sums: C-contiguous, of the dtypes of the works


class Reducer(Remembers):
    """A method of compression with its memory; the base of those that `compress=` takes.

    Parameters
    ----------
    feedback : bool
        Whether what a call did not send is added to the next one's array.
    kind : str
        Whose state this is: of which codec a state may be loaded.
    """

    def __init__(self, feedback: bool, kind: str) -> None:
        self.feedback = feedback
        self._memory = Memory(kind)

    @property
    def memory(self) -> Memory:
        """What is remembered."""
        return self._memory

    @abstractmethod
    def nbytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Return the bytes that a member sends for an array of that shape and dtype.

        Local: no MPI.
        """

    @abstractmethod
    def _prepare(self, works: Sequence[Work], exchange: Exchange) -> Job:
        """Do all that can fail on one member alone. Local: no MPI."""

    @abstractmethod
    def _transfer(self, job: Job, to: Transfer) -> None:
        """Fill `to.totals` with the sums over the members. Collective.

        Completes `Job.slots` where that has not been done.
        """

    def reduce(
        self,
        exchange: Exchange,
        sources: Sequence[NDArray[Any]],
        results: Sequence[NDArray[Any]],
        names: Sequence[str],
        op: Any = "sum",
        members: int | None = None,
        where: str = "allreduce",
    ) -> None:
        """Sum arrays over the members, approximately.

        Collective over `exchange`: same shapes, dtypes, names, op and settings. Bitwise the
        same result on every member.

        Parameters
        ----------
        exchange : Exchange
            The members.
        sources : sequence of ndarray
            float16, bfloat16, float32 or float64, of any shape.
        results : sequence of ndarray
            Where the sums go: arrays like `sources`, perhaps these themselves.
        names : sequence of str
            Under which each array is remembered; no two alike.
        op : str or mpi4py.MPI.Op
            ``"sum"``, ``"mean"`` or ``MPI.SUM``.
        members : int, optional
            What the mean divides by, where each of `exchange` stands for several.
        where : str
            The call, in messages.

        Raises
        ------
        UsageError
            An op, a dtype or a number that this method does not take, or members that differ.
            The same on all members.
        RemoteError
            The user's own codec raised on some member. The same on all members.
        """
        count = exchange.size if members is None else members
        head = f"op={op!r}, compress={self!r}"
        job, error = None, None
        try:
            op = check_op(op)
            head = f"op={op!r}, compress={self!r}"
            job = self._prepare(self._works(exchange, sources, names), exchange)
        except Exception as caught:  # carried to the others, and raised by `agree`
            error = caught
        text = "" if job is None else f"{where}({head})\n\n{_lines(job)}"
        length = 0 if job is None else job.length
        lengths = agree(exchange, where, text, length, error, head)
        assert job is not None  # else agree has raised
        totals = [_total(w, result) for w, result in zip(job.works, results, strict=True)]
        self._transfer(job, Transfer(exchange, lengths, count, totals))
        for total, result in zip(totals, results, strict=True):
            if op == "mean":
                np.divide(total, count, out=total)
            if total is not result:
                with np.errstate(over="ignore"):  # too large for float16 becomes infinite
                    np.copyto(result, total, casting="same_kind")
        self._commit(job, exchange.index)

    def _works(
        self, exchange: Exchange, sources: Sequence[NDArray[Any]], names: Sequence[str]
    ) -> list[Work]:
        slots = self._memory.of(exchange.index, exchange.names[exchange.index])
        works: dict[str, Work] = {}
        for source, given in zip(sources, names, strict=True):
            check_array(source, given)
            name = given or "array"
            if name in works:
                raise UsageError(f"names: expected no two alike, got {name!r} twice")
            slot = self._memory.slot(slots, name)
            works[name] = Work(name, source, work_dtype(source.dtype), slot)
        return list(works.values())

    def _commit(self, job: Job, member: int) -> None:
        counts = Statistics(
            1,
            len(job.works),
            sum(work.source.nbytes for work in job.works),
            job.sent,
            RECORD_BYTES + job.overhead,
        )
        slots = {w.name: s for w, s in zip(job.works, job.slots, strict=True)}
        self._memory.commit(member, slots, counts)


class Refused(Reducer):
    """Stands for something that does not compress: members hear of it in the first call.

    Parameters
    ----------
    error : UsageError
        Why it does not.
    """

    def __init__(self, error: UsageError) -> None:
        super().__init__(False, "Refused")
        self._error = error

    def __repr__(self) -> str:
        return "?"

    def nbytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Return 0: nothing is sent."""
        return 0

    def _prepare(self, works: Sequence[Work], exchange: Exchange) -> Job:
        raise self._error

    def _transfer(self, job: Job, to: Transfer) -> None:
        raise self._error


def _lines(job: Job) -> str:
    """Return a line for each array: what members must agree on."""
    return "\n".join(
        f"{shown(w.name)} {w.source.shape} {dtype_name(w.source)}, step {w.slot.step}{line}"
        for w, line in zip(job.works, job.lines, strict=True)
    )


def _total(work: Work, result: NDArray[Any]) -> NDArray[Any]:
    """Return where the sum is made: the result itself, if one can compute in it."""
    if result.dtype == work.dtype and result.flags.c_contiguous:
        return result
    return np.empty(work.source.shape, work.dtype)
