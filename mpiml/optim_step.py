"""One step of an optimizer on arrays, in place: the native loop, or the same as array formulas.

The formulas are written once for NumPy and CuPy. They work on blocks, so that the two
temporaries stay small, and on a CPU they round as the native loop does, operation by
operation: both give the same bits.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiml import _native
from mpiml.arrays import namespace
from mpiml.errors import UsageError
from mpiml.libraries import family

__all__ = ["Coefficients", "apply", "apply_formula", "check_parameter"]

# Elements per block: with NumPy the block and its temporaries stay in the second cache; on a
# device a block is large, since each operation on it is a launch.
_BLOCK = {None: 1 << 14, "cupy": 1 << 24}

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Coefficients(NamedTuple):
    """The numbers of one step, in the order of the struct in mpiml/native/update.hpp.

    Attributes
    ----------
    rate
        The parameter moves by ``-rate * direction``.
    decay
        ``gradient += decay * parameter`` before all else.
    shrink
        ``parameter *= shrink`` before it moves.
    keep1, add1
        The running mean: ``mean = keep1 * mean + add1 * gradient``.
    keep2, add2
        The running square: ``square = keep2 * square + add2 * gradient**2``.
    scale, eps
        The divisor: ``sqrt(square) * scale + eps``.
    nesterov
        1.0 if momentum looks ahead.
    """

    rate: float
    decay: float = 0.0
    shrink: float = 1.0
    keep1: float = 0.0
    add1: float = 0.0
    keep2: float = 0.0
    add2: float = 0.0
    scale: float = 1.0
    eps: float = 0.0
    nesterov: float = 0.0


def apply(
    who: str, rule: int, c: Coefficients, param: Any, grad: Any, state: Sequence[Any]
) -> None:
    """Do one step in place, in the fastest way there is for these arrays.

    Parameters
    ----------
    who : str
        Name of the optimizer, for messages.
    rule : int
        Number of the native rule, an index of `FORMULAS`.
    c : Coefficients
        The numbers of the step.
    param : array, float32 or float64
        Of NumPy or CuPy, any shape; changed.
    grad : array
        Of the same shape; another floating dtype is converted block by block.
    state : sequence of arrays
        Of the parameter's shape and dtype; changed.

    Raises
    ------
    UsageError
        Libraries, shapes or dtypes do not fit.
    """
    if _as_they_are(rule, param, grad, state):  # most steps, and small ones want to be short
        _native.update(rule, param.dtype.itemsize, param, grad, tuple(state), c)
        return
    check_parameter(who, param)
    _check_fit(who, rule, param, grad, state)
    arrays = _flat((param, grad, *state))
    if family(type(param)) is not None or not all(a.flags.c_contiguous for a in arrays):
        apply_formula(rule, c, *arrays)
        return
    whole = grad.dtype == param.dtype
    for p, g, *s in _blocks(arrays, arrays[0].size if whole else _BLOCK[None]):
        same = g if whole else g.astype(p.dtype)
        _native.update(rule, p.dtype.itemsize, p, same, tuple(s), c)


def apply_formula(rule: int, c: Coefficients, param: Any, grad: Any, *state: Any) -> None:
    """Do one step in place by array operations; arguments as of `apply`, not checked."""
    xp = namespace(param)
    formula, limit = FORMULAS[rule][1], _BLOCK[family(type(param))]
    for p, g, *s in _blocks(_flat((param, grad, *state)), limit):
        t, u = xp.empty_like(p), xp.empty_like(p)
        now = g if g.dtype == p.dtype else g.astype(p.dtype)
        if c.decay:
            xp.multiply(p, c.decay, out=t)
            now = xp.add(now, t, out=t)
        formula(xp, c, p, now, s, t, u)


def check_parameter(who: str, param: Any) -> None:
    """Raise a UsageError unless `param` is a float32 or float64 array of NumPy or CuPy."""
    cls = type(param)
    if not (isinstance(param, np.ndarray) or family(cls) == "cupy"):
        raise UsageError(
            f"{who}: expected a NumPy or CuPy array as parameter, got "
            f"{cls.__module__}.{cls.__qualname__}"
        )
    if param.dtype not in _FLOATS:
        raise UsageError(
            f"{who}: expected a float32 or float64 parameter, got {param.dtype}; keep the "
            f"parameter in float32, its gradient may be of lower precision"
        )


def _as_they_are(rule: int, param: Any, grad: Any, state: Sequence[Any]) -> bool:
    """Tell whether the native loop takes the arrays without a look at anything else."""
    if type(param) is not np.ndarray or len(state) != FORMULAS[rule][0]:
        return False
    dtype, shape = param.dtype, param.shape
    return dtype in _FLOATS and all(
        type(a) is np.ndarray and a.dtype == dtype and a.shape == shape and a.flags.c_contiguous
        for a in (param, grad, *state)
    )


def _check_fit(who: str, rule: int, param: Any, grad: Any, state: Sequence[Any]) -> None:
    shape, count = tuple(param.shape), FORMULAS[rule][0]
    fits = [family(type(s)) == family(type(param)) and s.dtype == param.dtype for s in state]
    if len(state) != count or not all(fits) or any(tuple(s.shape) != shape for s in state):
        got = [f"{s.dtype}{tuple(s.shape)}" for s in state]
        raise UsageError(
            f"{who}: expected {count} state arrays {param.dtype}{shape} as init(param) makes "
            f"them, got {got}"
        )
    if family(type(grad)) != family(type(param)) or not hasattr(grad, "dtype"):
        cls = type(grad)
        raise UsageError(
            f"{who}: expected a gradient of the parameter's library, got "
            f"{cls.__module__}.{cls.__qualname__}"
        )
    floating = grad.dtype.kind == "f" or grad.dtype.name == "bfloat16"
    if tuple(grad.shape) != shape or not floating:
        raise UsageError(
            f"{who}: expected a floating-point gradient of shape {shape}, got "
            f"{grad.dtype}{tuple(grad.shape)}"
        )


def _flat(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """One-dimensional views where all are contiguous in C order, else the arrays."""
    if all(a.flags.c_contiguous for a in arrays):
        return tuple(a.reshape(-1) for a in arrays)
    return tuple(arrays)


def _blocks(arrays: Sequence[Any], limit: int) -> Iterator[tuple[Any, ...]]:
    """Cut along the first axis into views of about `limit` elements."""
    length, size = len(arrays[0]), arrays[0].size
    if size == 0:
        return
    rows = max(1, limit * length // size)
    for at in range(0, length, rows):
        yield tuple(a[at : at + rows] for a in arrays)


# In each: p and the state change, g is only read and may be t itself, t and u are free.
# The order of the operations is that of mpiml/native/update_kernels.cpp.


def _sgd(xp: Any, c: Coefficients, p: Any, g: Any, state: list[Any], t: Any, u: Any) -> None:
    xp.multiply(g, c.rate, out=u)
    xp.subtract(p, u, out=p)


def _momentum(
    xp: Any, c: Coefficients, p: Any, g: Any, state: list[Any], t: Any, u: Any
) -> None:
    (mean,) = state
    xp.multiply(mean, c.keep1, out=mean)
    xp.add(mean, g, out=mean)
    ahead = mean
    if c.nesterov:
        xp.multiply(mean, c.keep1, out=u)
        ahead = xp.add(g, u, out=u)
    xp.multiply(ahead, c.rate, out=u)
    xp.subtract(p, u, out=p)


def _adagrad(
    xp: Any, c: Coefficients, p: Any, g: Any, state: list[Any], t: Any, u: Any
) -> None:
    (square,) = state
    xp.multiply(g, g, out=u)
    xp.add(square, u, out=square)
    xp.sqrt(square, out=u)
    xp.add(u, c.eps, out=u)
    xp.multiply(g, c.rate, out=t)
    xp.divide(t, u, out=t)
    xp.subtract(p, t, out=p)


def _adam(xp: Any, c: Coefficients, p: Any, g: Any, state: list[Any], t: Any, u: Any) -> None:
    mean, square = state
    xp.multiply(mean, c.keep1, out=mean)
    xp.multiply(g, c.add1, out=u)
    xp.add(mean, u, out=mean)
    xp.multiply(square, c.keep2, out=square)
    xp.multiply(g, c.add2, out=u)
    xp.multiply(u, g, out=u)
    xp.add(square, u, out=square)
    xp.sqrt(square, out=u)
    xp.multiply(u, c.scale, out=u)
    xp.add(u, c.eps, out=u)
    xp.multiply(mean, c.rate, out=t)
    xp.divide(t, u, out=t)
    if c.shrink != 1.0:
        xp.multiply(p, c.shrink, out=p)
    xp.subtract(p, t, out=p)


#: for each rule the number of its state arrays and its formula
FORMULAS = ((0, _sgd), (1, _momentum), (1, _adagrad), (2, _adam))
