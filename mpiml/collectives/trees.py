"""Nested containers of arrays as a flat list, and back; by the library optree.

Keys of a dict count in sorted order, so that members who filled it in another order still
reduce the same leaf together; keys that have no order, members of an enum or complex numbers,
count in the order in which they were put in, which must then be the same on all members. The
containers are those of optree: dict, list, tuple, named tuple, OrderedDict, defaultdict, deque,
and classes registered with optree, under the namespace ``"mpiml"`` or for all.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import optree

from mpiml import arrays
from mpiml.collectives.ops import dtype_code, dtype_name, native_order, numpy_dtype
from mpiml.errors import UsageError
from mpiml.libraries import family

__all__ = ["flatten", "host_array", "to_numpy", "unflatten", "unlike"]

NAMESPACE: Final = "mpiml"  #: of classes registered with optree
_NAMED: Final = 10  # arrays that a message names
_SHOWN: Final = 300  # characters of a tree in a message

_LEAF: "optree.PyTreeSpec" = optree.treespec_leaf(none_is_leaf=True)  # of a single array


def flatten(
    tree: Any, where: str = "mpiml.collectives"
) -> tuple[list[Any], "optree.PyTreeSpec", tuple[str, ...]]:
    """Take a tree of arrays apart.

    Local: no MPI.

    Parameters
    ----------
    tree : array or tree of arrays
        Leaves of any shape; float16, bfloat16, float32, float64, (u)int8 to (u)int64,
        complex64, complex128 or bool, of NumPy, CuPy, torch or JAX (known by their `shape`
        and `dtype`). Not copied.
    where : str
        Opens the message of an error.

    Returns
    -------
    leaves : list of arrays
    treedef : optree.PyTreeSpec
        What `unflatten` puts them into.
    paths : tuple of str
        How one writes each leaf: ``['w'][0]``, empty for a single array.

    Raises
    ------
    UsageError
        A leaf is no array, or of a dtype that no kernel reduces; names the leaf.
    """
    if type(tree) is np.ndarray:
        _check(tree, "", where)
        return [tree], _LEAF, ("",)
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    paths = _named(treedef)
    for leaf, path in zip(leaves, paths, strict=True):
        _check(leaf, path, where)
    if not leaves:
        raise UsageError(f"{where}: expected at least one array, got {_shown(tree)}")
    return leaves, treedef, paths


def unflatten(treedef: "optree.PyTreeSpec", leaves: Sequence[Any]) -> Any:
    """Put leaves, in the order of `flatten`, into a tree of that structure.

    Local: no MPI.
    """
    return optree.tree_unflatten(treedef, leaves)


def unlike(expected: "optree.PyTreeSpec", found: "optree.PyTreeSpec") -> str:
    """Return how an error tells of a tree of another structure, after "expected a tree like".

    Local: no MPI. As in ``{'w': *}, got {'v': *}: ['w'] missing; ['v'] too much``, where
    ``*`` is an array.
    """
    want, have = [_named(treedef) for treedef in (expected, found)]
    missing = ", ".join(
        [path or "a single array" for path in want if path not in have][:_NAMED]
    )
    more = ", ".join([path or "a single array" for path in have if path not in want][:_NAMED])
    parts = [
        f"{names} {what}" for names, what in ((missing, "missing"), (more, "too much")) if names
    ]
    why = f": {'; '.join(parts)}" if parts else ": other containers"
    return f"{_structure(expected)}, got {_structure(found)}{why}"


def _structure(treedef: "optree.PyTreeSpec") -> str:
    text = str(treedef).removeprefix("PyTreeSpec(").removesuffix(f", namespace='{NAMESPACE}')")
    text = text.removesuffix(")").removesuffix(", NoneIsLeaf")
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def host_array(x: Any) -> "np.ndarray[Any, Any]":
    """Return an array of any library as one of NumPy; what is in host memory is not copied.

    Local: no MPI.

    Raises
    ------
    UsageError
        It is not dense, or bfloat16 without ml_dtypes.
    """
    if family(type(x)) is None:
        return np.asarray(x)
    brought = arrays.to_host(x)
    if brought is None:
        raise UsageError(f"mpiml.collectives: expected a dense array, got {_shown(x)}")
    host, more, _ = brought
    if more:  # bytes of a torch tensor
        name, shape = more[:2]
        host = host.view(numpy_dtype(name)).reshape(shape)
    return host


def _named(treedef: "optree.PyTreeSpec") -> tuple[str, ...]:
    try:
        return _paths(treedef)
    except TypeError:  # a registered class holds what cannot be hashed
        return _paths.__wrapped__(treedef)


def _same(result: Any) -> Any:
    return result


def to_numpy(leaf: Any, spec: Any, where: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return a leaf as a NumPy array in C order, and what makes such an array a leaf.

    Local: no MPI.

    Parameters
    ----------
    leaf : array
        Of any library.
    spec : mpiml.collectives.regions.Leaf
        Its path, shape and dtype.
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        It is not dense.
    """
    kind = family(type(leaf))
    if kind is None:
        array = np.asarray(leaf, order="C")
        if isinstance(leaf, np.ndarray):
            return array, _same
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


@functools.lru_cache(maxsize=64)
def _paths(treedef: "optree.PyTreeSpec") -> tuple[str, ...]:
    return tuple([accessor.codify("") for accessor in treedef.accessors()])


def _check(leaf: Any, path: str, where: str) -> None:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise UsageError(f"{_place(path, where)}: expected an array, got {_got(leaf)}")
    dtype_code(dtype_name(leaf), _place(path, where))
    if not native_order(leaf):
        raise UsageError(
            f"{_place(path, where)}: expected numbers in this machine's byte order, got "
            f"{leaf.dtype!r}. Convert it with x.astype(x.dtype.newbyteorder('='))."
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise UsageError(
            f"{_place(path, where)}: a masked array would lose its mask. Reduce "
            f"x.filled(0) and the mask's counts, each as an array of its own."
        )
    layout = str(getattr(leaf, "layout", ""))
    if layout.startswith("torch.") and layout != "torch.strided":
        raise UsageError(
            f"{_place(path, where)}: expected a dense tensor, got the layout {layout}. "
            f"Convert it with x.to_dense()."
        )


def _got(leaf: Any) -> str:
    if leaf is None:
        return "None. Leave the entry out, on all members, or put zeros there."
    if isinstance(leaf, (bool, int, float, complex)):
        return f"the number {leaf!r}. Make it an array with numpy.asarray(x, dtype=...)."
    if isinstance(leaf, (str, bytes)):
        return f"{_shown(leaf)}. Only numbers can be reduced; keep text out of the tree."
    return (
        f"an object of class {type(leaf).__module__}.{type(leaf).__qualname__}. If it is a "
        f"container, register it with optree.register_pytree_node(..., namespace='{NAMESPACE}')."
    )


def _place(path: str, where: str) -> str:
    return f"{where}: leaf {path}" if path else where


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
