"""`CacherNode`: a service that answers reads of another one from a cache.

Its methods are those of the target, so its clients cannot tell the difference. Each cached method
has one call to the target under way at most, which all readers that come meanwhile wait for; see
`mpiml.roles.cache` for what is given and kept.
"""

import threading
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, Final, NoReturn

from mpiml.errors import ServiceGoneError, Stopped, UsageError
from mpiml.nodes import ServiceNode, is_stream, served_methods
from mpiml.payload import BORROW, give, pack_call
from mpiml.references import Handle, HandleSequence
from mpiml.roles.cache import Asked, Cache
from mpiml.scope import current_scope, enter, leave
from mpiml.seconds import LONGEST, as_seconds
from mpiml.settings import Fill
from mpiml.waits import Wait

__all__ = ["CacherNode"]

_clock = time.monotonic  # that of the engine's deadlines
_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str})


class CacherNode(ServiceNode):
    """Answers calls of another service from a cache: many readers cost the target few calls.

    Its client has the methods of the target's client. Streams, and what `methods` leaves out, are
    passed on. An error of the target goes to the readers that wait for it, and is not kept.

    Parameters
    ----------
    target : Handle
        Of one service.
    refresh : float, optional
        Seconds, less than `stale`: answers that are read again are asked for anew at this age, in
        the background, so that their readers do not wait.
    stale : float
        Seconds, or infinity: no reader gets an answer that was asked of the target earlier than
        this before the reader's call was taken up.
    methods : iterable of str, optional
        Which methods to cache; without it all, streams apart.
    max_entries : int
        How many answers are kept; those not read for longest go.

    Raises
    ------
    UsageError
        `target` is no handle of one service, or a setting is wrong.
    """

    kind = "CacherNode"
    __slots__ = ()

    def __init__(
        self,
        target: Any,
        refresh: float | None = None,
        stale: float = 1.0,
        *,
        methods: Iterable[str] | None = None,
        max_entries: int = 1024,
    ) -> None:
        refresh, stale = _times(refresh, stale)
        if isinstance(max_entries, bool) or not isinstance(max_entries, int) or max_entries < 1:
            raise UsageError(
                f"CacherNode: max_entries: expected at least 1, got {max_entries!r}"
            )
        cls, served = _served(target)
        cached = _cached(cls, served, methods)
        settings = {"refresh": refresh, "stale": stale, "max_entries": max_entries}
        super().__init__(_class_for(cls, served, cached), target, tuple(cached), **settings)

    def configure(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the methods are those of the target it was made with."""
        raise UsageError(
            f"{self.home or repr(self)}: configure() is not for a CacherNode, which takes its "
            "methods from the target it is made with. Add the target first."
        )


def _times(refresh: Any, stale: Any) -> tuple[float | None, float]:
    """Return both in seconds; an answer may be kept for ever, but not renewed after that."""
    longest = _above_zero("stale", stale)
    every = None if refresh is None else _above_zero("refresh", refresh)
    if every is not None and every >= longest:
        raise UsageError(
            f"CacherNode: expected refresh < stale, got refresh={refresh!r} and stale={stale!r}: "
            "an answer has to be renewed before it is stale"
        )
    return None if every is None else min(every, LONGEST), longest


def _above_zero(name: str, value: Any) -> float:
    seconds = as_seconds(value)
    if not seconds:
        raise UsageError(f"CacherNode: {name}: expected seconds above 0, got {value!r}")
    return seconds


def _served(target: Any) -> tuple[type, dict[str, Callable[..., Any]]]:
    """Return the class of the target, and the methods it serves."""
    if isinstance(target, HandleSequence):
        raise UsageError(
            f"CacherNode: target: expected the handle of one service, got {target!r}. Give one of "
            "them, as in CacherNode(handles[0]); several want a CacherNode each."
        )
    if not isinstance(target, Handle):
        raise UsageError(
            f"CacherNode: target: expected the handle of a service, got {type(target).__name__}. "
            "Give what program.add_node(mpiml.ServiceNode(...)) returned."
        )
    program: Any = target.program
    place = target.index
    for member in program.roles[target.role_index].members:
        if isinstance(member.replicas, Fill) or place < member.replicas:
            break
        place -= member.replicas
    if not isinstance(member.node, ServiceNode):
        raise UsageError(
            f"CacherNode: target: expected a service, got {target!r}, a {member.node.kind}: it "
            "has no methods to cache"
        )
    return member.node.cls, served_methods(member.node.cls, member.settings.allow)


def _cached(
    cls: type, served: dict[str, Callable[..., Any]], methods: Iterable[str] | None
) -> list[str]:
    """Return which methods are answered from the cache."""
    streams = {name for name, method in served.items() if is_stream(method)}
    if methods is None:
        return sorted(served.keys() - streams)
    if isinstance(methods, str):
        raise UsageError(f"CacherNode: methods: expected a list of names, got {methods!r}")
    names = sorted(set(methods))
    for name in names:
        if name not in served:
            raise UsageError(
                f"CacherNode: methods: {cls.__qualname__} serves no {name!r}; served are: "
                f"{', '.join(served) or 'none'}"
            )
        if name in streams:
            raise UsageError(
                f"CacherNode: methods: {cls.__qualname__}.{name} is a generator: streams are passed "
                "on, not cached. Leave it out."
            )
    return names


def _class_for(cls: type, served: dict[str, Callable[..., Any]], cached: list[str]) -> type:
    """Return a class with the target's methods."""
    members: dict[str, Any] = {"__module__": __name__, "__qualname__": cls.__qualname__}
    for name, method in served.items():
        if is_stream(method):
            members[name] = _streaming(name)
        else:
            members[name] = (_reading if name in cached else _passing)(name)
        members[name].__name__ = name
        members[name].__qualname__ = f"{cls.__qualname__}.{name}"
        members[name].__doc__ = method.__doc__
    return type(cls.__name__, (_Cacher,), members)


def _reading(name: str) -> Callable[..., Any]:
    def read(self: "_Cacher", /, *args: Any, **kwargs: Any) -> Any:
        return self._read(name, args, kwargs)

    return read


def _passing(name: str) -> Callable[..., Any]:
    def call(self: "_Cacher", /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._target, name)(*args, **kwargs)

    return call


def _streaming(name: str) -> Callable[..., Any]:
    def stream(self: "_Cacher", /, *args: Any, **kwargs: Any) -> Any:
        yield from getattr(self._target.stream, name)(*args, **kwargs)

    return stream


class _Call(Asked):
    """A call to the target, and those who wait for it."""

    def __init__(self, key: bytes, made: float, call: Any, renews: bool = False) -> None:
        super().__init__(key, made, renews)
        self.call = call  # name, args, kwargs
        self.future: Any = None
        self.error: BaseException | None = None
        self.settled = False
        self.waits: list[Wait] = []
        self.decoding = threading.Lock()


class _Nap(Wait):
    """Waits until something is to be renewed."""

    __slots__ = ()

    patient = True  # need not drive: see Driver


class _Cacher:
    """The service: one for each replica. Its public methods come with `_class_for`."""

    def __init__(
        self,
        target: Any,
        cached: tuple[str, ...],
        *,
        refresh: float | None,
        stale: float,
        max_entries: int,
    ) -> None:
        where = target.__dict__["_target"]
        self._target = target
        self._title = where.title
        self._engine = where.engine
        self._scope = current_scope()
        self._cache: Cache[_Call] = Cache(stale, refresh, max_entries)
        self._lock = threading.Lock()
        self._nap: _Nap | None = None
        self._renews = False  # the thread has been started

    def _read(self, name: str, args: Any, kwargs: Any) -> Any:
        key = _key(name, args, kwargs)
        with self._lock:
            now = _clock()  # under the lock: questions are noted in their order
            asked = self._cache.read(key, now)
            new = asked is None
            if asked is None:
                asked = _Call(key, now, (name, args, kwargs))
                self._cache.begin(asked)
        if new:
            self._send(asked)
        elif asked.reads == 1:
            self._rouse()
        value = self._value(asked)
        return value if type(value) in _PLAIN else give(value)

    def _send(self, asked: _Call) -> None:
        name, args, kwargs = asked.call
        if self._cache.refresh is None:
            asked.call = None  # nobody needs the arguments again
        try:
            asked.future = getattr(self._target.futures, name)(*args, **kwargs)
        except BaseException as error:
            asked.error = error
            if not isinstance(error, Exception):  # a stop, which is not for those who wait
                asked.error = ServiceGoneError(f"{self._title}: the program is stopping")
            self._settle(asked)
            raise
        asked.future.when_done(lambda _: self._settle(asked))

    def _settle(self, asked: _Call) -> None:
        """Note the end of a call; runs on the thread that notices it, so it decodes nothing."""
        good = asked.error is None and not asked.future._failed
        with self._lock:
            self._cache.finish(asked, good)
            asked.settled = True
            waits, asked.waits = asked.waits, []
        for wait in waits:
            self._engine.fulfil(wait)
        if asked.reads or asked.renews:
            self._rouse()

    def _value(self, asked: _Call) -> Any:
        wait: Wait | None = None
        with self._lock:
            if not asked.settled:
                wait = Wait(f"{self._title}, asked by a cacher")
                asked.waits.append(wait)
        if wait is not None:
            self._engine.wait(wait, None, current_scope(required=False))
        if asked.error is not None:
            raise asked.error
        try:
            with asked.decoding:
                return asked.future.result()
        except BaseException:
            with self._lock:
                self._cache.drop(asked)  # it came, but cannot be read
            raise

    # -- renewals ------------------------------------------------------------------------------

    def _rouse(self) -> None:
        """Let the thread that renews look at what there is."""
        if self._cache.refresh is None:
            return
        with self._lock:
            nap, start = self._nap, not self._renews
            self._renews = True
        if start:
            name = f"mpiml renewals of {self._title}"
            threading.Thread(target=self._renew, name=name, daemon=True).start()
        elif nap is not None:
            self._engine.fulfil(nap)

    def _renew(self) -> None:
        scope = self._scope
        assert scope is not None
        token = enter(scope)
        try:
            while True:
                with self._lock:
                    due = self._cache.due(_clock())
                for old in due:
                    self._ask_again(old)
                nap = _Nap(f"{self._title}: when its answers are to be renewed")
                with self._lock:
                    self._nap = nap
                    at = self._cache.next_due()
                # no scope: it is no wait of the node's body, which would look as if it hung
                self._engine.wait(nap, at, None)
        except (ServiceGoneError, Stopped):
            return  # the program ends
        finally:
            leave(token)

    def _ask_again(self, old: _Call) -> None:
        with self._lock:
            asked = _Call(old.key, _clock(), old.call, renews=True)
            self._cache.begin(asked)
        try:
            self._send(asked)
        except Exception:
            if self._engine.closed:
                raise
            # else it is told to those who wait, and tried again after another `refresh`


def _key(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return what is equal for calls with equal arguments, as they are pickled."""
    encoding, body, buffers = pack_call(args, dict(sorted(kwargs.items())), BORROW)
    total = sha256(name.encode())
    parts: list[Any] = [bytes([encoding]), body, *buffers]
    for part in parts:
        total.update(b"%d:" % len(part))
        total.update(part)
    return total.digest()
