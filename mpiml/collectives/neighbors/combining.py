"""Weighted sums of arrays, in blocks that stay in the cache. Pure."""

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

__all__ = ["weighted_sum"]

_BLOCK: Final = 1 << 20  # bytes that are added at a time: they fit the caches
_SMALL: Final = 1 << 15  # bytes for which new memory costs little
_own = threading.local()  # memory of each thread, for what is to be added


def weighted_sum(
    sources: Sequence[Any], weights: Sequence[float], out: Any, apart: bool = False
) -> None:
    """Set `out` to the sum of ``weights[i] * sources[i]``, added in this order.

    Local: a pure function. Arithmetic is in the dtype of the arrays; that of float16 and
    bfloat16 in float32, rounded once.

    Parameters
    ----------
    sources : sequence of ndarray
        (n,), of one dtype.
    weights : sequence of float
        As many.
    out : ndarray
        (n,), contiguous, of the same dtype; it may be one of the sources.
    apart : bool
        Whether it is known that it shares no memory with them.
    """
    if not sources:
        out[...] = 0
        return
    halves = out.dtype.itemsize == 2  # float16 and bfloat16
    # what `out` overwrites must have been read before
    if not apart:
        apart = not any([np.may_share_memory(source, out) for source in sources[1:]])
    if apart and not halves and out.nbytes <= _SMALL:
        _in_one(sources, weights, out)
    else:
        _in_blocks(sources, weights, out, halves, apart)


def _in_one(sources: Sequence[Any], weights: Sequence[float], out: Any) -> None:
    multiply, add = np.multiply, np.add
    with np.errstate(all="ignore"):
        multiply(sources[0], weights[0], out)
        for i in range(1, len(sources)):
            add(out, multiply(sources[i], weights[i]), out)


def _in_blocks(
    sources: Sequence[Any], weights: Sequence[float], out: Any, halves: bool, apart: bool
) -> None:
    dtype = np.dtype(np.float32) if halves else out.dtype
    block = max(min(_BLOCK // dtype.itemsize, out.size), 1)
    total = np.empty(block, dtype) if halves or not apart else None
    scratch = _scratch()[: block * dtype.itemsize].view(dtype)
    first, *rest = zip(sources, weights, strict=True)
    with np.errstate(all="ignore"):
        for at in range(0, out.size, block):
            part = slice(at, at + block)
            target = out[part]
            t = scratch[: target.size]
            sum_ = target if total is None else total[: target.size]
            np.multiply(_wide(first[0][part], halves), first[1], out=sum_)
            for source, weight in rest:
                np.multiply(_wide(source[part], halves), weight, out=t)
                np.add(sum_, t, out=sum_)
            if total is not None:
                target[...] = sum_


def _scratch() -> Any:
    """Return memory of this thread. (`_BLOCK`,) uint8."""
    memory = getattr(_own, "memory", None)
    if memory is None:  # new memory for each call would be given back, and come as new pages
        memory = _own.memory = np.empty(_BLOCK, np.uint8)
    return memory


def _wide(block: Any, halves: bool) -> Any:
    return block.astype(np.float32) if halves else block
