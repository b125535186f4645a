"""The arrays of one-sided memory: what members agree on, and how a call names a leaf.

Pure but for `agreed_layout`, which compares the members' trees.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optree

from mpiml.collectives.alike import agree_on
from mpiml.collectives.device.arrays import on_device
from mpiml.collectives.labels import Label
from mpiml.collectives.regions import Regions, specs_of
from mpiml.collectives.team import Team
from mpiml.collectives.trees import flatten, host_array, unlike
from mpiml.errors import UsageError

__all__ = [
    "Layout",
    "agreed_layout",
    "elements_of",
    "flat_indices",
    "leaves_like",
    "scale_for",
    "values_for",
]

_REAL = ("float32", "float64")
_SAME = "Build the tree the same way on every member."


class Layout(NamedTuple):
    """The arrays of a tree, and how they are named."""

    regions: Regions
    treedef: Any
    places: dict[Any, int]  #: what a call may say -> the number of the leaf

    def number(self, name: Any, where: str) -> int:
        """Return the number of the leaf that a call names.

        Parameters
        ----------
        name
            A key of the tree, as in ``model["w"]``; a tuple of keys for an inner leaf;
            None for a tree that is one array.
        where : str
            Opens the message of an error.

        Raises
        ------
        UsageError
            There is no such leaf.
        """
        try:
            return self.places[name]
        except (KeyError, TypeError):
            known = ", ".join([repr(place) for place in self.places][:20])
            raise UsageError(
                f"{where}: expected the name of an array, one of {known}, got {name!r}"
            ) from None


def agreed_layout(
    team: Team, where: str, like: Any, more: str, name: str | None
) -> tuple[Layout, Label]:
    """Return the layout of a tree, once all members have the same. Collective over the members.

    Parameters
    ----------
    team : Team
        The members.
    where : str
        The class that is made.
    like : array or tree of arrays
        float32 or float64: what processors and MPI can add to atomically.
    more : str
        Arguments to compare.
    name : str or None
        What the user calls it.

    Raises
    ------
    UsageError
        The trees differ, or a leaf is of another dtype. On all members.
    """
    caught: UsageError | None = None
    said, layout = "", None
    try:
        layout = _layout(where, like)
        said = layout.regions.digest_text()
    except UsageError as error:  # the others must hear of it
        caught = error
    label = Label(where, name=name, leaves=said, more=more)
    agree_on(team, where, label.head, caught, "arguments and arrays", _SAME, label, said)
    assert layout is not None
    return layout, label


def _layout(where: str, like: Any) -> Layout:
    leaves, treedef, paths = flatten(like, where)
    regions = Regions(specs_of(leaves, paths))
    if not regions.leaves:
        raise UsageError(f"{where}: like: expected a tree with at least one array, got none")
    for leaf in regions.leaves:
        if leaf.dtype_name not in _REAL:
            raise UsageError(
                f"{where}: leaf {leaf.path or 'x'}: expected float32 or float64, got "
                f"{leaf.dtype_name}: there is no atomic addition of it. Keep a copy in another "
                "dtype beside it."
            )
    if any(on_device(leaf) for leaf in leaves):
        raise UsageError(
            f"{where}: expected arrays in host memory, got arrays on a device. Pass "
            "numpy.zeros_like of them, and copy to the device what is read."
        )
    return Layout(regions, treedef, _places(treedef))


def _places(treedef: Any) -> dict[Any, int]:
    places: dict[Any, int] = {}
    for number, path in enumerate(optree.treespec_paths(treedef)):
        places[tuple(path)] = number
        if len(path) == 1:
            places[path[0]] = number
        elif not path:
            places[None] = number
    return places


def flat_indices(
    indices: Any, shape: tuple[int, ...], where: str
) -> tuple["np.ndarray[Any, Any]", tuple[int, ...]]:
    """Return positions in the flat array that ``array[indices]`` means, and their shape.

    Local. As in NumPy: a tuple is one index for each axis, anything else indexes the first
    axis, so that a table's rows are named by their numbers. Negative ones count from the end.

    Parameters
    ----------
    indices : array of integers or tuple of such
        What is indexed.
    shape : tuple of int
        Of the array.
    where : str
        Opens the message of an error.

    Returns
    -------
    positions : numpy.ndarray
        (n,) int64, or int32 as they came.
    shape : tuple of int
        That values must have, or broadcast to.

    Raises
    ------
    UsageError
        They are no integers, or outside of the array, or too many.
    """
    axes = indices if isinstance(indices, tuple) else (indices,)
    if not axes:  # array[()] is all of it
        return np.arange(math.prod(shape), dtype=np.int64), shape
    found = [_integers(axis, where) for axis in axes]
    if len(found) > len(shape):
        raise UsageError(
            f"{where}: indices: expected at most {len(shape)}, one for each axis, got "
            f"{len(found)}"
        )
    if len(shape) == 1 and found[0].ndim == 1:
        flat = found[0]
        if flat.size and flat.min() >= 0 and flat.max() < shape[0]:
            return np.ascontiguousarray(flat), flat.shape
    for axis, (index, length) in enumerate(zip(found, shape, strict=False)):
        if index.size and (index.min() < -length or index.max() >= length):
            raise UsageError(
                f"{where}: indices: expected {-length} to {length - 1} for axis {axis}, got "
                f"{index.min()} to {index.max()}"
            )
    try:
        whole = np.broadcast_arrays(*found)
    except ValueError as error:
        raise UsageError(f"{where}: indices: {error}") from None
    wrapped = [
        np.where(index < 0, index + length, index).astype(np.int64)
        for index, length in zip(whole, shape, strict=False)
    ]
    inner = shape[len(wrapped) :]
    step = math.prod(inner)
    first = np.zeros(wrapped[0].shape, np.int64)
    for index, length in zip(wrapped, shape, strict=False):
        first = first * length + index
    positions = first[..., None] * step + np.arange(step, dtype=np.int64)
    return positions.reshape(-1), (*first.shape, *inner)


def _integers(index: Any, where: str) -> "np.ndarray[Any, Any]":
    array = host_array(index)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise UsageError(
            f"{where}: indices: expected integers, got {array.dtype}. Slices and masks: "
            "numpy.arange(n)[slice], numpy.flatnonzero(mask)."
        )
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)


def elements_of(
    view: "np.ndarray[Any, Any]", indices: Any, values: Any, where: str
) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Return flat positions in an array, as for `flat_indices`, and a value for each. Local.

    Raises
    ------
    UsageError
        They do not fit the array, or each other.
    """
    positions, shape = flat_indices(indices, view.shape, where)
    return positions, values_for(values, view.dtype, shape, f"{where}: values").reshape(-1)


def values_for(
    values: Any, dtype: "np.dtype[Any]", shape: Sequence[int], where: str
) -> "np.ndarray[Any, Any]":
    """Return values as a contiguous array of a leaf's dtype. Local.

    Raises
    ------
    UsageError
        They do not broadcast to `shape`.
    """
    array = host_array(values)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{where}: expected real numbers, got {array.dtype}")
    if array.shape != tuple(shape):
        try:
            array = np.broadcast_to(array, tuple(shape))
        except ValueError:
            raise UsageError(
                f"{where}: expected the shape {tuple(shape)}, got {array.shape}"
            ) from None
    return np.ascontiguousarray(array, dtype)


def scale_for(scale: Any, where: str) -> float:
    """Return what an update is multiplied with, a Python number. Local.

    Raises
    ------
    UsageError
        It is no real number.
    """
    try:
        if not isinstance(scale, str | bytes):
            return float(scale)
    except (TypeError, ValueError):
        pass
    shown = repr(scale)
    shown = shown if len(shown) <= 60 else f"a {type(scale).__name__}"
    raise UsageError(
        f"{where}: scale: expected a real number, by which all is multiplied, got {shown}"
    )


def leaves_like(
    tree: Any, treedef: Any, like: "Sequence[np.ndarray[Any, Any]]", where: str
) -> "list[np.ndarray[Any, Any]]":
    """Return the leaves of a tree, contiguous and of the dtypes of others. Local.

    Parameters
    ----------
    tree : array or tree of arrays
        Of any library, in host memory.
    treedef, like
        The structure that is expected, and the arrays in it.
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        It has another structure, or other shapes.
    """
    leaves, found, paths = flatten(tree, where)
    if found != treedef:
        raise UsageError(f"{where}: expected a tree like {unlike(treedef, found)}")
    return [
        values_for(leaf, own.dtype, own.shape, f"{where}: leaf {path}" if path else where)
        for leaf, own, path in zip(leaves, like, paths, strict=True)
    ]
