"""A tree of arrays taken apart into one block of memory for messages, and put together again."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpiml.collectives.ops import COMPLEX, FLOATS, numpy_dtype
from mpiml.collectives.regions import Leaf, Regions, specs_of
from mpiml.collectives.trees import flatten, to_numpy, unflatten, unlike
from mpiml.errors import UsageError
from mpiml.libraries import family

__all__ = ["Layout", "Leaves"]


_LAYOUTS: Final = 256  # layouts that are kept
_layouts: dict[Any, "Layout"] = {}


class Layout:
    """What all trees have in common whose structure, shapes and dtypes are the same.

    Local: no MPI. Equal trees have the same object, mostly.

    Attributes
    ----------
    specs : list of Leaf
        Path, shape and dtype of each array.
    text : str
        What members compare: a line for each array.
    regions : Regions or None
        Where arrays lie in a block; None: there is one.
    dtype : numpy.dtype
        Of the first.
    nbytes : int
        Of the block.
    """

    __slots__ = ("dtype", "nbytes", "regions", "specs", "text")

    def __init__(self, specs: list[Leaf], where: str) -> None:
        for spec in specs:
            if spec.dtype_name not in FLOATS | COMPLEX:
                raise UsageError(
                    f"{where}{f': leaf {spec.path}' if spec.path else ''}: expected "
                    f"floating-point or complex numbers, got {spec.dtype_name}: averages of "
                    "whole numbers are none. Convert it with x.astype(float)."
                )
        self.specs = specs
        self.text = "\n".join([spec.text() for spec in specs])
        self.regions = Regions(specs) if len(specs) > 1 else None
        self.dtype = numpy_dtype(specs[0].dtype_name)
        one = math.prod(specs[0].shape) * self.dtype.itemsize
        self.nbytes: int = one if self.regions is None else self.regions.nbytes


def _layout_of(key: Any, found: Sequence[Any], paths: Sequence[str], where: str) -> Layout:
    """Return the layout of arrays, made once where `key` can be looked up."""
    try:
        known = _layouts.get(key)
    except TypeError:  # a registered class holds what cannot be hashed
        return Layout(specs_of(found, paths), where)
    if known is None:
        known = Layout(specs_of(found, paths), where)
        if len(_layouts) >= _LAYOUTS:
            _layouts.clear()
        _layouts[key] = known
    return known


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
    layout : Layout
        Of the block.
    nbytes : int
        Of the block.
    apart : bool
        Whether it is known that results lie apart from what is given.
    """

    __slots__ = (
        "_back",
        "_host",
        "_one",
        "_out",
        "_outs",
        "_treedef",
        "apart",
        "layout",
        "nbytes",
    )

    def __init__(self, x: Any, out: Any, where: str) -> None:
        self._back: list[Callable[[Any], Any]] | None = None  # None: results are as they are
        taken: Any = None  # what `flatten` has returned, if it was called
        if type(x) is np.ndarray:
            key: Any = (x.dtype, x.shape)
            layout = _layouts.get(key)
            if layout is None:
                taken = found, _, paths = flatten(x, where)  # checks it
                layout = _layout_of(key, found, paths, where)
            self._host: list[Any] = [x if x.flags.c_contiguous else np.asarray(x, order="C")]
        else:
            taken = found, self._treedef, paths = flatten(x, where)
            parts = tuple([(type(leaf), leaf.dtype, leaf.shape) for leaf in found])
            layout = _layout_of((self._treedef, parts), found, paths, where)
            both = [to_numpy(*one, where) for one in zip(found, layout.specs, strict=True)]
            self._host = [array for array, _ in both]
            self._back = [back for _, back in both]
        self.layout, self.nbytes = layout, layout.nbytes
        self._one: Any = self._host[0] if layout.regions is None else None
        self._out, self._outs, self.apart = out, None, out is None
        if out is not None:
            plain = self._back is None and type(out) is np.ndarray and out.flags.writeable
            fits = plain and out.dtype == x.dtype and out.shape == x.shape
            self.apart = fits and not np.may_share_memory(out, x)
            self._outs = [out] if fits else _targets(out, taken or flatten(x, where), where)

    def copy_to(self, memory: Any) -> None:
        """Write the arrays into a block of `nbytes` bytes."""
        for view, array in zip(self._views(memory), self._host, strict=True):
            np.copyto(view, array)

    def scratch(self) -> Any:
        """Return a new block with the arrays."""
        memory = np.empty(self.nbytes, np.uint8)
        self.copy_to(memory)
        return memory

    def content(self) -> Any:
        """Return the bytes of the block in contiguous memory, perhaps that of the array."""
        if self._one is None:
            return self.scratch()
        return self._one.ravel().view(np.uint8)

    def flat(self, memory: Any) -> list[Any]:
        """Return the numbers of a block, those of one dtype together: (n,) each."""
        layout = self.layout
        if layout.regions is not None:
            return layout.regions.flat(memory)
        if not self.nbytes:
            return [np.empty(0, layout.dtype)]
        return [np.frombuffer(memory, layout.dtype)]

    def own(self) -> list[Any] | None:
        """Return the arrays as `flat` would, where no copy is needed for that."""
        one = self._one
        if one is None:
            return None
        for target in () if self.apart else self._outs or ():
            if target is one or not isinstance(target, np.ndarray):
                continue
            moved = np.may_share_memory(target, one)
            if moved and target.ctypes.data != one.ctypes.data:
                return None
        return [one.ravel()]

    def result(self) -> Any:
        """Return memory for the results: the user's own array, or new."""
        if self._one is None:
            return np.empty(self.nbytes, np.uint8)
        if self._outs is not None:
            target = self._outs[0]
            if type(target) is np.ndarray and target.flags.c_contiguous:
                return target
        return np.empty(self._one.shape, self.layout.dtype)

    def parts(self, result: Any) -> list[Any]:
        """Return the numbers of what `result` has returned as `flat` would."""
        return [result.ravel()] if self._one is not None else self.flat(result)

    def finish(self, result: Any) -> Any:
        """Return the results as the user is to have them."""
        if self._back is None:  # one of NumPy
            if self._outs is None:
                return result
            _store(self._outs[0], lambda result: result, result)
            return self._out
        views = self._views(result) if self._one is None else [result]
        if self._outs is None:
            made = [back(view) for back, view in zip(self._back, views, strict=True)]
            return unflatten(self._treedef, made)
        for target, back, view in zip(self._outs, self._back, views, strict=True):
            _store(target, back, view)
        return self._out

    def _views(self, memory: Any) -> Sequence[Any]:
        regions = self.layout.regions
        if regions is not None:
            return regions.views(memory)
        return [memory.view(self.layout.dtype).reshape(self._one.shape)]


def _targets(out: Any, taken: Any, where: str) -> list[Any]:
    """Return the arrays of `out`, checked against what `flatten` has returned of `x`."""
    targets, structure, paths = flatten(out, f"{where}: out")
    leaves, expected, _ = taken
    if structure != expected:
        raise UsageError(f"{where}: out: expected a tree like x, {unlike(expected, structure)}")
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
    if target is result:
        return
    kind = family(type(target))
    if kind is None:
        if target.ctypes.data != result.ctypes.data or target.strides != result.strides:
            np.copyto(target, result)
    elif kind == "torch":
        target.detach().copy_(back(result).detach())
    else:
        target[...] = back(result)
