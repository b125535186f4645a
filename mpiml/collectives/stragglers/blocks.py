"""The arrays of a tree one after another in one block of memory, as a message carries them."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.regions import specs_of
from mpiml.collectives.trees import flatten, unflatten, unlike
from mpiml.errors import UsageError

__all__ = ["Blocks"]

_ALIGN: Final = 64  # bytes: each array starts on a cache line of the block


class Blocks:
    """Puts trees that are alike into blocks of memory, and shows blocks as trees.

    Local: no MPI.

    Parameters
    ----------
    like : tree of ndarrays
        Structure, shapes and dtypes. Its values do not matter.
    where : str
        Opens messages.

    Attributes
    ----------
    nbytes : int
        Of a block.
    text : str
        What members compare: a line for each array.
    dtypes : tuple of numpy.dtype
        Of the arrays.

    Raises
    ------
    UsageError
        A leaf is no NumPy array of numbers.
    """

    def __init__(self, like: Any, where: str) -> None:
        leaves, self._treedef, self._paths = flatten(like, where)
        for leaf, path in zip(leaves, self._paths, strict=True):
            _numpy(leaf, f"{where}{path}")
        self._shapes = [leaf.shape for leaf in leaves]
        self.dtypes = tuple([leaf.dtype for leaf in leaves])
        self._at: list[tuple[int, int]] = []
        end = 0
        for leaf in leaves:
            start = -(-end // _ALIGN) * _ALIGN
            end = start + leaf.nbytes
            self._at.append((start, end))
        self.nbytes = end
        self.text = "\n".join([leaf.text() for leaf in specs_of(leaves, self._paths)])

    def empty(self) -> NDArray[np.uint8]:
        """Return a new block, (nbytes,)."""
        return np.empty(self.nbytes, np.uint8)

    def tree(self, block: Any) -> Any:
        """Return the arrays in a block, as views, in their structure."""
        memory = np.frombuffer(block, np.uint8) if self.nbytes else np.empty(0, np.uint8)
        parts = zip(self._at, self.dtypes, self._shapes, strict=True)
        return unflatten(
            self._treedef,
            [
                memory[start:end].view(dtype).reshape(shape)
                for (start, end), dtype, shape in parts
            ],
        )

    def fill(self, tree: Any, block: NDArray[np.uint8], where: str) -> None:
        """Copy the arrays of a tree into a block.

        Raises
        ------
        UsageError
            The tree is not like that given at construction; names the leaf.
        """
        leaves, treedef, _ = flatten(tree, where)
        if treedef != self._treedef:
            raise UsageError(
                f"{where}: expected a tree like that given at construction, "
                f"{unlike(self._treedef, treedef)}"
            )
        parts = zip(leaves, self._paths, self._at, self.dtypes, self._shapes, strict=True)
        for leaf, path, (start, end), dtype, shape in parts:
            array = _numpy(leaf, f"{where}{path}")
            if array.shape != shape or array.dtype != dtype:
                raise UsageError(
                    f"{where}{path}: expected an array of shape {shape} and dtype {dtype}, as given "
                    f"at construction, got shape {array.shape}, dtype {array.dtype}"
                )
            block[start:end].view(dtype).reshape(shape)[...] = array


def _numpy(leaf: Any, where: str) -> NDArray[Any]:
    if not isinstance(leaf, np.ndarray | np.generic):
        raise UsageError(
            f"{where}: expected a NumPy array, got {type(leaf).__module__}."
            f"{type(leaf).__qualname__}. Copy it to the host first."
        )
    return np.asarray(leaf)
