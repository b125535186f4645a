"""Trees come back as they were; what cannot be reduced is refused by its path."""

import collections
import sys
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives.ops import numpy_dtype
from mpiml.collectives.trees import flatten, host_array, unflatten
from mpiml.errors import UsageError

ARRAYS = st.builds(
    np.zeros,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["f4", "f8", "f2", "i1", "u8", "c8", "?"]),
)
TREES = st.recursive(
    ARRAYS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


class Layer(NamedTuple):
    w: Any
    b: Any


class Box:
    def __init__(self, inside):
        self.inside = inside


def follow(tree, path):
    return eval(f"tree{path}", {"tree": tree})


@given(TREES)
def test_there_and_back(tree):
    leaves, treedef, paths = flatten(tree)
    assert len(leaves) == len(paths)
    for leaf, path in zip(leaves, paths, strict=True):
        assert follow(tree, path) is leaf
    again = unflatten(treedef, leaves)
    assert flatten(again)[1] == treedef
    assert all(a is b for a, b in zip(flatten(again)[0], leaves, strict=True))


def test_a_single_array():
    x = np.zeros((2, 3), np.float32)
    leaves, treedef, paths = flatten(x)
    assert leaves[0] is x
    assert paths == ("",)
    assert unflatten(treedef, [5]) == 5
    assert treedef == optree.tree_structure(x, none_is_leaf=True)


def test_containers_and_the_order_of_keys():
    one, two, three = np.zeros(1), np.zeros(2), np.zeros(3)
    tree = {"b": Layer(two, one), "a": collections.OrderedDict(z=three, y=one)}
    leaves, treedef, paths = flatten(tree)
    assert paths == ("['a']['z']", "['a']['y']", "['b'].w", "['b'].b")
    assert [len(x) for x in leaves] == [3, 1, 2, 1]
    assert isinstance(unflatten(treedef, leaves)["b"], Layer)
    other = {"a": tree["a"], "b": tree["b"]}  # filled in another order: the same leaves
    assert flatten(other)[2] == paths


def test_scalars_and_views_of_numpy_are_arrays():
    strided = np.zeros((4, 4))[::2, 1:]
    assert flatten([np.float32(1), strided])[0][1] is strided


def test_registered_classes_even_such_that_cannot_be_hashed():
    optree.register_pytree_node(
        Box, lambda box: ((box.inside,), [1, 2]), lambda _, c: Box(c[0]), namespace="mpiml"
    )
    try:
        _, treedef, paths = flatten([Box(np.zeros(2))])
        assert len(paths) == 1
        assert isinstance(unflatten(treedef, [np.ones(2)])[0], Box)
    finally:
        optree.unregister_pytree_node(Box, namespace="mpiml")


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (None, r"expected an array, got None\. Leave the entry out"),
        (1.5, r"got the number 1\.5\. Make it an array with numpy\.asarray"),
        (True, "got the number True"),
        ("text", "got 'text'. Only numbers"),
        (b"x" * 99, r"got b'x+\.\.\.\. Only numbers"),
        (Box(0), r"got an object of class .*Box.*register_pytree_node"),
        ({1, 2}, "got an object of class builtins.set"),
        (np.array([None]), "expected one of the dtypes .*, got object"),
        (np.array(["a"]), "got str32"),
        (np.zeros(1, "M8[s]"), r"got datetime64\[s\]"),
        (np.zeros(1, [("a", "f4")]), "got void32"),
        (np.zeros(1, np.longdouble), "got float128"),
        (np.zeros(1, np.dtype("f4").newbyteorder("S")), r"byte order.*newbyteorder\('='\)"),
        (np.ma.masked_array([1.0], [True]), r"lose its mask.*filled"),
    ],
)
def test_leaves_that_cannot_be_reduced(leaf, text):
    with pytest.raises(UsageError, match=rf"^call: leaf \['w'\]\[1\]: .*{text}"):
        flatten({"w": [np.zeros(1), leaf]}, "call")


def test_refusals_of_a_single_array_name_no_leaf():
    with pytest.raises(UsageError, match=r"^call: expected one of"):
        flatten(np.array([None]), "call")


@pytest.mark.parametrize("tree", [{}, [], ((), {"a": []})])
def test_a_tree_without_leaves(tree):
    with pytest.raises(UsageError, match=r"^call: expected at least one array, got"):
        flatten(tree, "call")


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    leaves, _, paths = flatten({"p": parameter, "h": torch.zeros(1, dtype=torch.bfloat16)})
    assert paths == ("['h']", "['p']")
    assert leaves[1] is parameter
    with pytest.raises(UsageError, match=r"leaf \[0\].*torch\.sparse_coo.*to_dense"):
        flatten([torch.eye(2).to_sparse()])


def test_keys_without_an_order_count_as_they_were_put_in():
    one, two = np.zeros(1), np.zeros(2)
    assert flatten({2j: two, 1j: one})[2] == ("[2j]", "[1j]")
    assert flatten({"b": two, "a": one})[2] == ("['a']", "['b']")


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((2, 3), "bfloat16")
    assert flatten([x])[0][0] is x
    with pytest.raises(UsageError, match="got key<fry>"):
        flatten(jax.random.key(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_host_arrays_have_the_values_of_any_library(library, dtype):
    if library == "jax" and dtype == "int64":
        dtype = "int32"  # what JAX has unless told
    values = np.array([[1, 0, 3], [0, 1, 2]])
    if library == "numpy":
        x = values.astype(numpy_dtype(dtype))
    elif library == "torch":
        torch = pytest.importorskip("torch")
        x = torch.tensor(values).to(getattr(torch, dtype)).T.contiguous().T
    else:
        x = pytest.importorskip("jax").numpy.asarray(values, dtype)
    host = host_array(x)
    assert host.dtype == numpy_dtype(dtype)
    assert host.tolist() == values.astype(host.dtype).tolist()


def test_nothing_else_is_imported_for_it():
    import subprocess

    code = (
        "import sys, numpy as np, mpiml.collectives.trees as t\n"
        "t.flatten([np.zeros(1)])\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'jax', 'mpi4py.MPI', 'ml_dtypes')))"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
