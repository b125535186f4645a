"""One finding of the doctor, and how a child process is asked for one."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

__all__ = ["Check", "Outcome", "State", "attempt"]

State = Literal["ok", "note", "warn", "fail"]


class Check(NamedTuple):
    """One thing that was tried.

    Attributes
    ----------
    name
        What it is, in a word or two.
    state
        ``"ok"``; ``"note"``: not there and not needed; ``"warn"``: works, but badly, or by
        another way; ``"fail"``: mpiml needs it, and the exit status is 1.
    found
        What was seen.
    cure
        What to do about it; empty where nothing is to be done.
    """

    name: str
    state: State
    found: str
    cure: str = ""


class Outcome(NamedTuple):
    """How a child process ended; `status` is None where it ran past its time limit."""

    status: int | None
    stdout: str
    stderr: str

    def why(self) -> str:
        """Return one line on what went wrong: the last line it said, or how it ended."""
        if self.status is None:
            return "it did not end in time"
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status}"


def attempt(
    command: Sequence[str],
    timeout: float,
    environ: Mapping[str, str] | None = None,
    patience: float = 5.0,
) -> Outcome:
    """Run a command in a session of its own and kill all of the session when time is up.

    Local: no MPI in this process.
    """
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=None if environ is None else dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(127, "", str(error))
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # mpiexec hands SIGTERM on to its ranks; what ignores that is killed.
        child.terminate()
        try:
            stdout, stderr = child.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            stdout, stderr = child.communicate()
        return Outcome(None, stdout, stderr)
    return Outcome(child.returncode, stdout, stderr)
