"""Arrays of a tree by their paths: the tree says what is a key and what a position."""

import collections
import types

import numpy as np
import optree
import pytest

from mpiml.collectives.trees import NAMESPACE
from mpiml.errors import UsageError
from mpiml.roles.parameter_server.by_path import leaf_at

Pair = collections.namedtuple("Pair", "left right")


def seen(tree):
    treedef = optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)
    return types.SimpleNamespace(treedef=treedef, paths=None)


def test_keys_and_positions_are_those_of_the_tree():
    tree = {"net": {"0": 1, "1": 2, "10": 3}, "layers": [{"w": 4}, (5, Pair(6, 7))], "a/b": 8}
    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)
    paths = ("net/0", "net/1", "net/10", "layers/0/w", "layers/1/0", "layers/1/1/0",
             "layers/1/1/1", "a/b")  # fmt: skip
    told = seen(tree)
    assert [leaves[leaf_at(told, path, "pull")] for path in paths] == list(range(1, 9))
    assert leaf_at(seen(np.zeros(3)), "", "pull") == 0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "layers",
            "push: expected the path of one array, as 'layers/0/b', got 'layers', which is",
        ),
        ("", "which is a part of the tree with 3 arrays"),
        ("layers/-1/w", "one of 'bias', 'layers/0/b', 'layers/0/w', got 'layers/-1/w'"),
        ("layers/0/w/", "got 'layers/0/w/'"),
        ("lay", "got 'lay'"),
    ],
)
def test_what_is_no_array_is_refused_with_what_there_is(path, text):
    told = seen({"layers": [{"w": 1, "b": 2}], "bias": 3})
    with pytest.raises(UsageError) as caught:
        leaf_at(told, path, "push")
    assert text in str(caught.value)


def test_a_path_of_two_arrays_is_refused():
    with pytest.raises(UsageError, match="got 'a/b', which 2 arrays of the tree have"):
        leaf_at(seen({"a/b": 1, "a": {"b": 2}}), "a/b", "pull")
