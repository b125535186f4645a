"""JAX gradients, reduced among the nodes of a role or the ranks of a communicator.

JAX is optional: ``pip install 'mpiml[jax]'``.
"""

try:
    import jax
except ImportError as error:
    from mpiml.libraries import MissingLibraryError

    raise MissingLibraryError("mpiml.jax", "JAX", "jax", error) from None

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from jax.experimental import io_callback

from mpiml.collectives.alike import agree_on, guarded, refuse
from mpiml.collectives.bucket import Bucket
from mpiml.collectives.gradients import assign, check_compress, check_options
from mpiml.collectives.labels import Label
from mpiml.collectives.members import team_of
from mpiml.collectives.ops import COMPLEX, FLOATS, dtype_name
from mpiml.collectives.requests import Request, wait_for_all
from mpiml.errors import UsageError

__all__ = ["GradientSync"]

_WHERE: Final = "mpiml.jax.GradientSync"
_LONG: Final = 400  # characters of a structure in a message
_Spec: Any = jax.ShapeDtypeStruct


class GradientSync:
    """Reduces trees of gradients over the members.

    Collective over the members: construction, every call, `broadcast`. ::

        sync = mpiml.jax.GradientSync(params)
        params = sync.broadcast(params)
        for batch in batches:
            grads = grad_of(params, batch)          # jitted
            params = update(params, sync(grads))    # jitted

    A call takes a tree and returns one, of arrays on the same devices. In between the numbers
    lie in buckets, in memory that the members of a host share, and a bucket is reduced while
    the next is being filled. Each element is added in the order of the members, so the result
    is the same on all of them, to the last bit.

    It may also be called inside of a jitted function, by `jax.experimental.io_callback`, if
    each member has a process of its own: JAX runs the callbacks of a process one after
    another, and members in threads would wait for each other for ever.

    Parameters
    ----------
    like : tree of arrays
        A tree as the gradients': the parameters, or `jax.eval_shape` of them. Floating point or
        complex numbers, bfloat16 included.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node, which may be
        threads of one process.
    op : {"mean", "sum"} or mpi4py.MPI.SUM
        "mean" makes of the members' mean losses that of the whole batch, where their parts
        are equal in size.
    bucket_bytes : int
        Of a bucket of gradients.
    compress : codec, optional
        See `mpiml.collectives.compression`.
    fallback : bool
        Without shared memory (``/dev/shm`` too small) send messages, instead of failing.
    name : str, optional
        What messages call it.

    Raises
    ------
    UsageError
        The members' trees or arguments differ; a leaf is nothing that has a gradient. On all
        members.

    Notes
    -----
    JAX's arrays never change, and memory of a bucket does: so results are copies, one for each
    call, and no array of JAX ever refers to a bucket. Arrays on a GPU pass through the host.
    """

    def __init__(
        self,
        like: Any,
        comm: Any = None,
        *,
        op: Any = "mean",
        bucket_bytes: int = 25 << 20,
        compress: Any = None,
        fallback: bool = False,
        name: str | None = None,
    ) -> None:
        self._title = _WHERE if name is None else f"{_WHERE} {name!r}"
        self._team = team_of(comm, _WHERE)
        self._op = ""
        self._compress = compress
        caught: Exception | None = None
        text = said = ""
        try:
            self._op = check_options(_WHERE, op, bucket_bytes=bucket_bytes)
            self._names, leaves, self._treedef = _leaves(like, self._title)
            self._shapes = [_Spec(leaf.shape, leaf.dtype) for leaf in leaves]
            named = [
                (f"leaf {name}" if name else "", s)
                for name, s in zip(self._names, leaves, strict=True)
            ]
            codec = check_compress(self._title, compress, named)
            text = f"op={self._op!r}\nbucket_bytes={bucket_bytes!r}\ncompress={codec}"
            said = self._text()
        except Exception as error:  # the others must hear of it
            caught = error
        cure = "Make the tree the same way on every member."
        what = "tree and arguments"
        agree_on(self._team, self._title, text, caught, what, cure, leaves=said)
        sizes = [math.prod(s.shape) * s.dtype.itemsize for s in self._shapes]
        self._plan = assign(sizes, bucket_bytes, bucket_bytes)
        self._buckets = [
            Bucket(
                comm,
                {self._names[i]: self._shapes[i] for i in numbers},
                name=f"{self._title}, bucket {number}",
                fallback=fallback,
            )
            for number, numbers in enumerate(self._plan)
        ]
        self._calls = 0

    @property
    def index(self) -> int:
        """The number of this member."""
        return self._team.index

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._team.size

    def __call__(self, gradients: Any) -> Any:
        """Return the reduced gradients.

        Collective over the members. Waits until the gradients have been computed.

        Parameters
        ----------
        gradients : tree of arrays
            Structure, shapes and dtypes of `like`.

        Returns
        -------
        tree of jax.Array
            New arrays, where the given ones are.

        Raises
        ------
        UsageError
            It is another tree; inside of a jitted function where members share a process. On
            all members.
        """
        leaves = self._guarded(lambda: self._check(gradients))
        if not any(map(_traced, leaves)):
            return self._treedef.unflatten(_placed(self._reduce(leaves), leaves))
        found = io_callback(self._called_back, self._shapes, *leaves, ordered=True)
        return self._treedef.unflatten(found)

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        """Return the arrays of member `root`: parameters to begin with.

        Collective over the members.

        Parameters
        ----------
        tree : tree of arrays
            Structure, shapes and dtypes of `like`.
        root : int
            Whose values are taken.

        Raises
        ------
        UsageError
            It is another tree, or there is no such member. On all members.
        """

        def check() -> list[Any]:
            if not (isinstance(root, int) and 0 <= root < self.size):
                raise UsageError(
                    f"{self._title}: root: expected 0..{self.size - 1}, got {root!r}"
                )
            return self._check(tree)

        leaves = self._guarded(check)
        requests = []
        for bucket, numbers in zip(self._buckets, self._plan, strict=True):
            if root == self.index:
                self._fill(bucket, numbers, leaves)
            requests.append(bucket.ibroadcast(root))
        wait_for_all(requests)
        return self._treedef.unflatten(_placed(self._taken(), leaves))

    def close(self) -> None:
        """Let go of the shared memory. Local: call it on every member."""
        for bucket in self._buckets:
            bucket.close()

    def statistics(self) -> dict[str, Any]:
        """Return sizes and counts, for logs."""
        return {
            "members": self.size,
            "arrays": len(self._names),
            "buckets": len(self._buckets),
            "bytes": sum(bucket.regions.nbytes for bucket in self._buckets),
            "way": self._buckets[0].statistics()["way"],
            "calls": self._calls,
        }

    def __enter__(self) -> "GradientSync":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<GradientSync of {len(self._names)} arrays in {len(self._buckets)} buckets, member "
            f"{self.index} of {self.size}>"
        )

    # -- inside --------------------------------------------------------------------------------

    def _guarded(self, check: Callable[[], list[Any]]) -> list[Any]:
        """Look at this member's arguments; where they are wrong, the others hear of it."""
        return guarded(self._team, self._title, check, *[b.channel for b in self._buckets])

    def _called_back(self, *leaves: Any) -> "list[np.ndarray[Any, Any]]":
        return self._reduce(leaves)

    def _reduce(self, leaves: Sequence[Any]) -> "list[np.ndarray[Any, Any]]":
        """Reduce arrays; return new ones. A call is one round of the members."""
        self._team.begin_round(Label(self._title, self._op))
        try:
            requests: list[Request] = []
            for bucket, numbers in zip(self._buckets, self._plan, strict=True):
                try:
                    self._fill(bucket, numbers, leaves)
                except Exception as error:  # of the computation that they come from
                    rest = self._buckets[len(requests) :]
                    refuse(self._team, self._title, error, *[b.channel for b in rest])
                    raise
                requests.append(bucket.iallreduce(self._op, self._compress))
            wait_for_all(requests)
        finally:
            self._team.end_round()
        self._calls += 1
        return self._taken()

    def _fill(self, bucket: Bucket, numbers: Sequence[int], leaves: Sequence[Any]) -> None:
        for number in numbers:
            np.copyto(bucket[self._names[number]], np.asarray(leaves[number]))

    def _taken(self) -> "list[np.ndarray[Any, Any]]":
        """Return copies of what lies in the buckets: JAX may keep them without another copy."""
        found: dict[int, np.ndarray[Any, Any]] = {}
        for bucket, numbers in zip(self._buckets, self._plan, strict=True):
            found.update({number: bucket[self._names[number]].copy() for number in numbers})
        return [found[number] for number in range(len(found))]

    def _check(self, tree: Any) -> list[Any]:
        """Return the leaves of a tree that is like the one it was made for."""
        names, leaves, treedef = _leaves(tree, self._title)
        if self._team.in_one_process and any(map(_traced, leaves)):
            raise UsageError(
                f"{self._title}: expected each member in a process of its own, got a call inside "
                f"of a jitted function where {len(self._team.housemates)} members are threads of "
                "one. Call it between jitted functions, or start one rank for each replica."
            )
        if treedef == self._treedef and all(
            leaf.shape == shape.shape and leaf.dtype == shape.dtype
            for leaf, shape in zip(leaves, self._shapes, strict=True)
        ):
            return leaves
        expected, got = self._text().split("\n"), _text(names, leaves).split("\n")
        pairs = itertools.zip_longest(expected, got, fillvalue="no more")
        odd = next(((a, b) for a, b in pairs if a != b), None)
        # Where each leaf is what it was, they stand in containers of other kinds.
        first, second = odd or _structures(str(self._treedef), str(treedef))
        raise UsageError(
            f"{self._title}: expected a tree as the one that it was made for, with {first}, got "
            f"{second} ({len(expected)} and {len(got)} leaves). "
            "Make another GradientSync for another tree."
        )

    def _text(self) -> str:
        return _text(self._names, self._shapes)


def _leaves(tree: Any, title: str) -> tuple[list[str], list[Any], Any]:
    """Take a tree apart by JAX's own rules: names, leaves, structure."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if not pairs:
        raise UsageError(f"{title}: expected at least one array, got {tree!r}")
    names = [jax.tree_util.keystr(path) for path, _ in pairs]
    leaves = [leaf for _, leaf in pairs]
    for name, leaf in zip(names, leaves, strict=True):
        _check_leaf(name, leaf, title)
    return names, leaves, treedef


def _structures(*texts: str) -> tuple[str, ...]:
    """Return two structures as a message shows them, long ones from where they differ."""
    alike = itertools.takewhile(lambda pair: len(set(pair)) == 1, zip(*texts, strict=False))
    first = max(sum(1 for _ in alike) - _LONG // 4, 0)
    start = first if max(map(len, texts)) > _LONG else 0
    head = "..." if start else ""
    parts = [(text[start : start + _LONG], len(text) > start + _LONG) for text in texts]
    return tuple(f"the structure {head}{part}{'...' if more else ''}" for part, more in parts)


def _traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _check_leaf(name: str, leaf: Any, title: str) -> None:
    place = f"{title}: leaf {name}" if name else title
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise UsageError(f"{place}: expected an array, got {type(leaf).__qualname__}")
    if dtype_name(leaf) not in FLOATS | COMPLEX:
        raise UsageError(
            f"{place}: expected one of the dtypes {', '.join(sorted(FLOATS | COMPLEX))}, got "
            f"{dtype_name(leaf)}. Keep what has no gradient out of the tree "
            "(equinox.partition, or a tree of the trained parameters only)."
        )
    if isinstance(leaf, jax.Array) and not _traced(leaf) and not leaf.is_fully_addressable:
        raise UsageError(
            f"{place}: expected an array whose devices are all in this process, got one that is "
            "distributed by jax.distributed. Let JAX reduce that itself."
        )


def _text(names: Sequence[str], leaves: Sequence[Any]) -> str:
    return "\n".join(
        f"{name or 'the array'} {tuple(leaf.shape)} {dtype_name(leaf)}"
        for name, leaf in zip(names, leaves, strict=True)
    )


def _placed(arrays: "Sequence[np.ndarray[Any, Any]]", like: Sequence[Any]) -> list[Any]:
    """Return arrays of JAX on the devices of others."""
    return [
        jax.device_put(array, getattr(old, "sharding", None))
        for array, old in zip(arrays, like, strict=True)
    ]
