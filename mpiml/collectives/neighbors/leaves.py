"""A tree of arrays taken apart into one block of memory for messages, and put together again."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiml import arrays
from mpiml.collectives.ops import COMPLEX, FLOATS, numpy_dtype
from mpiml.collectives.regions import Regions, specs_of
from mpiml.collectives.trees import flatten, unflatten
from mpiml.errors import UsageError
from mpiml.libraries import family

__all__ = ["Leaves"]


class Leaves:
    """The arrays of one call.

    Local: no MPI.

    Parameters
    ----------
    x : array or tree of arrays
        What the user gave: floating-point or complex numbers, of any library.
    out : array or tree of arrays, optional
        Where results go.
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        A leaf is no such array, or `out` is not like `x`.

    Attributes
    ----------
    nbytes : int
        Of the block.
    text : str
        What members compare: a line for each array.
    """

    def __init__(self, x: Any, out: Any, where: str) -> None:
        found, self._treedef, paths = flatten(x, where)
        specs = specs_of(found, paths)
        for spec in specs:
            if spec.dtype_name not in FLOATS | COMPLEX:
                raise UsageError(
                    f"{where}{f': leaf {spec.path}' if spec.path else ''}: expected "
                    f"floating-point or complex numbers, got {spec.dtype_name}: averages of "
                    "whole numbers are none. Convert it with x.astype(float)."
                )
        self.text = "\n".join([spec.text() for spec in specs])
        self._out, self._outs = out, None if out is None else _targets(out, x, where)
        self._host: list[Any] = []
        self._back: list[Callable[[Any], Any]] = []
        for leaf, spec in zip(found, specs, strict=True):
            array, back = _to_numpy(leaf, spec, where)
            self._host.append(array)
            self._back.append(back)
        self._one: Any = self._host[0] if len(self._host) == 1 else None
        self._regions = Regions(specs) if len(specs) > 1 else None
        self.nbytes: int = (self._host[0] if self._regions is None else self._regions).nbytes

    def copy_to(self, memory: Any) -> None:
        """Write the arrays into a block of `nbytes` bytes."""
        for view, array in zip(self._views(memory), self._host, strict=True):
            np.copyto(view, array)

    def scratch(self) -> Any:
        """Return a new block with the arrays."""
        memory = np.empty(self.nbytes, np.uint8)
        self.copy_to(memory)
        return memory

    def flat(self, memory: Any) -> list[Any]:
        """Return the numbers of a block, those of one dtype together: (n,) each."""
        if self._regions is None:
            return [memory.view(self._one.dtype)]
        return [
            memory[r.offset : r.offset + r.nbytes].view(numpy_dtype(r.dtype_name))
            for r in self._regions.regions
        ]

    def own(self) -> list[Any] | None:
        """Return the arrays as `flat` would, where no copy is needed for that."""
        if self._one is None:
            return None
        for target in self._outs or ():
            moved = isinstance(target, np.ndarray) and np.may_share_memory(target, self._one)
            if moved and target.ctypes.data != self._one.ctypes.data:
                return None
        return [self._one.reshape(-1)]

    def result(self) -> Any:
        """Return a block for the results: the user's own array, or a new one."""
        if self._one is not None and self._outs is not None:
            target = self._outs[0]
            if type(target) is np.ndarray and target.flags.c_contiguous:
                return target.reshape(-1).view(np.uint8)
        return np.empty(self.nbytes, np.uint8)

    def finish(self, memory: Any) -> Any:
        """Return the results that are in a block, as the user is to have them."""
        views = self._views(memory)
        if self._outs is None:
            made = [back(view) for back, view in zip(self._back, views, strict=True)]
            return unflatten(self._treedef, made)
        for target, back, view in zip(self._outs, self._back, views, strict=True):
            _store(target, back, view)
        return self._out

    def _views(self, memory: Any) -> Sequence[Any]:
        if self._regions is not None:
            return self._regions.views(memory)
        return [memory.view(self._one.dtype).reshape(self._one.shape)]


def _to_numpy(leaf: Any, spec: Any, where: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return a leaf as a NumPy array in C order, and what makes such an array a leaf."""
    kind = family(type(leaf))
    if kind is None:
        array = np.asarray(leaf, order="C")
        if isinstance(leaf, np.ndarray):
            return array, lambda result: result
        return array, lambda result: result[()]  # a NumPy scalar
    exported = arrays.to_host(leaf)
    if exported is None:
        raise UsageError(f"{where}: leaf {spec.path}: expected a dense array, got {leaf!r}")
    host, more, _ = exported
    flat = np.asarray(host, order="C").reshape(-1).view(np.uint8)
    array = flat.view(numpy_dtype(spec.dtype_name)).reshape(spec.shape)
    known: str = kind

    def back(result: Any) -> Any:
        plain = result.reshape(-1).view(np.uint8) if known == "torch" else result
        return arrays.restore(known, plain, more)

    return array, back


def _targets(out: Any, x: Any, where: str) -> list[Any]:
    """Return the arrays of `out`, checked against those of `x`."""
    targets, structure, paths = flatten(out, f"{where}: out")
    leaves, expected, _ = flatten(x, where)
    if structure != expected:
        raise UsageError(f"{where}: out: expected a tree like x, {expected}, got {structure}")
    for target, leaf, path in zip(targets, leaves, paths, strict=True):
        kind = family(type(target))
        same = kind == family(type(leaf)) and isinstance(leaf, np.ndarray | type(target))
        fits = same and target.dtype == leaf.dtype and tuple(target.shape) == tuple(leaf.shape)
        fixed = kind == "jax" or (kind is None and not _writable(target))
        if not fits or fixed:
            raise UsageError(
                f"{where}: out{path}: expected an array that can be written, of "
                f"{type(leaf).__name__}, shape {tuple(leaf.shape)} and dtype {leaf.dtype}, got "
                f"{type(target).__name__}, shape {tuple(target.shape)}, dtype {target.dtype}"
                f"{', which cannot be written' if fixed else ''}"
            )
    return targets


def _writable(target: Any) -> bool:
    return isinstance(target, np.ndarray) and target.flags.writeable


def _store(target: Any, back: Callable[[Any], Any], result: Any) -> None:
    kind = family(type(target))
    if kind is None:
        if target.ctypes.data != result.ctypes.data or target.strides != result.strides:
            np.copyto(target, result)
    elif kind == "torch":
        target.detach().copy_(back(result).detach())
    else:
        target[...] = back(result)
