"""Exceptions as values, and what to say about a value that cannot be sent."""

import pickle
from collections.abc import Iterator
from typing import Any

from mpiml.errors import RemoteError, UsageError
from mpiml.payload_pickler import Given, careful, pickled

__all__ = ["dump_error", "load_error", "refusal"]

_DEPTH = 30  # how far the search for a culprit goes down


def dump_error(error: BaseException) -> bytes:
    """Pickle an exception, its notes and, for where it does not load, its name and text.

    Attributes that cannot be pickled are left out; `__cause__` and `__traceback__` too.
    """
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return pickle.dumps((_loadable(error), name, _text(error), notes), 5)


def load_error(body: Any) -> BaseException:
    """Rebuild what `dump_error` packed; a `RemoteError` where that fails. Never raises."""
    try:
        blob, name, text, notes = pickle.loads(body)
    except BaseException as wrong:  # a reply that is lost hangs its caller
        return RemoteError(f"an error arrived that cannot be read: {wrong!r}")
    error = _load(blob) or RemoteError(f"{name}: {text}" if text else name)
    if notes and not getattr(error, "__notes__", None):
        for note in notes:
            error.add_note(note)
    return error


def refusal(value: Any, what: str, error: Exception, call: bool = False) -> UsageError:
    """Return the error that says which part of `value` cannot be sent, and why.

    Parameters
    ----------
    value
        What neither pickle nor cloudpickle takes; of a call, its arguments and keywords.
    what
        What the value is to the user ("the result").
    error
        What cloudpickle said of it.
    call
        Whether `value` is the pair of arguments and keywords of a call.
    """
    if call:
        parts = [(f"argument {i + 1}", part) for i, part in enumerate(value[0])]
        parts += [(f"argument {name!r}", part) for name, part in value[1].items()]
        for name, part in parts:
            reason = _reason(part)
            if reason is not None:
                what, value, error = name, part, reason
                break
    path, reason = _culprit(value, error)
    return UsageError(
        f"{' -> '.join([what, *path])}: {reason}. Send plain data, arrays or objects that "
        "pickle takes, and build locks, files and connections inside the node"
    )


def _loadable(error: BaseException) -> bytes | None:
    """Pickle `error` so that it loads again: whole, or without its constructor and some state."""
    for attempt in (_whole, _bare):
        try:
            blob = pickled(attempt(error))
        except Exception:  # whatever the user's class does, there is the text
            continue
        if type(_load(blob)) is type(error):
            return blob
    return None


def _whole(error: BaseException) -> Any:
    return error


def _bare(error: BaseException) -> Any:
    state = {name: part for name, part in vars(error).items() if _reason(part) is None}
    return _Bare(type(error), error.args, state)


class _Bare:
    """Pickles as an exception of this class, arguments and attributes."""

    def __init__(self, kind: type, args: tuple[Any, ...], state: dict[str, Any]) -> None:
        self.made = (kind, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, self.made


def _remake(kind: Any, args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    # Not kind(*args): its __init__ may take other arguments than it hands to Exception.
    error: BaseException = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


def _load(blob: bytes | None) -> BaseException | None:
    if blob is None:
        return None
    try:
        error = pickle.loads(blob)
    except BaseException:  # the constructor of the user's class runs in there
        return None
    return error if isinstance(error, BaseException) else None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as wrong:  # a broken __str__ must not hide the error
        return f"(its text raised {wrong!r})"


def _reason(value: Any) -> Exception | None:
    """Return why `value` cannot be pickled, or None if it can."""
    try:
        careful(value, True, frozenset())
    except Exception as error:  # __reduce__ and __getstate__ are the user's
        return error
    return None


def _culprit(value: Any, error: Exception) -> tuple[list[str], Exception]:
    """Go down to the smallest part that fails; the way there, and what it says."""
    path: list[str] = []
    seen = {id(value)}
    while len(path) < _DEPTH and not isinstance(error, UsageError):  # a client explains itself
        for step, part in _parts(value):
            if id(part) in seen:
                continue
            reason = _reason(part)
            if reason is not None:
                path.append(step)
                seen.add(id(part))
                value, error = part, reason
                break
        else:
            break
    return path, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is Given:
        value = value.value
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
            yield f"key {key!r}", key
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield f"[{i}]", part
    elif isinstance(value, set | frozenset):
        for part in value:
            yield f"element {part!r}", part
    for name, part in getattr(value, "__dict__", {}).items():
        yield f".{name}", part
    names = getattr(getattr(value, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(value, "__closure__", None) or (), strict=False):
        try:
            yield f"variable {name!r} of {value.__qualname__}", cell.cell_contents
        except ValueError:  # a cell that is still empty
            continue
    for name in ("__self__", "func", "args", "keywords"):  # bound methods and partials
        if not isinstance(value, type) and hasattr(type(value), name):
            yield f".{name}", getattr(value, name)
