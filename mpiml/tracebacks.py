"""Tracebacks as text, of a user's frames only, for whoever is on another rank or reads a log."""

import os
from typing import TYPE_CHECKING

from mpiml.errors import MpimlError

if TYPE_CHECKING:
    from traceback import FrameSummary, TracebackException

__all__ = ["error_text", "is_ours", "is_users", "remote_text"]

_HOST = os.uname().nodename
_HERE = os.path.dirname(__file__) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


def is_ours(file: str) -> bool:
    """Return whether a file is one of mpiml's. Local."""
    return file.startswith(_HERE)


def is_users(file: str) -> bool:
    """Return whether a file is neither ours nor of the standard library. Local."""
    if file.startswith((_HERE, "<frozen ")):
        return False
    return not file.startswith(_LIBRARY) or "-packages" in file


def remote_text(error: BaseException, title: str, rank: int) -> str:
    """Render a traceback as `error_text` does, headed by where it happened. Local."""
    return f"\n[{title}, rank {rank}, host {_HOST}]\n{error_text(error).rstrip()}\n"


def error_text(error: BaseException) -> str:
    """Render an error as Python does, with causes and contexts, but without mpiml's own frames.

    Local: no MPI. All frames stay where none is the user's, and where mpiml failed by itself:
    its last frame is ours, and is no ``raise``, whose text would tell what is wrong.
    """
    import traceback

    report = traceback.TracebackException.from_exception(error)
    _without_us(report, error)
    return "".join(report.format())


def _without_us(report: "TracebackException | None", error: BaseException | None) -> None:
    if report is None or error is None:
        return
    frames = list(report.stack)
    if isinstance(error, SyntaxError) and is_users(error.filename or _HERE):
        report.stack = type(report.stack).from_list([f for f in frames if is_users(f.filename)])
    elif not frames or not _failed_by_itself(frames[-1], error):
        report.stack = type(report.stack).from_list(_users(frames))
    _without_us(report.__cause__, error.__cause__)
    _without_us(report.__context__, error.__context__)
    if isinstance(error, BaseExceptionGroup):
        for part, member in zip(report.exceptions or (), error.exceptions, strict=False):
            _without_us(part, member)


def _failed_by_itself(last: "FrameSummary", error: BaseException) -> bool:
    """Return whether an error left a line of ours that has not raised it on purpose."""
    if isinstance(error, MpimlError) or not isinstance(error, Exception):
        return False
    return is_ours(last.filename) and not (last.line or "raise").lstrip().startswith("raise")


def _users(frames: "list[FrameSummary]") -> "list[FrameSummary]":
    """Return the user's frames and what they called; all where there are none of theirs."""
    ours = [is_ours(frame.filename) for frame in frames]
    start = 0
    if True in ours:  # the standard library's that brought ours about stand for ours
        start = next((i for i, f in enumerate(frames) if is_users(f.filename)), len(frames))
    theirs = [
        frame
        for i, frame in enumerate(frames)
        if i >= start and not ours[i] and not _leads_to_us(frames, ours, i)
    ]
    return theirs or frames


def _leads_to_us(frames: "list[FrameSummary]", ours: list[bool], at: int) -> bool:
    """Return whether a frame is of the standard library, and called mpiml: contextlib, say."""
    return not is_users(frames[at].filename) and at + 1 < len(ours) and ours[at + 1]
