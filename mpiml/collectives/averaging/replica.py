"""The parameters that a member trains by itself between two meetings with the others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiml.arrays import namespace
from mpiml.collectives.allreducing import allreduce
from mpiml.collectives.bucket import Bucket
from mpiml.collectives.labels import Label
from mpiml.collectives.loose import loose_of
from mpiml.collectives.members import team_of
from mpiml.collectives.regions import specs_of
from mpiml.collectives.team import Team
from mpiml.collectives.trees import flatten, host_array, unflatten, unlike
from mpiml.errors import UsageError
from mpiml.libraries import family
from mpiml.optim_step import check_parameter

__all__ = ["Replica", "beside", "difference", "meeting_of", "put", "scaled", "team_for"]


class Replica:
    """One member's parameters, taken apart.

    Collective over the members: `start`, `mean`, `reduced`.

    Parameters
    ----------
    params : Bucket, array or tree of arrays, float32 or float64
        NumPy or CuPy arrays; changed in place.
    team : Team
        The members.
    where : str
        Opens the message of an error.

    Attributes
    ----------
    leaves : list of arrays
        Those of `params` themselves.
    tree
        The same, in their structure.
    text : str
        What members compare of them: a line for each array.

    Raises
    ------
    UsageError
        A leaf is no such array, or is read-only.
    """

    def __init__(self, params: Any, team: Team, where: str) -> None:
        self.team = team
        self.bucket = params if isinstance(params, Bucket) else None
        self.tree = params if self.bucket is None else self.bucket.tree
        self.leaves, self.treedef, self.paths = flatten(self.tree, f"{where}: params")
        for leaf, path in zip(self.leaves, self.paths, strict=True):
            check_parameter(f"{where}: params{path}", leaf)
            if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
                raise UsageError(
                    f"{where}: params{path}: expected an array that can be written, since it "
                    "is trained in place, got one that is read-only. Pass a copy."
                )
        self.text = "\n".join([leaf.text() for leaf in specs_of(self.leaves, self.paths)])
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)

    def matched(self, tree: Any, where: str) -> list[Any]:
        """Return the leaves of a tree of gradients or values. Local.

        Raises
        ------
        UsageError
            It is not like the parameters: in structure, shapes or libraries; or a leaf holds
            no floating-point numbers.
        """
        if isinstance(tree, Bucket):
            if tree.team is not self.team:
                raise UsageError(
                    f"{where}: expected a bucket of the members that the parameters are of, "
                    f"{self.team.title}, got {tree!r} of {tree.team.title}"
                )
            tree = tree.tree
        leaves, treedef, _ = flatten(tree, where)
        if treedef != self.treedef:
            raise UsageError(
                f"{where}: expected a tree like the parameters, {unlike(self.treedef, treedef)}"
            )
        for leaf, own, path in zip(leaves, self.leaves, self.paths, strict=True):
            floating = leaf.dtype.kind == "f" or leaf.dtype.name == "bfloat16"
            same = family(type(leaf)) == family(type(own))
            if not (same and floating and tuple(leaf.shape) == tuple(own.shape)):
                raise UsageError(
                    f"{where}{path}: expected a floating-point array of shape "
                    f"{tuple(own.shape)}, of the library that the parameter is of, got "
                    f"{type(leaf).__module__} {leaf.dtype}{tuple(leaf.shape)}"
                )
        return leaves

    def kept(self, tree: Any, where: str) -> list[Any]:
        """Return the leaves of a tree of a checkpoint, of any library. Local.

        Raises
        ------
        UsageError
            It is not like the parameters: in structure, shapes or dtypes.
        """
        leaves, treedef, paths = flatten(tree, where)
        text = "\n".join([leaf.text() for leaf in specs_of(leaves, paths)])
        if treedef != self.treedef:
            raise UsageError(
                f"{where}: expected arrays like the parameters, {unlike(self.treedef, treedef)}"
            )
        if text != self.text:
            raise UsageError(
                f"{where}: expected arrays like the parameters, {self.text!r}, got {text!r}"
            )
        return leaves

    def whole(self, leaves: Sequence[Any]) -> Any:
        """Return arrays like the parameters in their structure. Local."""
        return unflatten(self.treedef, leaves)

    def copied(self, leaves: Sequence[Any]) -> Any:
        """Return copies in host memory, in the structure of the parameters. Local."""
        return self.whole([np.array(host_array(leaf)) for leaf in leaves])

    def start(self, label: Label) -> None:
        """Give every member the parameters of member 0, to the last bit.

        Collective over the members.
        """
        if self.bucket is not None:
            self.bucket.broadcast(0, name=label.head)
            return
        # as whole numbers, of which all but one member bring zeros: -0.0 and NaN stay too
        bits = [leaf.copy(order="C").view(f"u{leaf.itemsize}") for leaf in self.leaves]
        if self.team.index != 0:
            for array in bits:
                array[...] = 0
        given = allreduce(bits, "sum", self.team, out=bits, name=label.head)
        for leaf, array in zip(self.leaves, given, strict=True):
            leaf[...] = array.view(leaf.dtype)

    def mean(self, name: str) -> None:
        """Set the parameters to the mean of all members'. Collective over the members."""
        if self.bucket is not None:
            self.bucket.allreduce("mean", name=name)
        else:
            allreduce(self.leaves, "mean", self.team, out=self.leaves, name=name)

    def reduced(
        self, tree: Any, leaves: list[Any], op: str, name: str, out: list[Any] | None = None
    ) -> list[Any]:
        """Combine arrays like the parameters; return them, those of a bucket changed.

        Collective over the members.

        Parameters
        ----------
        tree : Bucket or other
            What the leaves are of; the leaves of a bucket are combined in place.
        leaves : list of arrays
            What this member brings.
        op, name : str
            As for `allreduce`.
        out : list of arrays, optional
            Where the result goes, unless into a bucket; new ones by default.
        """
        if isinstance(tree, Bucket):
            tree.allreduce(op, name=name)
            return leaves
        found: list[Any] = allreduce(leaves, op, self.team, out=out, name=name)
        return found


def team_for(params: Any, comm: Any, where: str) -> Team:
    """Return whose replicas the parameters are.

    Collective over the members, the first time.

    Raises
    ------
    UsageError
        `comm` is none, or not that of the bucket.
    """
    if not isinstance(params, Bucket):
        return team_of(comm, where)
    if comm is not None and team_of(comm, where) is not params.team:
        raise UsageError(
            f"{where}: comm: expected that of the bucket of parameters, or None, got {comm!r}"
        )
    return params.team


def meeting_of(tree: Any, team: Team) -> Any:
    """Return what gives, for a label, the channel in which members reduce such a tree. Local."""
    return tree.channel if isinstance(tree, Bucket) else lambda label: loose_of(team, label)


def difference(a: Any, b: Any, factor: float = 1.0, out: Any = None) -> Any:
    """Return ``factor * (a - b)``: an array, for one without axes too; `out` or a new one. Local."""
    xp = namespace(a)
    found = xp.subtract(a, b, out=xp.empty_like(a) if out is None else out)
    return found if factor == 1.0 else xp.multiply(found, factor, out=found)


def scaled(a: Any, factor: float) -> Any:
    """Return ``factor * a``, a new array, for one without axes too. Local."""
    xp = namespace(a)
    return xp.multiply(a, factor, out=xp.empty_like(a))


def beside(x: Any, array: Any) -> Any:
    """Return an array in the memory that x is in; what is there already is not copied. Local."""
    return host_array(array) if family(type(x)) is None else namespace(x).asarray(array)


def put(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy arrays, in host memory or not, into others of the same shapes. Local."""
    for target, source in zip(targets, sources, strict=True):
        target[...] = beside(target, source)
