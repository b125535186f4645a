"""What nodes report, on its way to the line that rank 0 shows."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpiml.progress import Progress, Report, Throttle, pack_report, unpack_report
from mpiml.runtime import Runtime
from mpiml.wire import REPORT, Frame

__all__ = ["reporting"]


@contextmanager
def reporting(runtime: Runtime) -> Iterator[None]:
    """Show the progress of a program while the block runs, if its settings say so.

    Local: each rank sends what its nodes report, seldom enough not to matter, and rank 0
    shows it. Without ``progress`` nothing is sent.
    """
    if not runtime.settings.progress:
        yield
        return
    engine = runtime.engine
    throttles: dict[int, Throttle] = {}
    line = Progress(runtime.stderr or sys.stderr) if engine.rank == 0 else None

    def send(vertex: int, report: Report) -> None:
        engine.transmit(0, REPORT, vertex, 0, body=pack_report(*report))

    def on_report(node: Any, report: Report) -> None:
        throttle = throttles.setdefault(node.vertex, Throttle())
        if throttle.offer(time.monotonic(), report):
            send(node.vertex, report)

    def on_left(node: Any) -> None:
        throttle = throttles.get(node.vertex)
        held = throttle.held() if throttle is not None else None
        if held is not None:
            send(node.vertex, held)

    def on_frame(rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        spec = runtime.vertices[frame.source]
        if line is not None:
            line.update(spec.title, *unpack_report(bytes(frame.body)))

    engine.handlers[REPORT] = on_frame
    runtime.on_report, runtime.on_left = on_report, on_left
    try:
        yield
    finally:
        runtime.on_report = runtime.on_left = None
        if line is not None:
            line.close()
