r"""What a rank prints: whole lines, each with the node that wrote it.

A launcher mixes what its ranks write at any byte. So text is kept until its line is complete,
per thread and node, and lines leave in single writes that a pipe does not tear apart. That
holds for ``print(..., end="")`` too, and for progress bars: a carriage return is a character of
its line, which appears when it ends in a newline. Of a line over 64 KiB that has carriage
returns, what stands before the last one is forgotten, as on a terminal.
"""

import io
import os
import select
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

from mpiml.errors import UsageError
from mpiml.forking import guard_fork
from mpiml.scope import current_scope

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Output", "check_folder"]

_ATOMIC = 4096  # bytes that a pipe takes in one piece: Linux's PIPE_BUF
_LONG = 1 << 16  # characters; see the module's docstring


class _State:
    """What all outputs of the process share: one lock, as they write to the same files."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # re-entered by a __del__ that prints
        self.outputs: list[Output] = []


class Output:
    """Prefixes the lines of a rank with the node that prints them, and may log them.

    Local: no MPI. A context manager that replaces ``sys.stdout`` and ``sys.stderr``, and puts
    them back at the end where they still are its own. What was written without a newline by
    then is ended with one. A nested output stands in for the outer one and logs to the
    latter's folder unless it has its own. Bytes written to ``sys.stdout.buffer`` pass by.

    Parameters
    ----------
    single
        Title of the node, ``role/index``, for threads that belong to none, where the process
        holds just one; None otherwise: their lines get no prefix, and a flush shows even an
        incomplete line.
    log_dir
        Folder for ``ROLE-INDEX.log``, to which all lines of a node are added, stdout's and
        stderr's, without prefix. Created if need be.
    prefix
        False: whole lines, without the prefix.

    Attributes
    ----------
    raw_stderr : TextIO
        Standard error without prefix, written at once: for what the runtime itself says.

    Raises
    ------
    UsageError
        On entering, if the folder cannot be written.
    """

    def __init__(
        self, single: str | None, log_dir: "Path | None" = None, prefix: bool = True
    ) -> None:
        self.active = False
        self._single = single
        self._prefix = prefix
        self._log_dir = log_dir
        self._logs: _Logs | None = None
        self._replaced: dict[str, tuple[Any, _Stream]] = {}
        self.raw_stderr: TextIO = _as_text(_Stream(_below(sys.stderr), self, raw=True))

    def __enter__(self) -> "Output":
        guard_fork(_forked)
        if self._log_dir is not None:
            self._logs = _Logs(self._log_dir, self._single)
        elif _state.outputs:
            self._logs = _state.outputs[-1]._logs
        self.raw_stderr = _as_text(_Stream(_below(sys.stderr), self, raw=True))
        self.active = True
        for name in ("stdout", "stderr"):
            current = getattr(sys, name)
            if current is None and self._logs is None:
                continue  # Python without a standard stream: print() does nothing
            stream = _Stream(_below(current), self)
            self._replaced[name] = (current, stream)
            setattr(sys, name, stream)
        _state.outputs.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self in _state.outputs:
            _state.outputs.remove(self)
        replaced, self._replaced = self._replaced, {}
        for name, (previous, stream) in replaced.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, previous)
        try:
            for _, stream in replaced.values():
                stream.finish()
        finally:
            self.active = False
            if self._logs is not None and self._log_dir is not None:
                self._logs.close()

    def tag(self) -> str | None:
        """Return the title of the node that the calling thread belongs to."""
        scope = current_scope(required=False)
        return self._single if scope is None else scope.owner.title

    def lead(self, tag: str | None) -> str:
        """Return what stands before each line of a node."""
        return f"[{tag}] " if tag is not None and self._prefix else ""

    def log(self, tag: str | None, text: str) -> None:
        """Add whole lines to the file of a node."""
        if self._logs is None or tag is None:
            return
        trouble = self._logs.write(tag, text)
        if trouble:
            self.raw_stderr.write(trouble)


def check_folder(folder: "Path") -> None:
    """Make a folder for logs if need be, and write to it. Local: no MPI.

    Raises
    ------
    UsageError
        If it cannot be written.
    """
    from tempfile import TemporaryFile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: "Path", error: OSError) -> UsageError:
    return UsageError(
        f"--log-dir {folder}: expected a folder that can be written, got {error}. "
        "Give another one."
    )


class _Line:
    """The incomplete line of one thread and node."""

    __slots__ = ("parts", "size", "tag")

    def __init__(self, tag: str | None) -> None:
        self.tag = tag
        self.parts: list[str] = []
        self.size = 0

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.size += len(text)
        if self.size > _LONG and "\r" in text:
            self.parts = [text[text.rindex("\r") :]]
            self.size = len(self.parts[0])

    def take(self) -> str:
        parts, self.parts, self.size = self.parts, [], 0
        return "".join(parts)


class _Stream:
    """Stands in for a text stream; everything but writing goes to the one below."""

    def __init__(self, below: TextIO | None, output: Output, raw: bool = False) -> None:
        self.below = below
        self._output = output
        self._raw = raw
        self._own = threading.local()  # .lines: the incomplete ones of this thread, by tag
        self._open: set[_Line] = set()  # the same of all threads
        self._fd = _descriptor(below)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        output = self._output
        if self._raw or not output.active:
            self._put(text)
            if output.active:
                output.log(output.tag(), text)
            return len(text)
        line = self._line(output.tag())
        whole, newline, rest = text.rpartition("\n")
        if newline:
            self._open.discard(line)
            self._lines(line.tag, line.take() + whole + "\n")
        if rest:
            line.add(rest)
            self._open.add(line)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        output = self._output
        if output.active and not self._raw and output.tag() is None:
            line = self._line(None)
            self._open.discard(line)
            self._put(line.take())
        if self.below is not None:
            self.below.flush()

    def finish(self) -> None:
        """Write what has no newline yet, with one."""
        for line in list(self._open):
            self._open.discard(line)
            try:
                self._lines(line.tag, line.take() + "\n")
            except ValueError:  # the stream below was closed: nobody is there to read it
                return

    def forget(self) -> None:
        """Leave incomplete lines to the parent, in a forked child."""
        for line in self._open:
            line.take()
        self._open.clear()

    def _line(self, tag: str | None) -> _Line:
        lines: dict[str | None, _Line] = self._own.__dict__.setdefault("lines", {})
        line = lines.get(tag)
        if line is None:
            line = lines[tag] = _Line(tag)
        return line

    def _lines(self, tag: str | None, text: str) -> None:
        """Write whole lines of a node."""
        lead = self._output.lead(tag)
        if lead:
            self._put("".join(f"{lead}{line}\n" for line in text[:-1].split("\n")))
        else:
            self._put(text)
        self._output.log(tag, text)

    def _put(self, text: str) -> None:
        below = self.below
        if below is None or not text:
            return
        with _state.lock:
            if self._fd is None:
                below.write(text)
                below.flush()
                return
            below.flush()  # raises where it has been closed
            data = text.encode(below.encoding, below.errors or "strict")
            for chunk in _chunks(data):
                _write(self._fd, chunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


_state = _State()


def _below(stream: Any) -> Any:
    return stream.below if isinstance(stream, _Stream) else stream


def _as_text(stream: _Stream) -> TextIO:
    return cast(TextIO, stream)


def _descriptor(stream: Any) -> int | None:
    """Return the descriptor of an ordinary file stream; None for anything else.

    Streams of notebooks and of tests have descriptors too, that lead elsewhere.
    """
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if type(stream) is not io.TextIOWrapper or type(raw) is not io.FileIO:
        return None
    try:
        return stream.fileno() if "\n".encode(stream.encoding) == b"\n" else None
    except (OSError, ValueError, LookupError):
        return None


def _chunks(data: bytes) -> Iterator[bytes]:
    """Cut whole lines into pieces that a pipe takes at once; a longer line is one piece."""
    start = 0
    while len(data) - start > _ATOMIC:
        cut = data.rfind(b"\n", start, start + _ATOMIC) + 1
        cut = cut or data.find(b"\n", start) + 1 or len(data)
        yield data[start:cut]
        start = cut
    if start < len(data):
        yield data[start:]


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # whoever shares the terminal or pipe has made it so
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll()


class _Logs:
    """One file for each node, in a folder."""

    def __init__(self, folder: "Path", single: str | None) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}  # -1: given up
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if single is not None:
                self._open(single)
        except OSError as error:
            raise _unwritable(folder, error) from error

    def _open(self, tag: str) -> int:
        path = self._folder / f"{tag.replace('/', '-')}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._files[tag] = fd = os.open(path, flags, 0o666)
        return fd

    def write(self, tag: str, text: str) -> str:
        """Add text to the file of `tag`; return what to say where that fails, once."""
        with _state.lock:
            fd = self._files.get(tag)
            if fd == -1:
                return ""
            try:
                _write(
                    self._open(tag) if fd is None else fd,
                    text.encode("utf-8", "backslashreplace"),
                )
            except OSError as error:  # a full disk of logs is no reason to end the program
                self._files[tag] = -1
                return f"mpiml: --log-dir {self._folder}: no more log of {tag}: {error}\n"
        return ""

    def close(self) -> None:
        with _state.lock:
            for tag, fd in self._files.items():
                if fd >= 0:
                    self._files[tag] = -1
                    os.close(fd)


def _forked() -> None:
    """Free a child from a lock that some thread of the parent holds."""
    _state.lock = threading.RLock()
    for output in _state.outputs:
        for _, stream in output._replaced.values():
            stream.forget()
