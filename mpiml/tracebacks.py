"""Tracebacks as text, for whoever is on another rank."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceback import TracebackException

__all__ = ["remote_text"]

_HOST = os.uname().nodename
_HERE = os.path.dirname(__file__)


def remote_text(error: BaseException, title: str, rank: int) -> str:
    """Render a traceback, headed by where it happened; frames of mpiml itself are left out.

    Causes and contexts are shown too, as Python does.
    """
    import traceback

    report = traceback.TracebackException.from_exception(error)
    _without_us(report)
    text = "".join(report.format()).rstrip()
    return f"\n[{title}, rank {rank}, host {_HOST}]\n{text}\n"


def _without_us(report: "TracebackException | None") -> None:
    if report is None:
        return
    theirs = [f for f in report.stack if not f.filename.startswith(_HERE)]
    if theirs:
        report.stack = type(report.stack).from_list(theirs)
    _without_us(report.__cause__)
    _without_us(report.__context__)
