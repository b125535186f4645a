"""Error feedback: what a step did not send is added to the next one's array.

For a gradient g and what was left over, e: ``a = g + e``, ``c = encode(a)``,
``e = a - decode(c)``. Then the sum of all that was sent differs from the sum of all gradients
by the last e only, however coarse the codec [1]_, and SGD converges as without compression
[2]_.

.. [1] F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its
   Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
.. [2] S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and
   other Gradient Compression Schemes", ICML 2019.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.compression.checks import check_finite, shown, work_dtype
from mpiml.collectives.compression.coding import Coding, Draw, Encodes, Payload, name_of
from mpiml.collectives.compression.draws import generator
from mpiml.collectives.compression.exchange import Exchange, sum_together
from mpiml.collectives.compression.message import read, write
from mpiml.collectives.compression.reducer import Job, Reducer, Transfer, Work
from mpiml.collectives.compression.state import Slot
from mpiml.errors import UsageError

__all__ = ["Coded", "ErrorFeedback", "NoFeedback"]


class _Sent(Job):
    """A call whose payloads are ready to go."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__(works)
        self.payloads: list[Payload] = []  #: for each array what this member sends
        self.draws: list[Draw] = []
        self.block: Any = None  #: all payloads, where they are gathered


class Coded(Reducer):
    """Sends what a codec encodes: payloads are summed if they may be, else gathered.

    Parameters
    ----------
    codec : Encodes
        The codec.
    feedback : bool
        Whether what it did not send is kept.
    hidden : bool
        Go by the name of the codec: the user has never seen this object.
    """

    def __init__(self, codec: Encodes, feedback: bool, hidden: bool = False) -> None:
        if isinstance(codec, type):
            raise UsageError(
                f"{type(self).__name__}: expected a codec, got the class {codec.__name__} "
                f"itself. Make one: {codec.__name__}(...)."
            )
        if not isinstance(codec, Encodes):
            raise UsageError(
                f"{type(self).__name__}: expected an object with the methods encode(array) and "
                f"decode(payload, shape, dtype), got {type(codec).__qualname__}"
            )
        own = type(self).__name__
        kind = type(codec).__qualname__
        super().__init__(feedback, kind if hidden else f"{own}({kind})")
        self.codec = codec
        self._shown = name_of(codec) if hidden else f"{own}({name_of(codec)})"
        self._coding = Coding(codec)
        self._finite = feedback or self._coding.finite

    def nbytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Return the bytes that a member sends for an array of that shape and dtype.

        Local: no MPI.
        """
        return self._coding.nbytes(tuple(shape), work_dtype(dtype))

    def __repr__(self) -> str:
        return self._shown

    def _prepare(self, works: Sequence[Work], exchange: Exchange) -> _Sent:
        job = _Sent(works)
        arrays = [self._encode(work, job, exchange) for work in works]
        coding = self._coding
        layouts = [coding.layout(work.source.shape, work.dtype) for work in works]
        job.sent = sum(part.nbytes for payload in job.payloads for part in payload)
        if coding.reducible:
            job.lines = [
                "".join(f", {part.dtype.name} {part.shape}" for part in payload)
                for payload in job.payloads
            ]
            job.payloads = [  # a view of the array would change with it, or be summed into it
                tuple([p.copy() if np.may_share_memory(p, array) else p for p in payload])
                for array, payload in zip(arrays, job.payloads, strict=True)
            ]
        else:
            job.block = write(job.payloads, layouts)
            job.payloads = read(job.block, layouts)
            job.length = job.block.size
            job.overhead = job.length - job.sent
        for work, array, payload, draw in zip(
            works, arrays, job.payloads, job.draws, strict=True
        ):
            kept: dict[str, NDArray[Any]] = {}
            if self.feedback:
                coding.subtract(array, payload, draw)
                kept["residual"] = array
            elif work.slot.step == 0:  # what decode cannot take is found before others wait
                coding.decode(payload, array.shape, array.dtype, draw)
            job.slots.append(Slot(work.slot.step + 1, kept, work.slot.arrays.get("residual")))
        return job

    def _encode(self, work: Work, job: _Sent, exchange: Exchange) -> NDArray[Any]:
        """Append the payload of an array to `job`; return what was encoded.

        With feedback that is memory of its own.
        """
        shape, name = work.source.shape, work.name
        residual = work.slot.get("residual", shape, work.dtype, name) if self.feedback else None
        if self.feedback:
            array = work.slot.buffer(shape, work.dtype)
            if residual is None:
                np.copyto(array, work.source)
            else:
                np.add(work.source, residual, out=array, dtype=work.dtype)
        else:
            array = work.source.astype(work.dtype, order="C", copy=False)
        if self._finite:
            check_finite(array, name)
        member = exchange.index if self._coding.draws == "own" else None
        kind = type(self.codec).__qualname__
        seed, step = self._coding.seed, work.slot.step
        draw = functools.partial(generator, seed, kind, name, step, member)
        try:
            payload = self._coding.encode(array, draw)
        except UsageError as error:
            raise UsageError(f"{shown(name)}: {error}") from error
        job.payloads.append(payload)
        job.draws.append(draw)
        return array

    def _transfer(self, job: Job, to: Transfer) -> None:
        assert isinstance(job, _Sent)
        coding, works, exchange = self._coding, job.works, to.exchange
        if coding.reducible:
            sums = iter(
                sum_together(exchange, [p for payload in job.payloads for p in payload])
            )
            for payload, total, draw in zip(job.payloads, to.totals, job.draws, strict=True):
                summed = tuple([next(sums) for _ in payload])
                coding.fill(total, summed, draw)
            return
        layouts = [coding.layout(work.source.shape, work.dtype) for work in works]
        everyone = [read(block, layouts) for block in exchange.gather(job.block, to.lengths)]
        for total, draw, *payloads in zip(to.totals, job.draws, *everyone, strict=True):
            coding.combine(payloads, total, to.members, draw)


class ErrorFeedback(Coded):
    """A codec with error feedback: what it did not send is kept and sent later.

    What biased codecs of mpiml do by themselves; for those of your own and for unbiased ones.

    Parameters
    ----------
    codec : codec
        An object with `encode` and `decode`.

    References
    ----------
    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
    "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    """

    def __init__(self, codec: Encodes) -> None:
        super().__init__(codec, True)


class NoFeedback(Coded):
    """A codec without error feedback: what it does not send is lost.

    What unbiased codecs of mpiml do by themselves; for biased ones, to see what feedback is
    worth, and for those of your own.

    Parameters
    ----------
    codec : codec
        An object with `encode` and `decode`.
    """

    def __init__(self, codec: Encodes) -> None:
        super().__init__(codec, False)
