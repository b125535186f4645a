"""Progress of a program on one line: what nodes report, how often, how it looks."""

import math
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TextIO

from mpiml.errors import MpimlError, UsageError

__all__ = ["Progress", "Report", "Throttle", "pack_report", "unpack_report"]

VERSION = 1

_HEAD = struct.Struct("<BddH")  # version, done, total (0: unknown), number of metrics
_NAME = struct.Struct("<H")  # bytes of the name, which follows
_VALUE = struct.Struct("<d")
_MOST = 0xFFFF

_TTY = 0.25  # s between two lines that replace each other
_PLAIN = 2.0  # s between two lines in a file
_PLAIN_LATER = 5.0
_LATER = 60.0  # s after which a run counts as long
_WINDOW = 10  # lines over which the rate is taken


class Report(NamedTuple):
    """What a node has reported; `total` is 0 where it is unknown."""

    done: float
    total: float
    metrics: dict[str, float]


def pack_report(
    done: float, total: float | None = None, metrics: Mapping[str, float] | None = None
) -> bytes:
    """Return a report as bytes of a fixed layout, little-endian, never a pickle.

    Local: no MPI. Version u8, done f64, total f64, number of metrics u16; then for each the
    length of its name u16, the name in UTF-8, its value f64.

    Raises
    ------
    UsageError
        If something is not a number, or there are too many metrics, or a name is too long.
    """
    metrics = metrics or {}
    if len(metrics) > _MOST:
        raise UsageError(f"report: expected at most {_MOST} metrics, got {len(metrics)}")
    head = (_number("done", done), 0.0 if total is None else _number("total", total))
    parts = [_HEAD.pack(VERSION, *head, len(metrics))]
    for name, value in metrics.items():
        text = name.encode("utf-8", "replace")
        if len(text) > _MOST:
            raise UsageError(f"report: expected a name of at most {_MOST} bytes, got {name!r}")
        parts += [_NAME.pack(len(text)), text, _VALUE.pack(_number(name, value))]
    return b"".join(parts)


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"report: {name}: expected a number, got {value!r}. Report one value per name, "
            "such as the mean of an array."
        ) from None


def unpack_report(data: bytes) -> Report:
    """Return the report in the bytes that `pack_report` made.

    Local: no MPI.

    Raises
    ------
    MpimlError
        If the bytes are of another version, or not a report.
    """
    try:
        version, done, total, count = _HEAD.unpack_from(data)
        if version != VERSION:
            raise MpimlError(
                f"progress report: expected version {VERSION}, got {version}. Run the same "
                "mpiml on all ranks."
            )
        metrics = {}
        at = _HEAD.size
        for _ in range(count):
            (length,) = _NAME.unpack_from(data, at)
            at += _NAME.size
            (value,) = _VALUE.unpack_from(data, at + length)
            metrics[bytes(data[at : at + length]).decode("utf-8")] = value
            at += length + _VALUE.size
    except (struct.error, UnicodeDecodeError) as error:
        raise MpimlError(f"progress report: {len(data)} bytes are not one: {error}") from error
    if at != len(data):
        raise MpimlError(f"progress report: expected {at} bytes, got {len(data)}")
    return Report(done, total, metrics)


class Throttle:
    """Decides which reports of a node are sent: five a second, and always the final one.

    Local: no MPI, no clock of its own. Final is the one that completes the total, and the
    last one before the body ends: ask `held` then.

    Parameters
    ----------
    interval
        Seconds between two reports.
    """

    def __init__(self, interval: float = 0.2) -> None:
        self._interval = interval
        self._last: float | None = None
        self._complete = False
        self._held: Report | None = None

    def offer(self, now: float, report: Report) -> bool:
        """Return whether to send this report; one that is not sent is kept as `held`."""
        complete = 0 < report.total <= report.done
        due = self._last is None or now - self._last >= self._interval
        if due or (complete and not self._complete):
            self._last = now
            self._held = None
        else:
            self._held = report
        self._complete = complete
        return self._held is None

    def held(self) -> Report | None:
        """Take the last report if it has not been sent."""
        report, self._held = self._held, None
        return report


class _Role:
    """The nodes of a role and how fast they go."""

    def __init__(self) -> None:
        self.nodes: dict[str, Report] = {}
        self.samples: list[tuple[float, float]] = []  # time, done

    @property
    def done(self) -> float:
        return sum(report.done for report in self.nodes.values())

    def text(self, label: str, now: float) -> str:
        reports = list(self.nodes.values())
        done = self.done
        words = f"{label} {_count(done)}"
        if all(report.total > 0 for report in reports):
            total = sum(report.total for report in reports)
            words += f"/{_count(total)}"
            if math.isfinite(done / total):
                words += f" {math.floor(100 * done / total)}%"
        parts = [words]
        names = dict.fromkeys(name for report in reports for name in report.metrics)
        for name in names:
            values = [r.metrics[name] for r in reports if name in r.metrics]
            parts.append(f"{name}={sum(values) / len(values):.3g}")
        rate = self._rate(now, done)
        if rate is not None:
            parts.append(f"updates/s={rate:.3g}")
        return "  ".join(parts)

    def _rate(self, now: float, done: float) -> float | None:
        self.samples = [*self.samples[-_WINDOW:], (now, done)]
        then, before = self.samples[0]
        return (done - before) / (now - then) if now > then and done > before else None


class Progress:
    """Shows what the nodes report: one line for the whole program, on rank 0.

    Local: no MPI. Totals and counts of a role are summed over its nodes, metrics are the mean
    of their latest values, ``updates/s`` is the growth of the count. On a terminal the line
    replaces the one before; elsewhere a line follows every 2 s, after a minute every 5 s.

    Parameters
    ----------
    stream
        Where to; standard error by default. Where it is closed, nothing is shown.
    clock
        Returns seconds.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._roles: dict[str, _Role] = {}
        self._lock = threading.Lock()
        self._start = clock()
        self._shown = -math.inf
        self._shut = False
        try:
            self._tty = self._stream.isatty()
        except (AttributeError, ValueError):
            self._tty = False

    def update(
        self, title: str, done: float, total: float, metrics: Mapping[str, float]
    ) -> None:
        """Take the report of the node ``role/index``, and show the line if it is time."""
        with self._lock:
            role = self._roles.setdefault(title.rpartition("/")[0] or title, _Role())
            role.nodes[title] = Report(done, total, dict(metrics))
            now = self._clock()
            if not self._shut and now - self._shown >= self._interval(now):
                self._show(now, last=False)

    def close(self) -> None:
        """Show the final line, if there was any report."""
        with self._lock:
            if self._roles and not self._shut:
                self._show(self._clock(), last=True)
            self._shut = True

    def _interval(self, now: float) -> float:
        if self._tty:
            return _TTY
        return _PLAIN if now - self._start < _LATER else _PLAIN_LATER

    def _show(self, now: float, last: bool) -> None:
        line = "  |  ".join(role.text(label, now) for label, role in self._roles.items())
        self._shown = now
        if self._tty:
            line = "\r" + line[: _width(self._stream) - 1] + "\x1b[K" + ("\n" if last else "")
        else:
            line += "\n"
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):  # talk only: it must not end a program
            self._shut = True


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80  # 0: a launcher's terminal
    except (OSError, ValueError):
        return 80


def _count(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"
