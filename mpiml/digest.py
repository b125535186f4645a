"""The digest that all ranks compare before anything starts, and `stable_hash`.

`describe` lists what must be equal on all ranks as (name, text) lines, `digest` makes 32
bytes of them, and where these differ the lines are exchanged and `first_difference` says
what to look at. Nothing in the lines depends on addresses, ids, or string hashes.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from mpiml.errors import UsageError
from mpiml.fingerprint import Describer, own_path, sha256
from mpiml.graph import Member, arguments
from mpiml.program import Program

try:  # the module behind hashlib, which would load OpenSSL
    from _blake2 import blake2b
except ImportError:  # pragma: no cover - other builds of Python
    from hashlib import blake2b

__all__ = ["describe", "digest", "first_difference", "stable_hash"]

_NAMED: Final = 5  # ranks that a message lists
_ABSENT: Final = "absent"


def describe(
    program: Program, file: str | os.PathLike[str] | None = None
) -> list[tuple[str, str]]:
    """Return what must be equal on all ranks, the likelier causes first.

    Parameters
    ----------
    program : Program
        As built on this rank.
    file : path, optional
        The file that built it. With it, the file and the modules that were imported from
        below its folder count by content (installed packages never do).

    Returns
    -------
    list of (name, text)
        Names are unique. Versions come first, then files, then the graph.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    folder = None if file is None else os.path.dirname(os.path.abspath(file))
    describer = Describer(folder)
    lines = _versions()
    if file is not None and folder is not None:
        lines.extend(_sources(os.path.abspath(file), folder))
    lines.append(("name of the program", program.name))
    for index, role in enumerate(program.roles):
        lines.append((f"role {index}", f"{role.label}, replicas {role.replicas!r}"))
    lines.extend((f"placement of {unit.label}", repr(unit.placement)) for unit in program.units)
    for topic in program.topics:
        codec = f"encode {describer.text(topic.encode)}, decode {describer.text(topic.decode)}"
        text = f"{topic.name!r}, {topic.policy!r}, deliver {topic.deliver!r}, {codec}"
        text += "" if topic.array is None else f", {topic.array!r}"
        lines.append((f"topic {topic.number}", text))
    for role in program.roles:
        for number, member in enumerate(role.members):
            where = role.label if len(role.members) == 1 else f"{role.label} (part {number})"
            lines.extend(_member(describer, member, where))
    return lines


def digest(lines: Iterable[tuple[str, str]]) -> bytes:
    """Return 32 bytes that are equal where the lines are."""
    total = sha256()
    for line in lines:
        for part in line:
            data = part.encode("utf-8", "backslashreplace")
            total.update(b"%d:" % len(data))
            total.update(data)
    return bytes(total.digest())


def first_difference(
    lines_of_ranks: Sequence[Sequence[tuple[str, str]]], hosts: Sequence[str] = ()
) -> str:
    """Return which line differs first, what it says where, and which ranks are odd.

    Parameters
    ----------
    lines_of_ranks : sequence of lists of (name, text)
        What `describe` returned on each rank, in rank order.
    hosts : sequence of str
        Host of each rank: named where the odd ranks are whole hosts.

    Returns
    -------
    str
        One sentence, for instance ``"argument 1 of worker" is 3 on rank 2, and 4 on the
        other 3 ranks``; empty where all are equal. Most ranks are right, on a tie the
        lowest.
    """
    tables = _tables(lines_of_ranks)
    names: dict[str, None] = {}
    for table, _ in sorted(tables, key=lambda one: (-len(one[1]), one[1])):
        names.update(dict.fromkeys(table))
    for name in names:
        groups: dict[str, list[int]] = {}
        for table, ranks in tables:
            groups.setdefault(table.get(name, _ABSENT), []).extend(ranks)
        if len(groups) > 1:
            found = {text: sorted(ranks) for text, ranks in groups.items()}
            return _difference(name, found, hosts)
    return ""


def _tables(
    lines_of_ranks: Sequence[Sequence[tuple[str, str]]],
) -> list[tuple[dict[str, str], list[int]]]:
    """Return the tables that differ, each with its ranks; of many ranks most share one list."""
    alike: dict[int, list[int]] = {}
    for rank, lines in enumerate(lines_of_ranks):
        alike.setdefault(id(lines), []).append(rank)
    tables: list[tuple[dict[str, str], list[int]]] = []
    for ranks in alike.values():
        table = dict(lines_of_ranks[ranks[0]])
        same = next((held for other, held in tables if other == table), None)
        if same is None:
            tables.append((table, ranks))
        else:
            same.extend(ranks)
    return [(table, sorted(ranks)) for table, ranks in tables]


def stable_hash(value: Any) -> int:
    """Return a hash that is the same in every process, unlike Python's of a string.

    Equal values have equal hashes: 1, 1.0 and True, equal dicts and sets in any order, a
    NumPy scalar and its Python value.

    Parameters
    ----------
    value : str, bytes, number, None, or tuples, lists, dicts and sets of these
        What to hash.

    Returns
    -------
    int
        64 bits, not negative.

    Raises
    ------
    UsageError
        It holds a value of another type.
    """
    try:
        data = _raw(value)
    except RecursionError:
        raise UsageError(
            "stable_hash: the value holds itself, or is nested too deep."
        ) from None
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _versions() -> list[tuple[str, str]]:
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        ("version of Python", f"{sys.implementation.name} {python}"),
        ("version of mpiml", str(getattr(sys.modules.get("mpiml"), "__version__", "unknown"))),
        ("version of numpy", _numpy_version()),
    ]


def _numpy_version() -> str:
    """Return NumPy's version, from its file where this rank has not loaded it (others may)."""
    if "numpy" not in sys.modules:
        from importlib.util import find_spec

        spec = find_spec("numpy")
        if spec is None or spec.origin is None:
            return "not installed"
        file = os.path.join(os.path.dirname(spec.origin), "version.py")
        with contextlib.suppress(OSError), open(file, encoding="utf-8") as stream:
            found = re.search(r'^version = "([^"]+)"$', stream.read(), re.MULTILINE)
            if found is not None:
                return found[1]
    import numpy as np

    return str(np.__version__)


def _sources(file: str, folder: str) -> list[tuple[str, str]]:
    """Return the content of the program's file and of the modules below its folder."""
    paths = {file}
    roots = {folder, os.path.realpath(folder)}
    ours = os.path.dirname(__file__)  # counts by version
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(path, str) or path.startswith(ours):
            continue
        if any(own_path(path, root) for root in roots):
            paths.add(path)
    named: dict[str, str] = {}
    for path in paths:
        for root in roots:
            if path.startswith(root.rstrip(os.sep) + os.sep):
                named[os.path.relpath(path, root)] = path
                break
    first = os.path.basename(file)
    return [
        (f"file {name}", _content(named[name], required=name == first))
        for name in sorted(named, key=lambda name: (name != first, name))
    ]


def _content(path: str, required: bool) -> str:
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except OSError as error:
        if required:
            raise
        return f"cannot be read: {error.strerror}"
    return f"{len(data)} bytes, sha256 {sha256(data).hexdigest()[:16]}"


def _member(describer: Describer, member: Member, where: str) -> list[tuple[str, str]]:
    node, settings, replicas = member
    lines = [
        (f"kind of {where}", f"{node.kind}, replicas {replicas!r}"),
        (
            f"settings of {where}",
            ", ".join(f"{k}={v!r}" for k, v in settings._asdict().items()),
        ),
        (f"code of {where}", describer.callable(node.callable)),
    ]
    lines.extend((f"{name} of {where}", describer.text(v)) for name, v in arguments(node))
    return lines


def _difference(name: str, groups: dict[str, list[int]], hosts: Sequence[str]) -> str:
    texts = sorted(groups, key=lambda text: (-len(groups[text]), groups[text][0]))
    usual, odd = texts[0], texts[1:]
    parts = [f"{text} on {_ranks(groups[text], hosts)}" for text in odd[:3]]
    if len(odd) > 3:
        parts.append(f"{len(odd) - 3} other values on other ranks")
    count = len(groups[usual])
    rest = f"the other {count} ranks" if count > _NAMED else _ranks(groups[usual], ())
    return f'"{name}" is {", ".join(parts)}, and {usual} on {rest}'


def _ranks(ranks: list[int], hosts: Sequence[str]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    from mpiml.whereabouts import whole_hosts

    there = whole_hosts(frozenset(ranks), hosts) if hosts else []
    place = f" (host {', '.join(there[:_NAMED])})" if there else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}{place}"


def _raw(value: Any) -> bytes:
    """Return bytes that are equal where the values are, and different where they are not."""
    encode = _ENCODERS.get(type(value))
    if encode is None:
        encode = _encoder_of(value)
    return encode(value)


def _encoded(value: Any) -> bytes:
    """Return the same with its length, so that parts can stand side by side."""
    data = _raw(value)
    return b"%d:" % len(data) + data


def _encoder_of(value: Any) -> Callable[[Any], bytes]:
    """Return the encoder of a value of a subclass, or of a NumPy scalar."""
    if hasattr(value, "dtype") and hasattr(value, "item") and not hasattr(value, "__len__"):
        return lambda scalar: _raw(scalar.item())
    for cls in type(value).__mro__:
        if cls in _ENCODERS:
            return _ENCODERS[cls]
    if hasattr(value, "as_integer_ratio"):  # Fraction, Decimal
        return _real
    raise UsageError(
        f"stable_hash: a value of type {type(value).__qualname__} has no hash that is the same "
        "in every process. It takes str, bytes, numbers, None, and tuples, lists, dicts and "
        "sets of these."
    )


def _real(value: Any) -> bytes:
    try:
        over, under = value.as_integer_ratio()
    except (OverflowError, ValueError):  # infinite, or not a number
        return b"n" + str(float(value)).encode()
    return b"n%x/%x" % (over, under)


def _complex(value: complex) -> bytes:
    return (
        _real(value.real) if value.imag == 0 else _real(value.real) + b"j" + _real(value.imag)
    )


def _sequence(tag: bytes) -> Callable[[Iterable[Any]], bytes]:
    return lambda items: tag + b"".join([_encoded(item) for item in items])


def _dict(value: dict[Any, Any]) -> bytes:
    items = sorted([_encoded(key) + _encoded(item) for key, item in value.items()])
    return b"d" + b"".join(items)


def _set(value: Iterable[Any]) -> bytes:
    return b"{" + b"".join(sorted([_encoded(item) for item in value]))


_ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): lambda _: b"0",
    str: lambda text: b"s" + text.encode("utf-8", "surrogatepass"),
    bytes: lambda data: b"b" + bytes(data),
    bytearray: lambda data: b"b" + bytes(data),
    bool: _real,
    int: _real,
    float: _real,
    complex: _complex,
    tuple: _sequence(b"("),
    list: _sequence(b"["),
    dict: _dict,
    set: _set,
    frozenset: _set,
}
