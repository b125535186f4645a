"""`allreduce` of arrays and trees of arrays, wherever they lie."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiml import arrays
from mpiml.collectives.alike import guarded
from mpiml.collectives.device.arrays import on_device
from mpiml.collectives.device.channel import reduce_arrays
from mpiml.collectives.fusion import messages
from mpiml.collectives.labels import Label
from mpiml.collectives.loose import loose_of
from mpiml.collectives.members import team_of
from mpiml.collectives.ops import dtype_name, op_code, op_name
from mpiml.collectives.regions import Leaf, specs_of
from mpiml.collectives.team import Team
from mpiml.collectives.trees import flatten, to_numpy, unflatten, unlike
from mpiml.errors import UsageError
from mpiml.libraries import family

__all__ = ["allreduce"]

_CALLS = 256  # prepared calls that a team keeps


class _Call(NamedTuple):
    """What is the same each time a call comes again with such an array."""

    label: Label
    op: str
    dtype: str


def allreduce(
    x: Any,
    op: Any = "sum",
    comm: Any = None,
    compress: Any = None,
    out: Any = None,
    name: str | None = None,
) -> Any:
    """Combine the arrays of all members; return the result to all.

    Collective over the members. Elements are combined by one rule, in the order of the
    members, so all get the same bits, whenever they come. Arrays in a `Bucket` need no copy
    and are faster.

    Parameters
    ----------
    x : array or tree of arrays
        NumPy, CuPy, torch or JAX arrays of any shape; the same shapes and dtypes on every
        member. Or one Python number, for one back.
    op : {"sum", "mean", "min", "max", "prod"} or mpi4py.MPI.Op
        float16 and bfloat16 are combined in float32 and rounded once; integers wrap; NaN
        wins in min and max.
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks are the members; None: the replicas of the role of this node.
    compress : codec, optional
        See `mpiml.collectives.compression`; for "sum" and "mean".
    out : array or tree of arrays, optional
        Where the result goes: arrays like those of `x`, or `x` itself. New ones by default.
    name : str, optional
        Compared among the members, and shown in messages; without it the line of the call is
        shown, and not compared.

    Returns
    -------
    array or tree of arrays
        Like `x`, of the same libraries; `out` where that was given.

    Raises
    ------
    UsageError
        Members differ in operation, name, shapes or dtypes; a leaf is no array of numbers.
        On all members.
    """
    team = team_of(comm, "allreduce")
    if type(x) is np.ndarray and compress is None and (out is None or type(out) is np.ndarray):
        return _one(team, x, op, out, name)
    if isinstance(x, int | float | complex) and out is None and not hasattr(x, "dtype"):
        return _tree(team, np.asarray(x), op, compress, None, name).item()
    return _tree(team, x, op, compress, out, name)


def _one(team: Team, x: Any, op: Any, out: Any, name: str | None) -> Any:
    """Reduce one NumPy array; what can be known from an earlier call is not done again."""
    if type(op) is not str or not (name is None or type(name) is str):
        op = _guarded(team, lambda: _plain(op, name))
    key = (x.dtype, x.shape, op, name)
    call: _Call | None = team.calls.get(key)
    if call is None:
        call = _guarded(team, lambda: _prepare(team, key, x, op, name))
    flags = x.flags
    source = x if flags.c_contiguous else np.asarray(x, order="C")
    if out is None:
        result = np.empty(x.shape, x.dtype)
    elif out is source and flags.writeable:  # what `_target` would say, without its looks
        result = out
    else:
        result = _guarded(team, lambda: _target(x, out, ""))
    label, op, dtype = call.label, call.op, call.dtype
    team.run(loose_of(team, label).reduce, label, source, result, dtype, op, label)
    if out is not None and result is not out:
        np.copyto(out, result)
        return out
    return result


def _plain(op: Any, name: Any) -> str:
    """Return the name of an operation; mpi4py's cannot be looked up in a table."""
    if not (name is None or isinstance(name, str)):
        raise UsageError(f"allreduce: name: expected a str, got {name!r}")
    return op_name(op, "allreduce")


def _prepare(team: Team, key: Any, x: Any, op: Any, name: str | None) -> _Call:
    flatten(x, "allreduce")  # checks it
    known = op_name(op, "allreduce")
    leaf = Leaf("", x.shape, dtype_name(x))
    op_code(known, leaf.dtype_name, "allreduce")
    call = _Call(Label("allreduce", known, name, None, leaf.text()), known, leaf.dtype_name)
    if len(team.calls) >= _CALLS:
        team.calls.clear()
    team.calls[key] = call
    return call


def _guarded(team: Team, work: Callable[[], Any]) -> Any:
    """Do this member's part; where it cannot, let the others hear of it, and raise."""
    return guarded(team, "allreduce", work, lambda label: loose_of(team, label))


def _target(x: Any, out: Any, path: str) -> Any:
    """Return memory for the result of a NumPy array: `out`, or a stand-in of its shape."""
    if not isinstance(out, np.ndarray):
        raise UsageError(f"allreduce: out{path}: expected an array like x, got {type(out)!r}")
    if out.shape != x.shape or out.dtype != x.dtype or not out.flags.writeable:
        raise UsageError(
            f"allreduce: out{path}: expected a writable array of shape {x.shape} and dtype "
            f"{x.dtype}, got shape {out.shape}, dtype {out.dtype}"
            f"{'' if out.flags.writeable else ', read-only'}"
        )
    apart = out is x or not np.may_share_memory(x, out) or _same(x, out)
    return out if apart and out.flags.c_contiguous else np.empty(x.shape, x.dtype)


def _same(x: Any, out: Any) -> bool:
    """Tell whether arrays of one shape have each element at the same place."""
    there: bool = x.ctypes.data == out.ctypes.data
    return there and x.strides == out.strides


# -- trees -----------------------------------------------------------------------------------------


class _Leaves(NamedTuple):
    """A tree, taken apart; what is not on a device as NumPy arrays."""

    host: list[Any]  # NumPy arrays in C order; arrays on devices as they are
    treedef: Any
    specs: list[Leaf]
    restore: list[Callable[[Any], Any]]  # of a NumPy array to an array of the leaf's library
    outs: list[Any] | None
    near: list[int]  # numbers of those in host memory
    far: list[int]  # and on devices


def _tree(team: Team, x: Any, op: Any, compress: Any, out: Any, name: str | None) -> Any:
    known, leaves, label = _guarded(team, lambda: _take_apart(x, op, out, name, compress))
    loose = loose_of(team, label)
    results: list[Any] = [None] * len(leaves.host)

    def compressed() -> None:
        from mpiml.collectives.exchanging import reduce_compressed

        results[:] = [np.empty(h.shape, h.dtype) for h in leaves.host]
        names = [f"{name or ''}{spec.path}" for spec in leaves.specs]
        reduce_compressed(team, compress, leaves.host, results, names, known, label)

    def work() -> None:
        groups = messages(
            [leaves.specs[i].dtype_name for i in leaves.near],
            [leaves.host[i].nbytes for i in leaves.near],
        )
        for places in groups:
            group = [leaves.near[place] for place in places]
            dtype = leaves.specs[group[0]].dtype_name
            _message(loose, group, leaves.host, results, dtype, known, label)
        if leaves.far:
            _on_devices(team, loose, leaves, results, known, label)

    team.run(work if compress is None else compressed, label)
    if leaves.outs is not None:
        for number in leaves.near:
            np.copyto(leaves.outs[number], results[number])
        return out
    made = [back(result) for back, result in zip(leaves.restore, results, strict=True)]
    return unflatten(leaves.treedef, made)


def _take_apart(
    x: Any, op: Any, out: Any, name: str | None, compress: Any
) -> tuple[str, _Leaves, Label]:
    known = _plain(op, name)
    found, treedef, paths = flatten(x, "allreduce")
    specs = specs_of(found, paths)
    for spec in specs:
        op_code(
            known, spec.dtype_name, f"allreduce: leaf {spec.path}" if spec.path else "allreduce"
        )
    far = [i for i, leaf in enumerate(found) if compress is None and on_device(leaf)]
    near = [number for number in range(len(found)) if number not in set(far)]
    host = list(found)
    restore: list[Callable[[Any], Any]] = [lambda result: result] * len(found)
    for number in near:
        host[number], restore[number] = to_numpy(found[number], specs[number], "allreduce")
    outs = None if out is None else _outs(out, host, specs, treedef, near)
    # Members must agree on where the arrays are: they meet in different places.
    more = f"on devices: {', '.join(specs[i].path or 'x' for i in far)}" if far else ""
    more = more if compress is None else "compressed"
    text = "\n".join([s.text() for s in specs])
    label = Label("allreduce", known, name, None, text, more)
    return known, _Leaves(host, treedef, specs, restore, outs, near, far), label


def _on_devices(
    team: Team, loose: Any, leaves: _Leaves, results: list[Any], op: str, label: Label
) -> None:
    """Reduce the leaves that lie on devices."""
    nothing = np.empty(0, np.uint8)
    loose.reduce(nothing, nothing, "uint8", "max", label)  # here members compare
    made = reduce_arrays(
        team,
        [leaves.host[i] for i in leaves.far],
        [leaves.specs[i].path for i in leaves.far],
        op,
        None if leaves.outs is None else [leaves.outs[i] for i in leaves.far],
        label,
    )
    for number, result in zip(leaves.far, made, strict=True):
        results[number] = result


def _outs(
    out: Any, host: Sequence[Any], specs: Sequence[Leaf], treedef: Any, near: Sequence[int]
) -> list[Any]:
    """Return the arrays of `out`, those in host memory as NumPy arrays that share it, checked."""
    targets, structure, _ = flatten(out, "allreduce: out")
    if structure != treedef:
        raise UsageError(
            f"allreduce: out: expected a tree like x, {unlike(treedef, structure)}"
        )
    views = list(targets)
    for number in near:
        target, array, spec = targets[number], host[number], specs[number]
        view = target
        if family(type(target)) == "torch" and target.device.type == "cpu":
            flat = target.detach()
            if not flat.is_contiguous():
                raise UsageError(
                    f"allreduce: out{spec.path}: expected a contiguous tensor, got strides "
                    f"{tuple(target.stride())}"
                )
            if flat.is_conj() or flat.is_neg():
                raise UsageError(
                    f"allreduce: out{spec.path}: expected memory that holds the numbers, got a "
                    "view that conjugates or negates what it shows. Pass out=torch.empty_like(x)."
                )
            if flat.numel() == 1:  # contiguous whatever its stride says
                flat = flat.as_strided((1,), (1,))
            raw = flat.reshape(-1).view(arrays.namespace(target).uint8).numpy()
            view = raw.view(array.dtype).reshape(spec.shape)
        _target(array, view, spec.path)
        views[number] = view
    return views


def _message(
    loose: Any,
    group: Sequence[int],
    host: Sequence[Any],
    results: list[Any],
    dtype: str,
    op: str,
    label: Label,
) -> None:
    """Reduce the arrays of one message; several are copied together before."""
    if len(group) == 1:
        (number,) = group
        results[number] = np.empty(host[number].shape, host[number].dtype)
        loose.reduce(host[number], results[number], dtype, op, label)
        return
    together = np.concatenate([host[number].reshape(-1) for number in group])
    loose.reduce(together, together, dtype, op, label)
    at = 0
    for number in group:
        size = host[number].size
        results[number] = together[at : at + size].reshape(host[number].shape)
        at += size
