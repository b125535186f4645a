"""Who waits for whom: what each node of a rank is doing, with the lines of user code."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from mpiml.callbacks import callbacks
from mpiml.contents import parts
from mpiml.fingerprint import own_path
from mpiml.hearing import Hearing
from mpiml.tracebacks import is_ours, is_users
from mpiml.waves import Values, Waves
from mpiml.wire import WAITS, WAITS_LEAST, WAITS_QUERY, WAITS_TOLD, Frame

if TYPE_CHECKING:
    from traceback import FrameSummary

__all__ = [
    "Survey",
    "callback_stack",
    "coroutines_of",
    "stack_above",
    "stack_of",
    "thread_frames",
    "where",
]


def where(frame: FrameType | None) -> str:
    """Return ``file:line in function`` of the innermost user code on a stack.

    Frames of installed packages (a decorator of torch) are passed over, unless there are no
    others: the user's program may be one.
    """
    found = None
    for each in stack_above(frame):
        if _is_own(each.f_code.co_filename):
            found = each
            break
        if found is None and is_users(each.f_code.co_filename):
            found = each
    if found is None:
        return "no user code"
    return f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno} in {found.f_code.co_name}"


def stack_above(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, and those it was called from.

    The thread may run on meanwhile. What Python 3.11 names then as the caller need not be a
    frame at all; there it ends.
    """
    while frame is not None and hasattr(frame, "f_code"):
        yield frame
        frame = frame.f_back


def _is_own(file: str) -> bool:
    """Return whether a file is the user's, and of no installed package."""
    return is_users(file) and own_path(file, None)


def thread_frames() -> dict[int, FrameType]:
    """Return the frame that each thread is in.

    A collection of garbage meanwhile, which may let another thread run, would hang both:
    Python before 3.12 holds a lock here that new threads need.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if enabled:
            gc.enable()


def stack_of(node: Any) -> str:
    """Return the stacks of the threads that belong to `node`, user code only, as text."""
    if getattr(node, "outside", False):
        return (
            "  (a rank of another program, which has not called mpiml_leave: it has to call"
            " mpiml_stopping, and see it, within --grace)"
        )
    frames = thread_frames()
    names = {f"mpiml {node.title}", f"mpiml loop {node.title}"}
    main = len(node.runtime.nodes) == 1 or node.calling_back
    stacks = []
    for thread in threading.enumerate():
        mine = thread.name in names or thread.ident == node.thread
        mine = mine or (main and thread is threading.main_thread())
        text = _text_of(frames.get(thread.ident or 0)) if mine else ""
        if text:  # else an idle thread of ours
            stacks.append(text)
    stacks += [f"  a coroutine at {line}\n" for _, line in coroutines_of(node)]
    return "\n".join(stacks).rstrip() or "  (no thread of this node runs user code)"


def callback_stack() -> str:
    """Return the stack of the callback of a future that runs now, user code only."""
    frames = thread_frames()
    found = [t.ident or 0 for t in threading.enumerate() if t.name == callbacks.name]
    return "".join(_text_of(frames.get(ident)) for ident in found).rstrip()


def _text_of(frame: FrameType | None) -> str:
    import traceback

    return "" if frame is None else "".join(traceback.format_list(_user_code(frame)[-12:]))


def _user_code(frame: FrameType) -> "list[FrameSummary]":
    """Return the user's frames that mpiml called, without those of whoever called mpiml."""
    from traceback import extract_stack

    stack = extract_stack(frame)
    start = next((i for i, f in enumerate(stack) if is_ours(f.filename)), 0)
    for part in (stack[start:], stack):  # the whole of a thread that mpiml has not started
        theirs = [f for f in part if is_users(f.filename)]
        if theirs:
            return theirs
    return []


def coroutines_of(node: Any) -> list[tuple[bool, str]]:
    """Return, for each task of the node's loop, whether it waits in mpiml, and its line."""
    found = []
    for task in node.loop.tasks():
        line, waits = None, False
        inner = task.get_coro()
        while inner is not None:
            frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
            if frame is not None:
                ours = is_ours(frame.f_code.co_filename)
                waits = ours and frame.f_code.co_name != "guarded"
                line = line if ours else where(frame)
            inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
        if not waits and isinstance(getattr(task, "_fut_waiter", None), _groups()):
            continue  # it waits for other tasks, which stand in the list themselves
        found.append((waits, line or "an unknown line"))
    return found


def _groups() -> tuple[type, ...]:
    import asyncio

    return (asyncio.Task, asyncio.tasks._GatheringFuture)  # type: ignore[attr-defined]


def _tenths(seconds: float) -> int:
    return min(int(min(seconds, 1e8) * 10), (1 << 32) - 1)


class Survey:
    """Reports the waits of this rank, and gathers those of all ranks on demand.

    Local. Rank 0 watches: once every node of the program has waited for `limit` seconds, with
    a body or method among them that waits for a call, it prints who waits for whom, and goes on.
    """

    def __init__(self, runtime: Any, limit: float) -> None:
        self._runtime = runtime
        self._limit = limit
        self._answers: dict[int, tuple[float, str]] = {}
        self._awaited: dict[int, float] = {}  # since when something awaited has been seen
        self._complete = threading.Event()
        self._asking = threading.Lock()
        self._closed = threading.Event()
        engine = runtime.engine
        engine.handlers[WAITS_QUERY] = self._on_query
        engine.handlers[WAITS] = self._on_answer
        self._waves = Waves(engine, WAITS_LEAST, WAITS_TOLD, self._look, min)
        runtime.survey = self
        far = engine.link is not None and engine.size > 1
        self._hearing = Hearing(runtime, limit, self._awaits) if far else None
        if engine.rank == 0 and limit > 0:
            threading.Thread(target=self._watch, name="mpiml-survey", daemon=True).start()

    def close(self) -> None:
        """Stop watching, and ask nobody any more."""
        self._closed.set()
        self._complete.set()
        if self._hearing is not None:
            self._hearing.close()

    def silent(self, patience: float, cut: bool = False) -> str:
        """Return, in lines, which hosts have not answered for so long; see `mpiml.hearing`."""
        return "" if self._hearing is None else self._hearing.silent(patience, cut)

    def stopping(self) -> None:
        """Learn, at the stop, which hosts do not hear of it."""
        if self._hearing is not None:
            self._hearing.stopping()

    # -- this rank -----------------------------------------------------------------------------

    def local(self) -> tuple[float, str]:
        """Return for how many seconds all nodes here have waited (0: one works), and lines.

        Lines of who waits for a call start with ``!``: without one there is no deadlock.
        """
        frames = thread_frames()
        sleepers = [*self._runtime.engine.sleepers.values(), *self._runtime.teams.sleepers()]
        waited = float("inf")
        lines: list[str] = []
        seen: dict[int, float] = {}
        for node in self._runtime.present:
            since, text = self._of(node, sleepers, frames, seen)
            waited = min(waited, since)
            lines += text
        self._awaited = seen
        return waited, "\n".join(lines)

    def _awaits(self) -> list[str]:
        """Return the lines of who waits for a call or in a collective."""
        return [line[2:] for line in self.local()[1].splitlines() if line.startswith("! ")]

    def _of(
        self,
        node: Any,
        sleepers: list[Any],
        frames: dict[int, FrameType],
        seen: dict[int, float],
    ) -> tuple[float, list[str]]:
        """Return the same for one node."""
        head = f"{node.title} (rank {self._runtime.engine.rank})"
        now = time.monotonic()
        waited = float("inf")
        lines = []
        working = node.constructing or (node.body and not node.returned and not node.waiting)
        for sleeper in sleepers:
            if sleeper.scope is None or sleeper.scope.owner is not node:
                continue
            if sleeper.thread == node.thread:
                working = False
            if sleeper.wait is node.released and sleeper.deadline is None:
                continue  # in wait_for_stop
            since = now - sleeper.since
            waited = min(waited, since) if sleeper.deadline is None else 0.0
            lines.append(
                f"! {head} has waited {since:.0f} s for {sleeper.wait.about} "
                f"at {where(frames.get(sleeper.thread))}"
            )
        for waits, line in coroutines_of(node):
            key = hash((node.vertex, line))
            since = now - seen.setdefault(key, self._awaited.get(key, now))
            waited = min(waited, since) if waits else 0.0
            calls = "; ".join(
                call.about for call in list(self._runtime.engine.pending.values())[:4]
            )
            what = (
                f"! {head} awaits calls ({calls})"
                if waits
                else f"  {head} awaits something else"
            )
            lines.append(f"{what} at {line}")
            working = False
        if node.waiting:
            lines.append(f"  {head} waits for the stop")
        elif working:
            waited = 0.0
            lines.append(f"  {head} computes at {where(frames.get(node.thread))}")
        if node.server.running:
            waited = 0.0
            lines.append(f"  {head} runs {node.server.running} methods")
        return waited, lines

    # -- all ranks -----------------------------------------------------------------------------

    def _on_query(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        waited, text = self.local()
        engine = self._runtime.engine
        engine.transmit(rank, WAITS, engine.rank, rank, aux=_tenths(waited), body=text.encode())

    def _on_answer(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self._answers[rank] = (frame.aux / 10, bytes(parts(frame, buffers)[0]).decode())
        if len(self._answers) == self._runtime.engine.size:
            self._complete.set()

    def ask(self, timeout: float = 2.0) -> dict[int, tuple[float, str]]:
        """Gather the waits of all ranks that answer within `timeout` seconds."""
        engine = self._runtime.engine
        with self._asking:
            self._answers = {}
            self._complete.clear()
            if self._closed.is_set():
                return {engine.rank: self.local()}
            for rank in range(engine.size):
                engine.transmit(rank, WAITS_QUERY, engine.rank, rank)
            self._complete.wait(timeout)
            return dict(self._answers)

    def _look(self) -> Values:
        return (_tenths(self.local()[0]),)

    def _least(self, timeout: float = 2.0) -> float | None:
        """Return the shortest wait of all ranks in seconds; None where some rank says none in time.

        Along a tree, unlike `ask`: this is asked again and again while rank 0 has nothing to do.
        """
        found: list[int] = []
        complete = threading.Event()

        def take(values: Values) -> None:
            found.append(values[0])
            complete.set()

        self._waves.ask(take)
        return found[0] / 10 if complete.wait(timeout) else None

    def report(self, answers: dict[int, tuple[float, str]], head: str) -> str:
        """Return the graph as text."""
        missing = [r for r in range(self._runtime.engine.size) if r not in answers]
        lines = [head, *(text for _, (_, text) in sorted(answers.items()) if text)]
        if missing:
            lines.append(f"  no answer from rank {', '.join(map(str, missing))}")
        return "\n".join(lines).replace("\n! ", "\n  ") + "\n"

    def show(self, write: Callable[[str], object]) -> None:
        """Ask everybody and write who waits for whom, on a thread of its own."""

        def work() -> None:
            answers = self.ask()
            write(self.report(answers, f"mpiml: {self._runtime.name}: who waits for whom"))

        threading.Thread(target=work, name="mpiml-quit", daemon=True).start()

    def _watch(self) -> None:
        """Look now and then; ask the others only once everybody here has waited long enough."""
        step = max(0.05, min(1.0, self._limit / 4))
        pause = step
        seen = 0  # how often in a row everybody was found waiting
        while not self._closed.wait(pause) and not self._runtime.stopping:
            pause = step
            waited, _ = self.local()
            if waited < self._limit:
                seen = 0
                continue
            least = self._least()
            if least is None or least < self._limit:
                pause = max(step, self._limit - (least or 0.0))
                seen = 0
                continue
            answers = self.ask()
            waited = min(since for since, _ in answers.values()) if answers else 0.0
            complete = len(answers) == self._runtime.engine.size
            called = any("! " in text for _, text in answers.values())
            if waited < self._limit or not complete or not called:
                # not before it can have come true
                pause = max(step, self._limit - (waited if waited < self._limit else 0.0))
                seen = 0
                continue
            seen += 1
            if seen == 1:  # look again: an answer may have been on its way
                continue
            pause = max(step, self._limit)
            if seen == 2 and not self._runtime.stopping:
                head = (
                    f"mpiml: {self._runtime.name}: every node has waited for "
                    f"{self._limit:g} s or more. Who waits for whom:"
                )
                self._runtime.say(self.report(answers, head))
