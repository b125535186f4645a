"""Trees of arrays that are alike, and their sums and combinations."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.ops import dtype_name, op_code
from mpiml.collectives.trees import flatten, unflatten, unlike
from mpiml.errors import UsageError

__all__ = ["Trees", "numpy_array"]

_BLOCK: Final = 1 << 14  # elements combined while they are in the cache
_WORK: Final = {  # dtypes whose combinations make sense, and what they are computed in
    "float32": np.dtype(np.float64),
    "float64": np.dtype(np.float64),
    "complex64": np.dtype(np.complex128),
    "complex128": np.dtype(np.complex128),
}


class Trees:
    """Trees of NumPy arrays of the same structure, shapes and dtypes.

    Parameters
    ----------
    trees : mapping of int to tree of ndarrays
        One at least. Not changed.
    owner : str
        How a message calls the keys: "worker".
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        A leaf is no NumPy array of a dtype that can be summed, or two trees differ; names the
        leaf and both owners.
    """

    def __init__(self, trees: Mapping[int, Any], owner: str, where: str) -> None:
        self._where = where
        self._leaves: dict[int, list[NDArray[Any]]] = {}
        first = min(trees)
        for key in sorted(trees):
            leaves, treedef, paths = flatten(trees[key], f"{where}: {owner} {key}")
            arrays = [
                _array(leaf, f"{where}: {owner} {key}{_leaf(path)}")
                for leaf, path in zip(leaves, paths, strict=True)
            ]
            if key == first:
                self._treedef, self._paths, like = treedef, paths, arrays
            elif treedef != self._treedef:
                raise UsageError(
                    f"{where}: expected a tree like that of {owner} {first}, "
                    f"{unlike(self._treedef, treedef)}, of {owner} {key}. All have the same structure."
                )
            for path, old, new in zip(paths, like, arrays, strict=True):
                if (old.shape, old.dtype) != (new.shape, new.dtype):
                    raise UsageError(
                        f"{where}{_leaf(path)}: expected {_kind(old)} like that of {owner} "
                        f"{first}, got {_kind(new)} of {owner} {key}. All have the same shapes "
                        f"and dtypes."
                    )
            self._leaves[key] = arrays

    def total(self, keys: Sequence[int]) -> Any:
        """Return the sum, added in the order of the keys, in the dtype of the leaves."""
        first, *others = (self._leaves[key] for key in keys)
        totals = [leaf.copy() for leaf in first]
        for leaves in others:
            for total, leaf in zip(totals, leaves, strict=True):
                np.add(total, leaf, out=total)
        return unflatten(self._treedef, totals)

    def combined(self, coefficients: Mapping[int, float]) -> Any:
        """Return the sum of each tree times its coefficient.

        Computed in float64 or complex128, in the order of the coefficients, and rounded once.

        Raises
        ------
        UsageError
            A leaf is of whole numbers, or of fewer than 32 bits.
        """
        results = []
        for k, path in enumerate(self._paths):
            arrays = [self._leaves[key][k] for key in coefficients]
            name = dtype_name(arrays[0])
            if name not in _WORK:
                raise UsageError(
                    f"{self._where}{_leaf(path)}: expected one of the dtypes {', '.join(_WORK)}, "
                    f"got {name}: this code multiplies with fractions, whose rounding errors "
                    f"grow. Convert the array, or use FractionalRepetition, which only adds."
                )
            results.append(_combination(arrays, list(coefficients.values()), _WORK[name]))
        return unflatten(self._treedef, results)


def _combination(
    arrays: Sequence[NDArray[Any]], coefficients: Sequence[float], work: "np.dtype[Any]"
) -> NDArray[Any]:
    result = np.empty(arrays[0].shape, arrays[0].dtype)
    flat = [array.reshape(-1) for array in arrays]
    size = result.size
    total, term = np.empty((2, min(size, _BLOCK)), work)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        total, term = total[: stop - start], term[: stop - start]
        np.multiply(flat[0][start:stop], coefficients[0], out=total, dtype=work)
        for array, coefficient in zip(flat[1:], coefficients[1:], strict=True):
            np.multiply(array[start:stop], coefficient, out=term, dtype=work)
            np.add(total, term, out=total)
        result.reshape(-1)[start:stop] = total
    return result


def numpy_array(leaf: Any, where: str) -> NDArray[Any]:
    """Return a leaf as an array, of a NumPy scalar too. Local.

    Raises
    ------
    UsageError
        It is of another library.
    """
    if not isinstance(leaf, np.ndarray | np.generic):
        raise UsageError(
            f"{where}: expected a NumPy array, got {type(leaf).__module__}."
            f"{type(leaf).__qualname__}. Copy it to the host first."
        )
    return np.asarray(leaf)


def _array(leaf: Any, where: str) -> NDArray[Any]:
    array = numpy_array(leaf, where)
    op_code("sum", dtype_name(array), where)
    return array


def _leaf(path: str) -> str:
    return f": leaf {path}" if path else ""


def _kind(array: NDArray[Any]) -> str:
    return f"shape {array.shape} of {array.dtype.name}"
