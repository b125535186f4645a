"""What ends a program on this rank: errors that leave nodes, wishes, and who does not end.

The first error wins. One that may only be the consequence of another rank's, as when a
service is gone, is held back for a moment: the error behind it is then on its way.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpiml.alarms import Alarm
from mpiml.callbacks import callbacks
from mpiml.control import EXIT, FAILED, REQUESTED, SIGNALLED, STUCK, Note
from mpiml.errors import RemoteError, ServiceGoneError
from mpiml.hosting import HostedNode
from mpiml.payload import pack_error, unpack_error
from mpiml.survey import callback_stack, stack_of
from mpiml.tracebacks import remote_text
from mpiml.undertaker import bury, resign

__all__ = ["Failures"]

_PATIENCE = 2.0  # seconds after a signal until something is said
_HOLD = 0.5  # s, that a possible consequence waits for its cause
# s, in which a launcher of several hosts ends by itself after an abort, where it can: it gives
# ranks a second or more to end before it kills them
_CUT = 2.0  # where a host may be cut off
_WHOLE = 10.0  # where none is known to be


class Failures:
    """Errors, stops and stragglers of one rank in one program.

    Local: `Ending` brings the decision to all ranks.

    Parameters
    ----------
    runtime
        The program on this rank.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._errors: dict[int, BaseException] = {}
        self._timers: list[Alarm] = []
        self._stop_time = 0.0
        self._closed = False
        self.held = 0  # consequences that wait for their cause

    # -- an error ------------------------------------------------------------------------------

    def fail(self, node: HostedNode, error: BaseException, serves: bool = False) -> None:
        """End the program because `error` left a node; safe from any thread.

        Parameters
        ----------
        node
            The node.
        error
            The error; ``sys.exit()`` and ``sys.exit(0)`` are returns.
        serves
            Whether the node goes on to answer calls.
        """
        status = 1
        if isinstance(error, SystemExit):
            if not error.code:
                return
            status = error.code & 0xFF or 1 if isinstance(error.code, int) else 1
        runtime = self._runtime
        with self._lock:
            if node.vertex in self._errors:
                return  # what follows from it
            self._errors[node.vertex] = error
        runtime.engine.failed = True  # errors that nobody looks at are not news any more
        note = self._note(node, error, status)
        if _is_consequence(error):
            with self._lock:
                self.held += 1
            self._after(_HOLD, lambda: self._release(note))
        else:
            runtime.ending.request(note)  # before clients hear that the service is gone
            if runtime.survey is not None:
                runtime.survey.stopping()
        if not serves:
            node.server.fail_all(error)
        limit = runtime.settings.failure_grace
        if limit is not None:
            self._after(limit, lambda: self._unheard(note))

    def _note(self, node: HostedNode, error: BaseException, status: int) -> Note:
        rank = self._runtime.engine.rank
        if isinstance(error, SystemExit):
            text = f"mpiml: {node.title} (rank {rank}) ended the program by sys.exit"
            text += f"({error.code})\n" if isinstance(error.code, int) else f":\n{error.code}\n"
            return Note(EXIT, status, node.vertex, rank, text)
        packed = pack_error(error)
        text = remote_text(error, node.title, rank)
        return Note(FAILED, 1, node.vertex, rank, text, packed.encoding, bytes(packed.body))

    def _release(self, note: Note) -> None:
        ending = self._runtime.ending
        if ending.note is None or ending.note.benign:
            ending.request(note)
        with self._lock:
            self.held -= 1

    def _unheard(self, note: Note) -> None:
        """End the job where the rest of the program does not hear of a failure."""
        runtime = self._runtime
        if not self._over() and not runtime.ending.failed:
            self._show(note)
            self.abort(note.status)

    def broke(self, error: BaseException) -> None:
        """Give up on the ranks ending together: `error` left the runtime itself."""
        runtime = self._runtime
        runtime.ending.abandoned = True
        if runtime.settings.prints:
            title = runtime.nodes[0].title if runtime.nodes else runtime.name
            text = remote_text(error, title, runtime.engine.rank)
            if not runtime.ending.failed:  # else it is the consequence
                self._show(Note(FAILED, 1, 0, runtime.engine.rank, text))
            self.abort(1)

    # -- the stop ------------------------------------------------------------------------------

    def request(self, reason: int, status: int, text: str) -> None:
        """End the program in order for a reason from outside: a signal, the time."""
        runtime = self._runtime
        runtime.ending.request(Note(reason, status, 0, runtime.engine.rank, text))

    def request_stop(self, node: HostedNode, text: str) -> None:
        """End the program in order."""
        runtime = self._runtime
        runtime.ending.request(Note(REQUESTED, 0, node.vertex, runtime.engine.rank, text))

    def on_stop(self, note: Note) -> None:
        """Let bodies and waiting calls know; on whatever thread heard of it."""
        runtime = self._runtime
        if not self._stop_time:
            self._stop_time = time.monotonic()
        if note.reason == STUCK:
            return  # everybody leaves; nobody is told to stop twice
        limit = runtime.settings.grace
        if not note.benign:
            runtime.engine.failed = True
            if note.rank == runtime.engine.rank:
                self._show(note)
            self._fail_calls(note)
            if runtime.engine.guests is None:  # another program hears of it between its steps
                limit = min(limit, runtime.settings.failure_grace or limit)
        self._after(limit, lambda: self._check_grace(limit))
        if note.reason == SIGNALLED and runtime.engine.rank == 0 and limit > _PATIENCE:
            self._after(_PATIENCE, lambda: self._ask_for_patience(note, limit))
        failed = None if note.benign else runtime.vertices[note.vertex].role_index
        for node in runtime.present:
            node.stop(node.spec.role_index == failed)
            if node.server.wake():
                runtime.parting.beside()
        runtime.idle.watch()
        if runtime.survey is not None:
            runtime.survey.stopping()

    def _ask_for_patience(self, note: Note, limit: float) -> None:
        """Say why nothing is seen to happen after a signal."""
        runtime = self._runtime
        if runtime.settings.prints and not runtime.done:
            more = " A second one ends it at once." if note.text == "SIGINT" else ""
            runtime.say(
                f"mpiml: stopping after {note.text}; code that does not wait in mpiml gets "
                f"{limit:g} s (--grace).{more}\n"
            )

    def _show(self, note: Note) -> None:
        if self._runtime.settings.prints:
            head = "mpiml: a node failed, the program ends" if note.reason == FAILED else ""
            self._runtime.say(head + note.text)

    def _fail_calls(self, note: Note) -> None:
        """Fail the calls that the failed node will not answer."""
        runtime = self._runtime
        spec = runtime.vertices[note.vertex]
        title = spec.title
        pending = runtime.engine.pending
        for id, call in list(pending.items()):
            if call.target_vertex == note.vertex and pending.pop(id, None):
                gone = ServiceGoneError(f"{title} failed; expected it to answer this call")
                gone.__cause__ = self.error_of(note)
                if hasattr(call, "_seen"):
                    call._seen = True  # a future: the failure is shown, once
                call.fail(gone)

    def error_of(self, note: Note) -> BaseException:
        """Return the error in a note, with its remote traceback as cause.

        Its attribute ``mpiml_shown`` is set where its traceback has been written already.
        """
        if note.reason == EXIT:
            return SystemExit(note.status)
        here = note.rank == self._runtime.engine.rank
        error = self._errors.get(note.vertex) if here else None
        if error is None:
            error = unpack_error(note.encoding, note.error)
            error.__cause__ = RemoteError(note.text)
        if self._runtime.settings.prints:
            error.mpiml_shown = True  # type: ignore[attr-defined]
        return error

    # -- those who do not end --------------------------------------------------------------------

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        alarm = Alarm(seconds, action, "mpiml-grace")
        self._timers.append(alarm)
        if self._closed:  # perhaps just now, by another thread
            alarm.cancel()

    def close(self) -> None:
        """Stop the clocks, for good: the process may have other things to do after the program."""
        self._closed = True
        for timer in self._timers.copy():
            timer.cancel()

    def _over(self) -> bool:
        return bool(self._runtime.done or self._closed)

    def _check_grace(self, limit: float, last: bool = False) -> None:
        """List whoever still runs after the grace, and end the program all the same."""
        runtime = self._runtime
        if self._over():
            return
        stuck = self.stragglers()
        aborts = runtime.settings.on_stuck == "abort"
        if runtime.ending.abandoned and not (stuck and aborts):
            return  # this rank is leaving without the others
        silent = self._silent(limit / 2)
        if not stuck and not last and not self._silent(limit / 2, cut=True):
            # others have the straggler; its rank ends the program, or is in no state to
            self._after(limit + 0.5, lambda: self._check_grace(limit, True))
            return
        if self._over():  # it has ended while we looked
            return
        seconds = time.monotonic() - self._stop_time
        text = "\n".join(filter(None, [*stuck, silent])) or "other ranks, which do not say who"
        note = runtime.ending.note
        failed = note is not None and not note.benign
        status = note.status if note is not None and failed else 1
        if aborts:
            here = stuck or (note is not None and note.rank == runtime.engine.rank)
            if note is not None and failed and here and not runtime.settings.prints:
                # nobody will get it as an error now
                runtime.say(f"mpiml: a node failed{note.text}")
            runtime.say(
                f"mpiml: still running {seconds:.1f} s after the stop, so the program is ended:\n"
                f"{text}\n"
            )
            self.abort(status, lost=not stuck)
        else:
            vertex = runtime.nodes[0].vertex if runtime.nodes else 0
            runtime.ending.request(Note(STUCK, 1, vertex, runtime.engine.rank, text))

    def stragglers(self) -> list[str]:
        """Describe bodies, methods and callbacks that still run, with their stacks."""
        lines = []
        for node in self._runtime.present:
            body = (node.body and not node.returned) or node.constructing
            calls = node.server.active
            if body or calls or node.calling_back:
                what = "body" if body else f"{calls} calls" if calls else "on_stop callback"
                lines.append(f"[{node.title}] {what}\n{stack_of(node)}")
        count = callbacks.under_way(self._runtime.engine)
        if count:
            lines.append(
                f"[{self._runtime.name}] {count} callbacks of futures\n{callback_stack()}"
            )
        return lines

    def abort(self, status: int, lost: bool = False) -> None:
        """End every process of the job at once; never returns.

        `lost` says that other ranks did not end when they should have.
        """
        resigns = False
        if self._apart():  # first: to flush may take until the launcher has ended
            cut = lost or bool(self._silent(0.2))
            resigns = bury(_CUT if cut else _WHOLE) and cut
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # closed, or nobody reads it
        if resigns:
            resign(status)
        world = self._runtime.world
        if world is not None and self._runtime.engine.link is not None:
            world.abort(status)
        os._exit(status)

    def _silent(self, patience: float, cut: bool = False) -> str:
        """Say which hosts are silent, and with `cut` which can hardly be there."""
        survey = self._runtime.survey
        return "" if survey is None else survey.silent(patience, cut)

    def _apart(self) -> bool:
        """Tell whether the program runs on several hosts."""
        runtime = self._runtime
        return runtime.engine.link is not None and len(runtime.hosts.rows) > 1


def _is_consequence(error: BaseException) -> bool:
    """Return whether an error may follow from one that another node has raised."""
    return any(isinstance(link, ServiceGoneError) for link in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
