"""A board: keys and values that the nodes of a role share, with waits for keys to appear.

The values live on the rank of the role's first node. Questions are frames of their own kind,
answered by whoever drives progress there and not by a thread of the node: so they are answered
while its body computes, while its methods hold all turns, and before its object is built. A
question about keys that are missing is answered when they are there; nobody waits meanwhile.

`torch.distributed` keeps its rendezvous on such a board (see `mpiml.torch`); the operations are
those of its stores.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from mpiml.contents import own, parts
from mpiml.errors import DeadlineError, ServiceGoneError, UsageError
from mpiml.payload import SNAPSHOT, Packed, pack, pack_error, unpack
from mpiml.target import Reply, Target
from mpiml.wire import BOARD, ERROR, REPLY, Frame

__all__ = ["Board", "BoardClient", "Boards"]

_SLICE = 0.25  # s: how often a wait looks whether the program has failed
_KEYS = 4  # so many keys stand in an error message

_Answer = Callable[[Any, bool], None]


class Board:
    """Keys and values. Local, safe from any thread; never waits.

    Every operation is atomic, and `answer` is called with its result and False, or with an
    exception and True: at once, or as soon as the keys that `get` and `wait` ask for exist.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Waiter]] = {}
        self._left = 0

    def ask(
        self, operation: str, args: tuple[Any, ...], answer: _Answer, ticket: Any = None
    ) -> None:
        """Do one operation, see `BoardClient.ask`; `forget` takes its ticket."""
        with self._lock:
            try:
                if operation in ("get", "wait"):
                    (keys,) = args
                    done = self._when_there(_Waiter(answer, keys, operation == "get", ticket))
                elif operation in self._operations:
                    done = self._operations[operation](self, answer, *args)
                else:
                    raise UsageError(
                        f"board: expected get, wait, {', '.join(self._operations)}, got "
                        f"{operation!r}"
                    )
            except Exception as error:
                done = [(answer, error, True)]
        for listener, value, failed in done:
            listener(value, failed)

    def forget(self, ticket: Any) -> None:
        """Answer the question of that ticket no more: who has asked waits no longer."""
        with self._lock:
            for key, waiters in list(self._waiting.items()):
                kept = [waiter for waiter in waiters if waiter.ticket != ticket]
                if kept:
                    self._waiting[key] = kept
                else:
                    del self._waiting[key]

    @property
    def waiting(self) -> int:
        """How many questions wait for keys."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    @property
    def left(self) -> int:
        """How many members have left the board; under no lock, for `Boards`."""
        return self._left

    # Each returns whom to answer: itself, and those that have waited for what it wrote.

    def _set(self, answer: _Answer, keys: Sequence[str], values: Sequence[bytes]) -> Any:
        self._values.update(zip(keys, values, strict=True))
        return [(answer, None, False), *self._appeared(keys)]

    def _append(self, answer: _Answer, key: str, value: bytes) -> Any:
        self._values[key] = self._values.get(key, b"") + value
        return [(answer, None, False), *self._appeared([key])]

    def _add(self, answer: _Answer, key: str, amount: int) -> Any:
        old = self._values.get(key, b"0")
        try:
            total = int(old) + amount
        except ValueError:
            raise UsageError(f"add({key!r}): expected a number there, got {old!r}") from None
        self._values[key] = b"%d" % total
        return [(answer, total, False), *self._appeared([key])]

    def _compare_set(self, answer: _Answer, key: str, expected: bytes, desired: bytes) -> Any:
        old = self._values.get(key)
        if old is None and expected:
            return [(answer, expected, False)]  # as torch's stores do: nothing is written
        if old is not None and old != expected:
            return [(answer, old, False)]
        self._values[key] = desired
        return [(answer, desired, False), *self._appeared([key])]

    def _check(self, answer: _Answer, keys: Sequence[str]) -> Any:
        return [(answer, all(key in self._values for key in keys), False)]

    def _delete(self, answer: _Answer, key: str) -> Any:
        return [(answer, self._values.pop(key, None) is not None, False)]

    def _count(self, answer: _Answer) -> Any:
        return [(answer, len(self._values), False)]

    def _leave(self, answer: _Answer) -> Any:
        self._left += 1
        return [(answer, None, False)]

    _operations: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "set": _set,
        "append": _append,
        "add": _add,
        "compare_set": _compare_set,
        "check": _check,
        "delete": _delete,
        "count": _count,
        "leave": _leave,
    }

    # -- those who wait ------------------------------------------------------------------------

    def _when_there(self, waiter: "_Waiter") -> Any:
        """Answer a waiter whose keys all exist; else let it wait for the first that does not."""
        for key in waiter.keys:
            if key not in self._values:
                self._waiting.setdefault(key, []).append(waiter)
                return []
        value = [self._values[key] for key in waiter.keys] if waiter.wants else None
        return [(waiter.answer, value, False)]

    def _appeared(self, keys: Sequence[str]) -> Any:
        if not self._waiting:
            return []
        done = []
        for key in keys:
            for waiter in self._waiting.pop(key, ()):
                done += self._when_there(waiter)
        return done


class _Waiter:
    """A question whose answer has to wait for keys."""

    __slots__ = ("answer", "keys", "ticket", "wants")

    def __init__(self, answer: _Answer, keys: Sequence[str], wants: bool, ticket: Any) -> None:
        self.answer = answer
        self.keys = tuple(keys)
        self.wants = wants
        self.ticket = ticket


class Boards:
    """The boards of one rank: one for each role whose first node it holds, and number.

    Local: made with the program; takes and answers frames, runs no user code.

    Parameters
    ----------
    engine
        The rank's engine, whose table of handlers is filled.
    members
        Maps the vertex of a role's first node to the size of the role.
    """

    def __init__(self, engine: Any, members: Callable[[int], int]) -> None:
        self._engine = engine
        self._members = members
        self._boards: dict[tuple[int, int], Board] = {}
        engine.handlers[BOARD] = self._on_question

    def __len__(self) -> int:
        return len(self._boards)

    @property
    def waiting(self) -> int:
        """How many questions wait for keys."""
        return sum(board.waiting for board in list(self._boards.values()))

    def _on_question(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        where = frame.target, frame.aux
        body, rest = parts(frame, buffers)
        operation, *args = unpack(frame.encoding, body, rest)
        if operation == "forget":  # nobody waits for an answer; the board may be gone already
            if where in self._boards:
                self._boards[where].forget((rank, *args))
            return
        board = self._boards.setdefault(where, Board())

        def answer(value: Any, failed: bool) -> None:
            packed = pack_error(value) if failed else pack(value, SNAPSHOT, "the value")
            self._send(rank, frame, packed, ERROR if failed else REPLY)

        board.ask(operation, tuple(args), answer, (rank, frame.id))
        if board.left == self._members(frame.target):
            self._boards.pop(where, None)

    def _send(self, rank: int, frame: Frame, packed: Packed, kind: int) -> None:
        self._engine.transmit(
            rank, kind, frame.target, frame.source, frame.id,
            encoding=packed.encoding, body=packed.body, buffers=packed.buffers,
        )  # fmt: skip


class BoardClient:
    """The board of a role, for one of its nodes. Local; safe from any thread.

    Parameters
    ----------
    runtime
        The program on this rank.
    node
        The node that asks.
    number
        Which board of the role: all nodes of it that give the same number share one. It is
        forgotten when all have called ``ask("leave")``.
    """

    def __init__(self, runtime: Any, node: Any, number: int) -> None:
        vertex, rank = runtime.first_of(node.spec)
        title = f"{node.spec.role}/0"
        self._runtime = runtime
        self._number = number
        self._target = Target(
            runtime.engine, node.vertex, vertex, rank, title, None, node.scope
        )

    def ask(self, operation: str, *args: Any, timeout: float | None = None) -> Any:
        """Do an operation of `Board` and return its result.

        Parameters
        ----------
        operation, args
            ``set(keys, values)``, ``append(key, value)``, ``add(key, amount)``,
            ``compare_set(key, expected, desired)``, ``check(keys)``, ``delete(key)``,
            ``count()``, ``get(keys)``, ``wait(keys)``, ``leave()``. Values are bytes.
        timeout
            Seconds to wait for the answer; None waits as long as the program runs.

        Raises
        ------
        DeadlineError
            No answer came in time: keys that were waited for are missing.
        ServiceGoneError
            The program has failed or ended.
        Stopped
            In a body, when the program stops.
        """
        target = self._target
        engine = target.engine
        scope = target.calling_scope()
        reply = Reply(target, f"board.{operation}")
        reply.id = engine.new_id()
        engine.pending[reply.id] = reply
        try:
            self._send(reply.id, operation, *args)
            self._await(reply, args, timeout, scope)
        except DeadlineError:
            self._send(engine.new_id(), "forget", reply.id)
            raise
        finally:
            engine.pending.pop(reply.id, None)
        return reply.value()

    def _send(self, number: int, *question: Any) -> None:
        target = self._target
        packed = pack(question, SNAPSHOT, "the value")
        if not target.far:
            packed = own(packed)
        target.engine.transmit(
            target.rank, BOARD, target.source, target.vertex, number, self._number,
            encoding=packed.encoding, body=packed.body, buffers=packed.buffers,
        )  # fmt: skip

    def _await(self, reply: Any, args: Any, timeout: float | None, scope: Any) -> None:
        engine, ending = self._target.engine, self._runtime.ending
        deadline = None if timeout is None else time.monotonic() + timeout
        while not reply.ready:
            until = time.monotonic() + _SLICE
            if engine.wait(reply, until if deadline is None else min(until, deadline), scope):
                return
            if ending.failed:  # a method is not interrupted by it, so it has to look
                raise ServiceGoneError(f"{reply.about}: the program has failed")
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(
                    f"{reply.about}: expected an answer{_about(args)} within {timeout:g} s, got "
                    "none. Every replica of the role has to take part; a longer timeout waits "
                    "longer for one that is late."
                )


def _about(args: tuple[Any, ...]) -> str:
    keys = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    shown = ", ".join(map(repr, keys[:_KEYS]))
    more = f" and {len(keys) - _KEYS} more" if len(keys) > _KEYS else ""
    return f" about {shown}{more}" if keys else ""
