"""Single arrays of a parameter server's tree, by their paths: what a rank of another program names."""

from collections.abc import Mapping, Sequence
from typing import Any

from mpiml.external.codes import ArraysError, PathError, ShapeError

__all__ = ["ByPath", "leaf_at"]


class ByPath:
    """The part of a `ParameterClient` that names arrays by their paths. Local."""

    _shards: Sequence[Any]
    _worker: int | None

    def pull_paths(self, paths: Sequence[str]) -> tuple[list[Any], int]:
        """Return arrays of one version, and that version.

        Parameters
        ----------
        paths : sequence of str
            Steps from the top of the tree, with ``/`` in between: keys of dicts, and positions in
            lists and tuples, as in ``layers/0/w``. ``""`` is a tree that is one array.

        Raises
        ------
        PathError
            There is no such array.
        """
        me: Any = self
        tree, _ = me._open()
        if tree.treedef.is_leaf() and set(paths) == {""}:
            array, version = me.pull()
            return [array] * len(paths), version
        me._reap()
        request = tree.request_leaves([leaf_at(tree, p, "pull") for p in paths], "pull")
        version, values = me._ask(request.selections)
        return request.build(values), version

    def push_paths(self, arrays: Mapping[str, Any], version: int) -> bool:
        """Push gradients of some arrays by their paths; return whether they are used.

        All other arrays stay as they are, as with ``names=`` of `ParameterClient.push`.

        Raises
        ------
        PathError, ArraysError
            There is no such array; a gradient is not like it.
        UsageError
            It is not finite.
        """
        me: Any = self
        me._check_worker("push")
        tree, _ = me._open()
        leaves = [leaf_at(tree, path, "push") for path in arrays]
        _refuse_unlike(tree, leaves, list(arrays.values()))
        parts = tree.gradients_of(leaves, list(arrays.values()), "push", me._settings.nonfinite)
        if parts is not None and me._known.filters is None:
            parts = tree.messages(parts, False, me._settings.encode)
        return self._hand_over(parts, version)

    def _hand_over(self, parts: Any, version: int) -> bool:
        """Push what each server gets, or tell them that there is nothing."""
        me: Any = self
        me._reap()
        if parts is None:
            return bool(self._shards[0].skip(self._worker))
        try:
            return bool(me._push(parts, version))
        except BaseException:
            me._known.unsure = True  # it may be on its way still, as after a deadline
            raise


def leaf_at(tree: Any, path: str, call: str) -> int:
    """Return the number of the array at a path. The tree decides what is a key and what a position.

    Raises
    ------
    PathError
        There is none, or it is a part of the tree; or two arrays have this path.
    """
    if tree.paths is None:
        paths: dict[str, list[int]] = {}
        for number, steps in enumerate(tree.treedef.paths()):
            paths.setdefault("/".join(map(str, steps)), []).append(number)
        tree.paths = paths
    known: dict[str, list[int]] = tree.paths
    found = known.get(path, [])
    if len(found) == 1:
        return found[0]
    if found:
        raise PathError(
            f"{call}: expected the path of one array, got {path!r}, which {len(found)} arrays of "
            "the tree have: keys with '/' in them, or 1 beside '1'. Name them otherwise."
        )
    inside = [other for other in known if other.startswith(f"{path}/") or not path]
    if inside:
        raise PathError(
            f"{call}: expected the path of one array, as {inside[0]!r}, got {path!r}, which is a "
            f"part of the tree with {len(inside)} arrays. Name each, in a call of its own."
        )
    shown = ", ".join(map(repr, list(known)[:8])) + (", ..." if len(known) > 8 else "")
    raise PathError(
        f"{call}: expected the path of an array in the tree of parameters, one of {shown}, got "
        f"{path!r}"
    )


def _refuse_unlike(tree: Any, leaves: Sequence[int], arrays: Sequence[Any]) -> None:
    """Refuse what has another shape or dtype than its array, by errors that have codes."""
    for leaf, array in zip(leaves, arrays, strict=True):
        spec = tree.plan.leaves[leaf]
        shape, dtype = tuple(spec.shape), spec.dtype
        if array.shape == shape and array.dtype.name == dtype:
            continue
        kind = ArraysError if array.shape == shape else ShapeError
        raise kind(
            f"push: gradient: {spec.path or 'the array'}: expected {shape} {dtype}, as pull() "
            f"returns, got {array.shape} {array.dtype.name}"
        )
