"""The careful pickler: arrays, large bytes and given values of any depth.

The pickler has reductions of its own, seen by no other pickle in the process. Memory that
does not go inside the body is appended to a list of buffers, in the order in which pickle
asks for them on arrival. Those for arrays are added when the first array can be there.
"""

import io
import pickle
from collections.abc import Callable, Set
from functools import cache
from pickle import PickleBuffer
from typing import Any

from mpiml.libraries import arrays_possible, foreign_loaded
from mpiml.payload_memory import INLINE, SLOT, copied

__all__ = ["LARGE", "Blob", "Given", "arrays_known", "careful", "pickled"]

# Bytes from this length on travel beside the body: that saves the copy into it.
LARGE = 256 * 1024


class Given:
    """A value that its sender does not change any more until it has arrived; see `give`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"give({self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _first, (self.value,)


class Blob:
    """A large bytes or bytearray on its way into the pickler, which would take it inside."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _End:
    """Stands behind a given value in the pickle: from here on, copies are made again."""

    __slots__ = ()


class _Sink:
    """What the reductions of one pickle share: the buffers, and who owns what."""

    __slots__ = ("alias", "buffers", "foreign", "given", "owned")

    def __init__(self, alias: bool, owned: Set[int]) -> None:
        self.alias = alias
        self.owned = owned
        self.buffers: list[memoryview] = []
        self.foreign = _reduce_foreign if foreign_loaded() else None
        self.given = 0

    def add(self, memory: memoryview, lent: bool = False) -> None:
        """Append a buffer: the memory itself where that is safe, else a copy."""
        self.buffers.append(memory if lent or self.alias or self.given else copied(memory))

    def take(self, buffer: PickleBuffer) -> bool:
        """Answer pickle's question whether `buffer` goes inside the body."""
        if buffer is SLOT:
            return False
        memory = buffer.raw()  # of another library, as pandas' or Arrow's
        if memory.nbytes < INLINE:
            return True
        self.add(memory)
        return False


def careful(value: Any, alias: bool, owned: Set[int]) -> tuple[bytes, list[memoryview]]:
    """Pickle any value, by cloudpickle if need be.

    Parameters
    ----------
    value
        What to pickle.
    alias
        Whether all buffers may be the memory of `value` (else only given or owned ones).
    owned
        Ids of the arrays whose memory needs no copy.

    Returns
    -------
    tuple
        The body, and the buffers.

    Raises
    ------
    Exception
        What cloudpickle raised, where neither can take it.
    """
    try:
        return _dump(_Pickler, value, alias, owned)
    except MemoryError:
        raise
    except Exception:  # any: __reduce__ and __getstate__ are the user's
        return _dump(_cloud_pickler(), value, alias, owned)


def pickled(value: Any) -> bytes:
    """Pickle a value into bytes alone, by cloudpickle if need be."""
    try:
        return pickle.dumps(value, 5)
    except MemoryError:
        raise
    except Exception:
        import cloudpickle

        return bytes(cloudpickle.dumps(value, 5))


def _dump(
    make: Any, value: Any, alias: bool, owned: Set[int]
) -> tuple[bytes, list[memoryview]]:
    if _reduce_foreign is None:
        arrays_known()
    sink = _Sink(alias, owned)
    file = io.BytesIO()
    pickler = make(file, 5, buffer_callback=sink.take)
    pickler.sink = sink
    pickler.dump(value)
    return file.getvalue(), sink.buffers


class _Pickler(pickle.Pickler):
    sink: _Sink

    def reducer_override(self, obj: Any) -> Any:
        reduce = _REDUCE.get(type(obj))
        if reduce is not None:
            return reduce(self.sink, obj)
        foreign = self.sink.foreign
        return NotImplemented if foreign is None else foreign(self.sink, obj)


@cache
def _cloud_pickler() -> Any:
    import sys

    import cloudpickle

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
        sink: _Sink

        def reducer_override(self, obj: Any) -> Any:
            answer = _Pickler.reducer_override(self, obj)
            if answer is not NotImplemented:
                return answer
            # All ranks run the same file. By value, as cloudpickle takes what __main__
            # defines, a class would arrive as another one and isinstance would fail.
            name = getattr(obj, "__qualname__", None)
            if name is not None and getattr(obj, "__module__", None) == "__main__":
                found: Any = sys.modules["__main__"]
                for part in name.split("."):
                    found = getattr(found, part, None)
                if found is obj:
                    return NotImplemented
            return super().reducer_override(obj)

    return CloudPickler


def _reduce_given(sink: _Sink, given: Given) -> Any:
    # Pickle saves what is returned here in order: the value, then the end of it.
    sink.given += 1
    value = given.value
    if type(value) in (bytes, bytearray) and len(value) >= LARGE:
        value = Blob(value)
    return _first, (value, _End())


def _reduce_end(sink: _Sink, _: _End) -> Any:
    sink.given -= 1
    return bool, ()


def _reduce_blob(sink: _Sink, blob: Blob) -> Any:
    value = blob.value
    sink.add(memoryview(value), type(value) is bytes)
    return type(value), (SLOT,)


def _reduce_memoryview(sink: _Sink, view: memoryview) -> Any:
    memoryview(bytearray(view.itemsize)).cast("B").cast(view.format)  # type: ignore[call-overload]
    more = (view.format, view.shape)
    if view.nbytes < INLINE or not view.c_contiguous:
        return _view, (bytearray(view.tobytes()), *more)
    sink.add(view.cast("B"))
    return _view, (SLOT, *more)


_REDUCE: dict[type, Callable[[Any, Any], Any]] = {
    Given: _reduce_given,
    _End: _reduce_end,
    Blob: _reduce_blob,
    memoryview: _reduce_memoryview,
}
_reduce_foreign: Callable[[Any, Any], Any] | None = None


def arrays_known() -> bool:
    """Return whether the reductions for arrays are here; fetches them if any can be needed."""
    global _reduce_foreign
    if _reduce_foreign is None and arrays_possible():
        from mpiml.payload_arrays import REDUCE, reduce_foreign

        _REDUCE.update(REDUCE)
        _reduce_foreign = reduce_foreign
    return _reduce_foreign is not None


def _first(value: Any, *_: Any) -> Any:
    return value


def _view(buffer: Any, code: str, shape: tuple[int, ...]) -> memoryview:
    flat = memoryview(buffer)
    if flat.readonly:
        flat = memoryview(bytearray(flat))
    if 0 in shape:  # cannot be cast to more dimensions
        return flat.cast(code)  # type: ignore[call-overload, no-any-return]
    return flat.cast(code, shape)  # type: ignore[call-overload, no-any-return]
