"""Trees of parameters and of gradients at a worker: checked, cut into parts, joined again."""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import optree

from mpiml.collectives.trees import NAMESPACE, flatten, host_array, unflatten, unlike
from mpiml.errors import UsageError
from mpiml.roles.parameter_server.keys import check_keys
from mpiml.roles.parameter_server.plan import LeafSpec, Plan
from mpiml.roles.parameter_server.store import Sparse

__all__ = ["Request", "TreeParts"]

#: What is asked of one server: pieces, and elements or rows of each, or None for all.
_Selection = list[tuple[int, Any]]


class _Wanted(NamedTuple):
    """One leaf of a request."""

    leaf: int
    rows: Any  # None: all


class Request(NamedTuple):
    """Some of the parameters, as they are asked for.

    Attributes
    ----------
    selections : dict of int to list
        What to ask of which server.
    build : function
        Makes what the user gets of what each server has answered.
    """

    selections: dict[int, _Selection]
    build: Callable[[Mapping[int, Any]], Any]


class TreeParts:
    """The parameters' tree, as a worker sees it. Local; pure.

    Parameters
    ----------
    opened : sequence
        What each server has told: `treedef` and `leaves`.

    Raises
    ------
    UsageError
        The servers do not have the same tree.
    """

    def __init__(self, opened: Sequence[Any]) -> None:
        first = opened[0]
        for shard, other in enumerate(opened[1:], 1):
            if (other.treedef, other.leaves) != (first.treedef, first.leaves):
                raise UsageError(
                    f"ParameterServerNode: init: expected the same tree on all servers, got "
                    f"{_listed(first.leaves)} on server 0 and {_listed(other.leaves)} on server "
                    f"{shard}. A function that is given as init must not depend on where it runs."
                )
            if other.checksum != first.checksum:
                raise UsageError(
                    f"ParameterServerNode: init: expected the same numbers on all servers, got "
                    f"others on server {shard} than on server 0. A function that is given as init "
                    "must not depend on where it runs: give its random numbers a seed."
                )
        self.treedef = first.treedef
        self.plan = Plan(first.leaves, len(opened))
        self._all = [_Wanted(leaf, None) for leaf in range(len(first.leaves))]
        self._likes = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in first.leaves]
        self._named: dict[Any, tuple[Any, list[int]]] | None = None
        self.paths: dict[str, list[int]] | None = None  #: of leaves, as `by_path` writes them

    def of(self, leaves: Sequence[Any]) -> Any:
        """Return leaves as a tree."""
        return unflatten(self.treedef, leaves)

    def leaves(self, tree: Any) -> list[Any]:
        """Return the leaves of a tree that was pulled."""
        return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)

    def join(self, spans: Mapping[int, Any]) -> Any:
        """Return the tree, where the memory of each server is given."""
        return self.of(self.plan.joined([spans[shard] for shard in range(len(spans))]))

    def check_whole(self, call: str) -> None:
        """Raise `UsageError` where the tree cannot be had as a whole."""
        if self.plan.tables:
            keys = ", ".join(str(self.plan.leaves[i]) for i in self.plan.tables[:4])
            raise UsageError(
                f"{call}: expected to be told what is meant of a tree with Keys, got neither names= "
                f"nor indices=: {keys}. Give indices= with the keys of each that is meant, and the "
                "other entries as names=, as in names=['bias'], indices={'words': keys}"
            )

    # -- some ----------------------------------------------------------------------------------

    def request(self, names: Any, indices: Any, call: str) -> Request:
        """Return what to ask of which server for some of the parameters.

        Raises
        ------
        UsageError
            There is no such name or row.
        """
        return self._request(*self._wanted(names, indices, call))

    def request_leaves(self, leaves: Sequence[int], call: str) -> Request:
        """Return what to ask of which server for some arrays, which are built as a list."""
        wanted = [_Wanted(leaf, self._rows(leaf, None, call)) for leaf in leaves]
        return self._request(wanted, list)

    def _request(
        self, wanted: Sequence[_Wanted], back: Callable[[Sequence[Any]], Any]
    ) -> Request:
        selections: dict[int, _Selection] = {}
        # for each leaf: server, where in its answer, where in the leaf
        sources: list[list[tuple[int, int, Any]]] = []
        for leaf, rows in wanted:
            found = []
            for shard, (piece, elements, places) in self.plan.select(leaf, rows):
                answer = selections.setdefault(shard, [])
                found.append((shard, len(answer), places))
                answer.append((piece, elements))
            sources.append(found)

        def build(values: Mapping[int, Any]) -> Any:
            arrays = []
            for (leaf, rows), found in zip(wanted, sources, strict=True):
                out = self._empty(leaf, rows)
                for shard, at, places in found:
                    out[places] = values[shard][at]
                arrays.append(out.reshape(self._shape(leaf, rows)))
            return back(arrays)

        return Request(selections, build)

    def _empty(self, leaf: int, rows: Any) -> Any:
        """Return an array to put elements into, as one axis; of a key range, rows."""
        spec, shape = self.plan.leaves[leaf], self._shape(leaf, rows)
        return np.empty(shape if spec.table else prod(shape), spec.dtype)

    def _shape(self, leaf: int, rows: Any) -> tuple[int, ...]:
        shape = self.plan.leaves[leaf].shape
        return shape if rows is None else (len(rows), *shape[1:])

    def _wanted(
        self, names: Any, indices: Any, call: str
    ) -> tuple[list[_Wanted], Callable[[Sequence[Any]], Any]]:
        """Return the leaves that are meant, and what puts arrays of them into what users see."""
        if self.treedef.is_leaf():
            if names is not None or isinstance(indices, Mapping):
                raise UsageError(
                    f"{call}: the parameters are a single array: expected indices=array, got "
                    f"names={names!r}, indices={type(indices).__name__}"
                )
            return [_Wanted(0, self._rows(0, indices, call))], _only
        known = self._names(call)
        if indices is not None and not isinstance(indices, Mapping):
            raise UsageError(
                f"{call}: indices: expected a dict of names to arrays of int, as the parameters "
                f"are a dict, got {type(indices).__name__}"
            )
        indices = {} if indices is None else indices
        if isinstance(names, str):
            raise UsageError(f"{call}: names: expected a list of names, got {names!r}")
        try:
            chosen = list(dict.fromkeys([*([] if names is None else names), *indices]))
        except TypeError:
            raise UsageError(
                f"{call}: names: expected a list of names, got {names!r}"
            ) from None
        for name in chosen:
            if name not in known:
                raise UsageError(
                    f"{call}: expected names among {', '.join(map(repr, known))}, got {name!r}"
                )
        wanted = [
            _Wanted(leaf, self._rows(leaf, indices.get(name), call))
            for name in chosen
            for leaf in known[name][1]
        ]
        for name in indices:
            if len(known[name][1]) != 1:
                raise UsageError(
                    f"{call}: indices: {name!r} is a tree of {len(known[name][1])} arrays, "
                    "expected the name of one array"
                )

        def back(arrays: Sequence[Any]) -> Any:
            rest, tree = iter(arrays), {}
            for name in chosen:
                treedef, leaves = known[name]
                tree[name] = unflatten(treedef, [next(rest) for _ in leaves])
            return tree

        return wanted, back

    def _names(self, call: str) -> dict[Any, tuple[Any, list[int]]]:
        """Return, by entry of the tree, its structure and its leaves."""
        if self._named is None:
            if self.treedef.type not in (dict, *_DICTS):
                raise UsageError(
                    f"{call}: names= and indices= are for parameters that are a dict, or a single "
                    f"array, got {self.treedef.type}"
                )
            self._named, leaf = {}, 0
            for name, child in zip(
                self.treedef.entries(), self.treedef.children(), strict=True
            ):
                self._named[name] = child, list(range(leaf, leaf + child.num_leaves))
                leaf += child.num_leaves
        return self._named

    def _rows(self, leaf: int, rows: Any, call: str) -> Any:
        spec = self.plan.leaves[leaf]
        if rows is None:
            if spec.table:
                raise UsageError(f"{call}: {spec}: expected keys in indices=, got none")
            return None
        if not spec.shape:
            raise UsageError(f"{call}: {spec}: indices: it has no rows")
        where = f"{call}: {spec.path or 'the array'}"
        return check_keys(rows, 0, spec.shape[0], where, "keys" if spec.table else "indices")

    # -- gradients -----------------------------------------------------------------------------

    def gradients(
        self, gradient: Any, names: Any, indices: Any, call: str, nonfinite: str
    ) -> list[list[Any]] | None:
        """Return what each server gets: for each piece an array, a `Sparse`, or None.

        None: the gradient is not finite, and is to be dropped.

        Raises
        ------
        UsageError
            It is not like the parameters; it is not finite, and that is to be an error.
        """
        if names is None and indices is None:
            self.check_whole(call)
            wanted, expected = self._all, self.treedef
            leaves = self._plain(gradient)
        else:
            wanted, back = self._wanted(names, indices, call)
            order, expected = optree.tree_flatten(
                back(range(len(wanted))), none_is_leaf=True, namespace=NAMESPACE
            )
            # the leaves of a dict are in the order of its keys, whichever way it was written
            wanted = [wanted[i] for i in order]
            leaves = None
        if leaves is None:
            leaves = self._checked(gradient, expected, wanted, call)
        if not self._fit(leaves, wanted, call, nonfinite):
            return None
        if expected is self.treedef:
            return self.plan.parts(leaves)
        return self._partial(leaves, wanted)

    def gradients_of(
        self, leaves: Sequence[int], arrays: Sequence[Any], call: str, nonfinite: str
    ) -> list[list[Any]] | None:
        """Return the same as `gradients`, for arrays of these leaves, each once."""
        wanted = [_Wanted(leaf, self._rows(leaf, None, call)) for leaf in leaves]
        found = [
            self._checked(array, _ONE, [one], call)[0]
            for array, one in zip(arrays, wanted, strict=True)
        ]
        fit = self._fit(found, wanted, call, nonfinite)
        return self._partial(found, wanted) if fit else None

    def _fit(
        self, leaves: Sequence[Any], wanted: Sequence[_Wanted], call: str, nonfinite: str
    ) -> bool:
        """Return whether all numbers are finite; raise, if that is to be an error."""
        for leaf, (number, _) in zip(leaves, wanted, strict=True):
            if not _finite(leaf):
                if nonfinite == "drop":
                    return False
                raise UsageError(
                    f"{call}: gradient: {self.plan.leaves[number]}: expected finite numbers, got "
                    f"{_odd(leaf)}. ParameterServerNode(nonfinite='drop') drops and counts such "
                    "gradients."
                )
        return True

    def messages(self, parts: list[list[Any]], dense: bool, encode: Any) -> list[Any]:
        """Return what is sent to each server for a gradient.

        Parameters
        ----------
        parts : list of list
            What `gradients` has returned.
        dense : bool
            Whether it is of the whole tree.
        encode : function or None
            The user's codec, for arrays; rows go as they are.
        """
        if encode is not None:
            return [
                [encode(part) if isinstance(part, np.ndarray) else part for part in some]
                for some in parts
            ]
        if not dense:
            return parts
        return [self.plan.message(shard, part) for shard, part in enumerate(parts)]

    def _plain(self, gradient: Any) -> list[Any] | None:
        """Return the leaves of a gradient of NumPy arrays that is like the parameters.

        What `_checked` does for all others, with errors that say what is wrong.
        """
        if type(gradient) is np.ndarray:
            leaves, treedef = [gradient], self.treedef if self.treedef.is_leaf() else None
        else:
            leaves, treedef = optree.tree_flatten(
                gradient, none_is_leaf=True, namespace=NAMESPACE
            )
        if treedef != self.treedef:
            return None
        for leaf, (shape, dtype) in zip(leaves, self._likes, strict=True):
            if type(leaf) is not np.ndarray or leaf.dtype != dtype or leaf.shape != shape:
                return None
        return leaves

    def _partial(self, leaves: Sequence[Any], wanted: Sequence[_Wanted]) -> list[list[Any]]:
        found: list[list[Any]] = [[None] * len(pieces) for pieces in self.plan.pieces]
        for values, (leaf, rows) in zip(leaves, wanted, strict=True):
            table = self.plan.leaves[leaf].table
            line = values if table else values.reshape(-1)
            for shard, (piece, elements, places) in self.plan.select(leaf, rows):
                part = line[places]
                found[shard][piece] = part if elements is None else Sparse(elements, part)
        return found

    def _checked(
        self, gradient: Any, expected: Any, wanted: Sequence[_Wanted], call: str
    ) -> list[Any]:
        """Return the leaves of a gradient as NumPy arrays, if it is like what is expected."""
        leaves, treedef, _ = flatten(gradient, f"{call}: gradient")
        if treedef != expected:
            raise UsageError(
                f"{call}: gradient: expected a tree like {unlike(expected, treedef)}"
            )
        found = []
        for leaf, (number, rows) in zip(leaves, wanted, strict=True):
            array, spec = host_array(leaf), self.plan.leaves[number]
            shape = self._shape(number, rows)
            if array.shape != shape or array.dtype.name != spec.dtype:
                raise UsageError(
                    f"{call}: gradient: {spec.path or 'the array'}: expected {shape} {spec.dtype}, "
                    f"as pull() returns, got {array.shape} {array.dtype.name}"
                )
            found.append(array)
        return found


def _only(arrays: Sequence[Any]) -> Any:
    return arrays[0]


_DICTS = (OrderedDict, defaultdict)
_ONE = optree.treespec_leaf(none_is_leaf=True, namespace=NAMESPACE)  # a single array
# Numbers of which a scalar product is the quickest look; for more it takes threads.
_FEW = 4096


def _finite(array: Any) -> bool:
    """Tell whether all numbers are finite; a sum finds what is not, but may overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        if array.size <= _FEW and array.flags.c_contiguous:
            flat = array.reshape(-1)
            total = flat.dot(flat)
        else:
            total = array.sum()
    return math.isfinite(total) or bool(np.isfinite(array).all())


def _odd(array: Any) -> str:
    flat = array.reshape(-1)
    at = int(np.flatnonzero(~np.isfinite(flat))[0])
    return f"{flat[at]} at {at}"


def _listed(leaves: Sequence[LeafSpec]) -> str:
    shown = ", ".join(str(leaf) for leaf in leaves[:4])
    return shown if len(leaves) <= 4 else f"{shown} and {len(leaves) - 4} more"
