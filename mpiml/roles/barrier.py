"""`Barrier`: a place where nodes of any roles wait for each other."""

import threading
import time
from functools import partial
from typing import Any

from mpiml.context import context
from mpiml.errors import DeadlineError, ServiceGoneError, UsageError
from mpiml.handles import find
from mpiml.hosting import LEFT, has_body
from mpiml.payload import SNAPSHOT
from mpiml.references import Handle
from mpiml.scope import current_scope
from mpiml.seconds import timeout_seconds
from mpiml.target import Target
from mpiml.waits import Wait
from mpiml.wire import FLAG_NESTED, FLAG_STREAM

__all__ = ["Barrier", "Meetings", "Round"]

_SHOWN = 8  # nodes that a message names


class Round:
    """One meeting, from the first who comes until all are there."""

    def __init__(self) -> None:
        self.there: dict[int, Any] = {}  # by vertex: what to wake
        self.complete = False


class Meetings:
    """Who is where: meetings by name, each of the same nodes. Pure."""

    def __init__(self, parties: dict[int, str]) -> None:
        self.parties = parties  # title by vertex
        self._left: set[int] = set()
        self._open: dict[str, Round] = {}

    def arrive(self, name: str, who: int, wait: Any) -> Round:
        """Note that a node has come; the meeting is complete with the last one.

        Raises
        ------
        UsageError
            It is there already.
        """
        meeting = self._open.setdefault(name, Round())
        if who in meeting.there:
            raise UsageError(
                f"wait({name!r}): {self.parties[who]} waits there already, and a node counts "
                "once. Wait on one thread of it, or under another name."
            )
        meeting.there[who] = wait
        if len(meeting.there) == len(self.parties):
            meeting.complete = True
            del self._open[name]  # who comes next begins another one
        return meeting

    def withdraw(self, name: str, who: int, meeting: Round) -> list[str] | None:
        """Note that a node has given up; return who was not there, None if it is complete."""
        if meeting.complete:
            return None
        missing = [
            title for vertex, title in self.parties.items() if vertex not in meeting.there
        ]
        del meeting.there[who]
        if not meeting.there:
            del self._open[name]
        return missing

    def leave(self, who: int) -> None:
        """Note that a node will not come any more."""
        self._left.add(who)

    def gone(self, meeting: Round) -> list[str]:
        """Return who is not there and will not come any more."""
        return [self.parties[who] for who in sorted(self._left - meeting.there.keys())]

    def waiting(self) -> list[Any]:
        """Return what is to be woken, of all."""
        return [wait for meeting in self._open.values() for wait in meeting.there.values()]


class Barrier:
    """A service where the nodes that hold its handle wait for each other.

    Collective over the nodes that were given the handle, of whatever roles; the service itself and
    all other nodes take no part. Add it as ``ServiceNode(mpiml.roles.Barrier)``.
    """

    def __init__(self) -> None:
        node = context()._node
        self._title = node.title
        self._engine = node.runtime.engine
        self._meetings = Meetings(_holders(node))
        self._lock = threading.Lock()
        self._caller = threading.local()
        self._ending = node.runtime.ending
        vertices = node.runtime.vertices
        self._unwatched = [v for v in self._meetings.parties if has_body(vertices[v].node)]
        self._waits_for_stop = False  # a thread does
        self._returned: list[int] = []  # who has, and may have since the program stops
        self._asking = False
        self._over = False
        # who calls stands in the request only
        node.server.starters[b"wait"] = self._start

    def wait(self, name: str = "", timeout: float | None = None) -> None:
        """Wait until all nodes that hold the handle wait under this name; then begin anew.

        Collective over the nodes that hold the handle, of whatever roles: each takes part once in
        every meeting, from any of its threads.

        Parameters
        ----------
        name : str
            Of the meeting: nodes at different points of a program do not meet by mistake.
        timeout : float, optional
            Seconds. Who gives up is no longer there; the others go on waiting for it. None, and
            infinity: no deadline.

        Raises
        ------
        DeadlineError
            Not all have come in time; it names those that are missing.
        ServiceGoneError
            A node that is missing has returned, and no stop had been asked for; it names it.
        UsageError
            The caller does not hold the handle, or waits under this name already; `timeout` is no
            number >= 0.
        """
        who = self._who()
        seconds = timeout_seconds(f"{self._title}.wait", timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        self._watch()  # what it raises leaves nobody behind in a meeting
        wait = Wait(f"{self._title}: the others at {name!r}")
        with self._lock:
            if self._over:
                raise self._gone()
            meeting = self._meetings.arrive(name, who, wait)
            if self._meetings.gone(meeting):
                wait.ready = True
        if meeting.complete:
            for other in meeting.there.values():
                self._engine.fulfil(other)
            return
        self._look()
        scope = current_scope(required=False)
        while True:
            in_time = self._engine.wait(wait, deadline, scope)
            with self._lock:
                gone = self._meetings.gone(meeting)
                if in_time and not (meeting.complete or self._over or gone):
                    wait = meeting.there[who] = Wait(wait.about)
                    continue
                there = len(meeting.there)
                missing = self._meetings.withdraw(name, who, meeting)
                if missing is None:
                    return
                if self._over:
                    raise self._gone()
            break
        where = f"{self._title}.wait({name!r}): expected {len(self._meetings.parties)} nodes"
        if gone:
            raise ServiceGoneError(
                f"{where}, got {there}; not to come any more: {_names(gone)}, which returned. Let "
                "all nodes wait equally often, or give it to fewer nodes."
            )
        raise DeadlineError(
            f"{where} within {seconds:g} s, got {there}; missing: {_names(missing)}. See where "
            "they are, or wait longer."
        )

    def _who(self) -> int:
        """Return who calls; refuse a caller that takes no part."""
        who: int | None = getattr(self._caller, "vertex", None)
        parties = self._meetings.parties
        if who is None or who not in parties:
            raise UsageError(
                f"{self._title}.wait: expected a call of a node that holds the barrier's handle "
                f"({_names(list(parties.values())) or 'none does'}). Pass it the handle."
            )
        return who

    def _start(self, server: Any, request: Any, method: Any, scope: Any) -> None:
        """Run `wait` for a request, and answer."""
        if request.frame.flags & FLAG_STREAM:
            raise UsageError(f"{self._title}.wait: expected a plain call, got client.stream")
        args, kwargs = request.arguments()
        self._caller.vertex = request.frame.source
        try:
            method(*args, **kwargs)
        except _StoppingError:
            if not request.frame.flags & FLAG_NESTED:
                return  # a body: it leaves its wait by `Stopped`, which an answer would forestall
            raise
        finally:
            del self._caller.vertex
        server.answer(request, None)

    def _gone(self) -> "_StoppingError":
        return _StoppingError(f"{self._title}: the program is stopping, so not all will come")

    def _watch(self) -> None:
        """Once somebody waits: see to it that the stop ends that, and the return of others."""
        with self._lock:
            start, self._waits_for_stop = not self._waits_for_stop, True
        try:
            if start:
                name = f"mpiml stop of {self._title}"
                bound = context().bind(self._wait_for_stop)
                threading.Thread(target=bound, name=name, daemon=True).start()
        except BaseException:
            with self._lock:
                self._waits_for_stop = False  # the next who waits tries again
            raise
        while True:
            with self._lock:
                if not self._unwatched:
                    return
                vertex = self._unwatched.pop()
            try:
                self._await_return(vertex)
            except BaseException:
                with self._lock:
                    self._unwatched.append(vertex)
                raise

    def _await_return(self, vertex: int) -> None:
        node = context()._node
        rank = node.runtime.ranks[vertex]
        title = self._meetings.parties[vertex]
        target = Target(self._engine, node.vertex, vertex, rank, title, None)
        left = target.submit(LEFT, SNAPSHOT, (), {})[0]
        left.when_done(partial(self._on_left, vertex))

    def _on_left(self, vertex: int, left: Any) -> None:
        if left.exception() is not None or not left.result():
            return  # it has failed, or was told to stop: that ends the others too
        with self._lock:
            self._returned.append(vertex)
        self._look()

    def _look(self) -> None:
        """While somebody waits: learn whether who has returned did so since the program stops.

        Its return may be heard of before the stop, but not before a rank knows that it was asked
        for. So all are asked; not where nobody waits, as at the end of most programs.
        """
        with self._lock:
            if self._asking or not self._returned or not self._meetings.waiting():
                return
            self._asking = True
            returned, self._returned = self._returned, []
        self._ending.ask(partial(self._on_asked, returned))

    def _on_asked(self, returned: list[int], stops: bool) -> None:
        with self._lock:
            self._asking = False
            if not stops:
                for vertex in returned:
                    self._meetings.leave(vertex)
            waiting = [] if stops else self._meetings.waiting()  # else the stop is to come
        for wait in waiting:
            self._engine.fulfil(wait)
        self._look()

    def _wait_for_stop(self) -> None:
        try:
            context().wait_for_stop()
        except ServiceGoneError:
            return  # the program has ended
        with self._lock:
            self._over = True
            waiting = self._meetings.waiting()
        for wait in waiting:
            self._engine.fulfil(wait)


class _StoppingError(ServiceGoneError):
    """Those who are missing will not come any more."""

    def __reduce__(self) -> Any:
        return ServiceGoneError, self.args


def _holders(node: Any) -> dict[int, str]:
    """Return the nodes that were given a handle of this one: title by vertex."""
    me = node.spec
    found = {}
    for vertex in node.runtime.vertices:
        for _, handle in find((vertex.node.args, vertex.node.kwargs)):
            if handle.role_index != me.role_index:
                continue
            one = isinstance(handle, Handle)
            if me.index in ([handle.index] if one else handle.indices(me.replicas)):
                found[vertex.id] = vertex.title
    return found


def _names(titles: list[str]) -> str:
    more = len(titles) - _SHOWN
    return ", ".join(titles[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
