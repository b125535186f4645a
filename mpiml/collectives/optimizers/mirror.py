"""Where parameters lie so that each stands at the place of its gradient.

Pure: no memory is taken here. A gradient may be of lower precision than its parameter, so
the two take different room; what is equal is the number of the element. Hence a stripe of
gradients and the same stripe of the parameters belong together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiml.collectives.regions import Leaf, Region, Regions
from mpiml.errors import UsageError

__all__ = ["Mirror", "mirror_of"]

LOW = ("float16", "bfloat16")  #: of gradients whose parameter may be float32 or float64
FULL = ("float32", "float64")  #: of parameters, and of all that optimizers keep


class Mirror:
    """The layout of arrays that stand element by element beside those of another layout.

    Local: no MPI.

    Parameters
    ----------
    regions : Regions
        The other layout.
    names : sequence of str
        The dtype here, for each of its regions.
    """

    def __init__(self, regions: Regions, names: Sequence[str]) -> None:
        self._regions = regions
        self._dtypes = [np.dtype(name) for name in names]
        self._starts: list[int] = []
        end = 0
        for region, dtype in zip(regions.regions, self._dtypes, strict=True):
            self._starts.append(end)
            end += region.count * dtype.itemsize
        self.nbytes = end  #: of the block
        self.leaves = regions.leaves
        self._where = {r.dtype_name: i for i, r in enumerate(regions.regions)}

    def views(self, memory: Any) -> list["np.ndarray[Any, Any]"]:
        """Return the leaves as arrays in `memory`, in the order of the tree."""
        views = []
        for number in range(len(self.leaves)):
            offset, shape, name = self._regions.leaf(number)
            i = self._where[name]
            region, dtype = self._regions.regions[i], self._dtypes[i]
            element = (offset - region.offset) // region.itemsize
            at = self._starts[i] + element * dtype.itemsize
            views.append(np.ndarray(shape, dtype, memory, at))
        return views

    def flat(self, memory: Any) -> list["np.ndarray[Any, Any]"]:
        """Return each region as one array of shape (count,) in `memory`."""
        return [
            np.ndarray((region.count,), dtype, memory, start)
            for region, dtype, start in zip(
                self._regions.regions, self._dtypes, self._starts, strict=True
            )
        ]


def mirror_of(regions: Regions, parameters: Sequence[Leaf], where: str) -> Mirror:
    """Return the layout of parameters beside that of their gradients.

    Local: no MPI.

    Parameters
    ----------
    regions : Regions
        Of the gradients.
    parameters : sequence of Leaf
        In the order of the gradients' leaves.
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        A parameter has no gradient of its name and shape, or the dtypes do not go together.
    """
    for i in range(max(len(parameters), len(regions.leaves))):
        parameter, gradient = _at(parameters, i), _at(regions.leaves, i)
        if parameter is None or gradient is None or parameter[:2] != gradient[:2]:
            raise UsageError(
                f"{where}: expected gradients in the structure and shapes of the parameters; "
                f"leaf {i} is {_text(parameter)} of the parameters and {_text(gradient)} of the "
                "gradients. Make the bucket like the parameters."
            )
    return Mirror(
        regions, [_dtype(region, parameters, regions, where) for region in regions.regions]
    )


def _at(leaves: Sequence[Leaf], i: int) -> Leaf | None:
    return leaves[i] if i < len(leaves) else None


def _text(leaf: Leaf | None) -> str:
    return "none" if leaf is None else leaf.text()


def _dtype(region: Region, parameters: Sequence[Leaf], regions: Regions, where: str) -> str:
    """Return the one dtype of all parameters whose gradients lie in a region."""
    found: dict[str, Leaf] = {}
    for parameter, gradient in zip(parameters, regions.leaves, strict=True):
        if gradient.dtype_name == region.dtype_name:
            found.setdefault(parameter.dtype_name, parameter)
    for name, leaf in found.items():
        if name not in FULL or region.dtype_name not in (name, *LOW):
            raise UsageError(
                f"{where}: expected float32 or float64 parameters with gradients of the same "
                f"dtype, float16 or bfloat16; parameter {leaf.text()} has a gradient of "
                f"{region.dtype_name}"
            )
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise UsageError(
            f"{where}: expected parameters of one dtype for all gradients of "
            f"{region.dtype_name}, got {first.text()} and {second.text()}"
        )
    return next(iter(found))
