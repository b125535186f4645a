"""`Result`: what a program returned, or the error that ended it."""

from typing import Any

from mpiml.control import EXIT, FAILED, STUCK
from mpiml.errors import MpimlError, UsageError
from mpiml.runtime import Runtime

__all__ = ["Result", "finish"]


class Result:
    """What a program returned.

    Local. Values that came from other ranks are decoded when they are read.

    Attributes
    ----------
    stopped_by : str
        ``"finished"``, or who or what ended it early.
    status : int
        The exit status that a command would end with: 0, or what a signal stands for.
    """

    def __init__(self, runtime: Runtime, stopped_by: str, status: int = 0) -> None:
        self.stopped_by = stopped_by
        self.status = status
        self._rank = runtime.engine.rank
        self._held: dict[str, list[Any]] = {}
        self._values: dict[str, list[Any]] = {}
        if self._rank == 0:
            for vertex in runtime.vertices:
                decode = runtime.results.get(vertex.id, _nothing)
                self._held.setdefault(vertex.role, []).append(decode)

    def __getitem__(self, role: str) -> list[Any]:
        """Return the values of a role in index order.

        Raises
        ------
        UsageError
            On other ranks than rank 0 of the communicator.
        RemoteError
            If a value could not be sent to rank 0; says which node returned it, and why.
        KeyError
            If there is no such role.
        """
        if self._rank != 0:
            raise UsageError(
                f"Result[{role!r}]: expected rank 0 of the program's communicator, got rank "
                f"{self._rank}. Return values are gathered there only; broadcast what you need."
            )
        if role not in self._values:
            if role not in self._held:
                raise KeyError(f"no role {role!r}; the program has {', '.join(self._held)}")
            self._values[role] = [decode() for decode in self._held[role]]
            self._held[role] = []
        return self._values[role]

    def keys(self) -> list[str]:
        """Return the roles that have values here."""
        return list(self._held)

    def __repr__(self) -> str:
        return f"<Result, {self.stopped_by}, roles {', '.join(self._held) or 'on rank 0'}>"


def _nothing() -> None:
    return None


def finish(runtime: Runtime) -> Result:
    """Turn the end of a program into its result, or raise what ended it. Local."""
    note = runtime.ending.note
    assert note is not None
    if note.reason == STUCK:
        raise MpimlError(f"nodes still ran after the grace:\n{note.text}")
    if note.reason in (FAILED, EXIT):
        raise runtime.error_of(note)
    return Result(runtime, note.text, note.status)
