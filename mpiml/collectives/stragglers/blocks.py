"""The arrays of a tree in one block of memory, as a message carries them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.collectives.regions import Regions, specs_of
from mpiml.collectives.stragglers.combining import numpy_array
from mpiml.collectives.trees import flatten, unflatten, unlike
from mpiml.errors import UsageError

__all__ = ["Blocks"]


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
            numpy_array(leaf, f"{where}{path}")
        self._regions = Regions(specs_of(leaves, self._paths))
        self.dtypes = tuple([leaf.dtype for leaf in leaves])
        self.nbytes = self._regions.nbytes
        self.text = self._regions.digest_text()

    def empty(self) -> NDArray[np.uint8]:
        """Return a new block, (nbytes,)."""
        return np.empty(self.nbytes, np.uint8)

    def tree(self, block: Any) -> Any:
        """Return the arrays in a block, as views, in their structure."""
        memory = np.frombuffer(block, np.uint8) if self.nbytes else np.empty(0, np.uint8)
        return unflatten(self._treedef, self._regions.views(memory))

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
        for leaf, path, own in zip(
            leaves, self._paths, self._regions.views(block), strict=True
        ):
            array = numpy_array(leaf, f"{where}{path}")
            if array.shape != own.shape or array.dtype != own.dtype:
                raise UsageError(
                    f"{where}{path}: expected an array of shape {own.shape} and dtype {own.dtype}, "
                    f"as given at construction, got shape {array.shape}, dtype {array.dtype}"
                )
            own[...] = array
