"""Tracebacks as text, for whoever is on another rank."""

import os
import traceback
from pathlib import Path

__all__ = ["remote_text"]

_HOST = os.uname().nodename
_HERE = str(Path(__file__).parent)


def remote_text(error: BaseException, title: str, rank: int) -> str:
    """Render a traceback, headed by where it happened; frames of mpiml itself are left out.

    Causes and contexts are shown too, as Python does.
    """
    report = traceback.TracebackException.from_exception(error)
    _without_us(report)
    text = "".join(report.format()).rstrip()
    return f"\n[{title}, rank {rank}, host {_HOST}]\n{text}\n"


def _without_us(report: traceback.TracebackException | None) -> None:
    if report is None:
        return
    theirs = [f for f in report.stack if not f.filename.startswith(_HERE)]
    if theirs:
        report.stack = traceback.StackSummary.from_list(theirs)
    _without_us(report.__cause__)
    _without_us(report.__context__)
