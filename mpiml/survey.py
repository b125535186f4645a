"""Who waits for whom: what each node of a rank is doing, with the lines of user code."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mpiml.wire import WAITS, WAITS_QUERY, Frame

__all__ = ["Survey", "stack_of", "where"]

_HERE = str(Path(__file__).parent)


def where(frame: FrameType | None) -> str:
    """Return ``file:line in function`` of the innermost user code on a stack."""
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "no user code"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    return file.startswith("<") or file in (threading.__file__,)


def stack_of(node: Any) -> str:
    """Return the stacks of the threads that belong to `node`, user code only, as text."""
    frames = sys._current_frames()
    names = {f"mpiml {node.title}", f"mpiml loop {node.title}"}
    main = len(node.runtime.nodes) == 1
    parts = []
    for thread in threading.enumerate():
        mine = thread.name in names or (main and thread is threading.main_thread())
        frame = frames.get(thread.ident or 0)
        if mine and frame is not None:
            summary = [
                f for f in traceback.extract_stack(frame) if not f.filename.startswith(_HERE)
            ]
            parts.append("".join(traceback.format_list(summary[-12:])))
    return "\n".join(parts).rstrip() or "  (no Python thread of this node was found)"


class Survey:
    """Reports the waits of this rank, and gathers those of all ranks on demand.

    Local. Rank 0 watches: once every node of the program has waited for `limit` seconds, with
    a body among them that waits for a call, it prints who waits for whom, and goes on.
    """

    def __init__(self, runtime: Any, limit: float) -> None:
        self._runtime = runtime
        self._limit = limit
        self._answers: dict[int, tuple[float, str]] = {}
        self._complete = threading.Event()
        self._asking = threading.Lock()
        self._closed = threading.Event()
        engine = runtime.engine
        engine.handlers[WAITS_QUERY] = self._on_query
        engine.handlers[WAITS] = self._on_answer
        if engine.rank == 0 and limit > 0:
            threading.Thread(target=self._watch, name="mpiml-survey", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    # -- this rank -----------------------------------------------------------------------------

    def local(self) -> tuple[float, str]:
        """Return for how many seconds all nodes here have waited (0: one works), and lines.

        Lines of bodies that wait for a call start with ``!``: without one there is no deadlock.
        """
        frames = sys._current_frames()
        engine = self._runtime.engine
        sleepers = list(engine.sleepers.values())
        now = time.monotonic()
        waited = float("inf")
        lines = []
        for node in self._runtime.nodes:
            mine = [s for s in sleepers if s.scope is not None and s.scope.owner is node]
            bodies = [s for s in mine if s.scope is node.scope]
            head = f"{node.title} (rank {engine.rank})"
            if node.constructing or (
                node.body and not node.returned and not bodies and not node.waiting
                and not node.scope.awaiting
            ):  # fmt: skip
                waited = 0.0
                lines.append(f"  {head} computes at {self._body_line(node, frames)}")
            for sleeper in mine:
                since = now - sleeper.since
                waited = min(waited, since)
                mark = "!" if sleeper.scope is node.scope else " "
                lines.append(
                    f"{mark} {head} has waited {since:.0f} s for {sleeper.wait.about} "
                    f"at {where(frames.get(sleeper.thread))}"
                )
            if node.scope.awaiting:
                lines.append(f"! {head} awaits {len(node.scope.awaiting)} futures")
            if node.waiting:
                lines.append(f"  {head} waits for the stop")
            if node.server.running:
                waited = 0.0
                lines.append(f"  {head} runs {node.server.running} methods")
        return waited, "\n".join(lines)

    def _body_line(self, node: Any, frames: dict[int, FrameType]) -> str:
        for thread in threading.enumerate():
            if thread.name == f"mpiml {node.title}" or (
                len(self._runtime.nodes) == 1 and thread is threading.main_thread()
            ):
                return where(frames.get(thread.ident or 0))
        return "an unknown line"

    # -- all ranks -----------------------------------------------------------------------------

    def _on_query(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        waited, text = self.local()
        engine = self._runtime.engine
        tenths = min(int(min(waited, 1e8) * 10), (1 << 32) - 1)
        engine.transmit(rank, WAITS, engine.rank, rank, aux=tenths, body=text.encode())

    def _on_answer(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self._answers[rank] = (frame.aux / 10, bytes(frame.body).decode())
        if len(self._answers) == self._runtime.engine.size:
            self._complete.set()

    def ask(self, timeout: float = 2.0) -> dict[int, tuple[float, str]]:
        """Gather the waits of all ranks that answer within `timeout` seconds."""
        engine = self._runtime.engine
        with self._asking:
            self._answers = {}
            self._complete.clear()
            for rank in range(engine.size):
                engine.transmit(rank, WAITS_QUERY, engine.rank, rank)
            self._complete.wait(timeout)
            return dict(self._answers)

    def report(self, answers: dict[int, tuple[float, str]], head: str) -> str:
        """Return the graph as text."""
        missing = [r for r in range(self._runtime.engine.size) if r not in answers]
        lines = [head, *(text for _, (_, text) in sorted(answers.items()) if text)]
        if missing:
            lines.append(f"  no answer from rank {', '.join(map(str, missing))}")
        return "\n".join(lines) + "\n"

    def show(self, write: Callable[[str], object]) -> None:
        """Ask everybody and write who waits for whom, on a thread of its own."""

        def work() -> None:
            answers = self.ask()
            write(self.report(answers, f"mpiml: {self._runtime.name}: who waits for whom"))

        threading.Thread(target=work, name="mpiml-quit", daemon=True).start()

    def _watch(self) -> None:
        reported = False
        step = min(1.0, self._limit / 4)
        while not self._closed.wait(step):
            if self._runtime.stopping:
                return
            waited, _ = self.local()
            if waited < self._limit:
                reported = False
                continue
            if reported:
                continue
            answers = self.ask()
            complete = len(answers) == self._runtime.engine.size
            still = all(waited >= self._limit for waited, _ in answers.values())
            called = any("!" in text for _, text in answers.values())
            if complete and still and called and not self._runtime.stopping:
                reported = True
                head = (
                    f"mpiml: {self._runtime.name}: every node has waited for "
                    f"{self._limit:g} s or more. Who waits for whom:"
                )
                sys.stderr.write(self.report(answers, head))
                sys.stderr.flush()
