"""The tree that a parameter server begins with, taken apart."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from mpiml._native import checksum
from mpiml.collectives.trees import NAMESPACE, flatten, host_array
from mpiml.roles.parameter_server.keys import Keys
from mpiml.roles.parameter_server.plan import LeafSpec

__all__ = ["checksum_of", "flatten_init"]

_WHERE = "ParameterServerNode: init"


def flatten_init(init: Any) -> tuple[Any, tuple[LeafSpec, ...], list[Any]]:
    """Take a tree of arrays and key ranges apart; a function is called for it. Local.

    Returns
    -------
    treedef
        What `unflatten` puts leaves into.
    specs : tuple of LeafSpec
        What the leaves are.
    leaves : list of ndarray or Keys
        The leaves.

    Raises
    ------
    UsageError
        A leaf is neither an array nor a key range.
    """
    tree = init() if callable(init) else init
    found, treedef = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    # a key range has no numbers, so an empty array stands for it where arrays are checked
    shown = [np.empty(0, leaf.dtype) if isinstance(leaf, Keys) else leaf for leaf in found]
    _, _, paths = flatten(optree.tree_unflatten(treedef, shown), _WHERE)
    leaves = [leaf if isinstance(leaf, Keys) else host_array(leaf) for leaf in found]
    specs = tuple(
        LeafSpec(path, tuple(leaf.shape), leaf.dtype.name, isinstance(leaf, Keys))
        for path, leaf in zip(paths, leaves, strict=True)
    )
    return treedef, specs, leaves


def checksum_of(leaves: Sequence[Any]) -> int:
    """Return a number that differs where arrays do: a function may make others on each server."""
    found = 0
    for leaf in leaves:
        if not isinstance(leaf, Keys) and leaf.size:
            found = checksum(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, found)
    return found
