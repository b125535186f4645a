"""Asking ranks of other hosts whether they are there, while this rank waits for them.

What counts as silence stands in `mpiml.silence`. A rank that waits for nobody asks nobody, and
one that waits asks those it waits for, so no rank is asked by all.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from mpiml import control, threads, wire
from mpiml.silence import Quiet, Silence, Turns
from mpiml.topics.graph import subscriptions
from mpiml.wire import HEAR_ASK, HEARD, Frame

__all__ = ["Hearing"]

_LOOKS = 6  # in the time after which a silence is told
_MOST = 32  # ranks that are asked for one wait
_LONG = 60.0  # s; where no silence is told, and before the stop none is looked for


class Hearing:
    """Tells when nothing comes from another host that this rank waits for.

    Local: a thread that sleeps, in programs on several hosts.

    Parameters
    ----------
    runtime
        The program on this rank.
    limit
        Seconds from the loss of a link until it is told, at most; 0: never.
    waits
        Returns lines on what the nodes of this rank wait for.
    """

    def __init__(self, runtime: Any, limit: float, waits: Callable[[], list[str]]) -> None:
        self._runtime = runtime
        self._engine = engine = runtime.engine
        self._step = max(0.02, (limit or _LONG) / _LOOKS)
        self._tells = limit > 0
        self._closed = False
        self._wake = threading.Event()
        # a signal handler of the user's may ask for the stop while its thread holds the lock
        self._lock = threading.RLock()
        self._partners: dict[int, tuple[int, ...]] | None = None
        rows = runtime.hosts.rows
        here = runtime.hosts.host_of(engine.rank)
        self._silence = Silence([row.ranks for row in rows], here, 3.9 * self._step)
        self._silence.beside = 0.9 * self._step
        self._turns = Turns(1.5 * self._step)  # below: under the lock, as the rule is
        engine.handlers[HEAR_ASK] = self._on_ask
        engine.handlers[HEARD] = self._on_heard
        self._waits = waits
        self._started = False
        if limit > 0 and len(rows) > 1:
            self._start()

    def close(self) -> None:
        """Tell nothing any more, and ask only on account of questions that are open.

        Once it returns, what is asked is on its way, so that the end can wait for it.
        """
        with self._lock:
            self._closed = True
        self._wake.set()

    def silent(self, patience: float, cut: bool = False) -> str:
        """Return, in lines, who has not answered for so many seconds; empty if nobody.

        With `cut` only hosts that can hardly be there: several of their ranks have been asked,
        none has answered, and those need not call `mpiml.poll` for it.
        """
        with self._lock:
            found = self._silence.silent(self._turns.time, patience)
        if cut:
            many = [quiet for quiet in found if len(quiet.silent) > 1 and not quiet.answering]
            found = [] if threads.funneled() else many
        return "\n".join(map(self._line, found))

    def stopping(self) -> None:
        """Ask the next ranks in the tree by which decisions travel, at the stop. Local.

        They are there until this rank has ended, too.
        """
        if len(self._runtime.hosts.rows) < 2 or self._closed:
            return
        settings = self._runtime.settings
        grace = min(settings.grace, settings.failure_grace or settings.grace)
        with self._lock:  # who is silent has to be known once the grace is over
            self._step = min(self._step, max(0.02, grace / _LOOKS))
            self._silence.beside = 0.9 * self._step
            self._turns.longest = 1.5 * self._step
        self._ask(self._next_ranks())
        self._start()
        self._wake.set()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._watch, name="mpiml-hearing", daemon=True).start()

    # -- asking and being asked ----------------------------------------------------------------

    def _on_ask(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        self._engine.transmit(rank, HEARD, self._engine.rank, rank)

    def _on_heard(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        with self._lock:
            if rank == self._engine.rank:
                self._turns.back()
                return
            back = self._silence.heard(rank, self._turns.time)
        if back is not None and not self._closed:
            name = self._runtime.hosts.rows[back[0]].name
            self._runtime.say(
                f"mpiml: {self._runtime.name}: host {name} is heard again, by rank "
                f"{self._engine.rank}, after {back[1]:.1f} s\n"
            )

    def _watch(self) -> None:
        runtime = self._runtime
        while True:
            self._wake.wait(self._step)
            self._wake.clear()
            with self._lock:
                open_ = self._silence.open
            if runtime.done or (self._closed and not open_):
                return
            awaited = set() if self._closed else set(self._awaited())
            with self._lock:
                open_ = self._silence.open
                awaited = open_ if self._closed else awaited
                sends = self._turns.look(time.monotonic(), bool(open_ or awaited))
                self._ask(awaited)
                if sends:
                    self._send_home()  # behind the questions
                news = self._silence.news(awaited, self._turns.time)
            for quiet in news if self._tells and not self._closed else ():
                self._tell(quiet)

    def _ask(self, awaited: Collection[int]) -> None:
        with self._lock:
            for rank in self._silence.asks(awaited, self._turns.time):
                self._engine.transmit(rank, HEAR_ASK, self._engine.rank, rank)

    def _send_home(self) -> None:
        """Send a message to this rank by way of the link, which `transmit` would not."""
        engine = self._engine
        engine.note_sent()
        engine.link.send(engine.rank, wire.join(HEARD, engine.rank, engine.rank))

    # -- who is awaited ------------------------------------------------------------------------

    def _awaited(self) -> Iterator[int]:
        """Yield the ranks that this one waits for now; also those of its own host."""
        runtime, engine = self._runtime, self._engine
        ranks = runtime.ranks
        for call in list(engine.pending.values()):
            yield ranks[call.target_vertex]
        for members in runtime.teams.awaited():  # one of each host tells enough
            first = {runtime.hosts.host_of(ranks[v]): ranks[v] for v in reversed(members)}
            yield from list(first.values())[:_MOST]
        if runtime.stopping:
            yield from self._next_ranks()
        for sleeper in list(engine.sleepers.values()):
            node = None if sleeper.scope is None else sleeper.scope.owner
            if node is not None and sleeper.wait is not node.released:
                yield from self._partners_of(node.vertex)

    def _next_ranks(self) -> list[int]:
        """Return the ranks right above and below in the tree by which decisions travel."""
        rank = self._engine.rank
        return [max(0, control.parent(rank)), *control.children(rank, self._engine.size)]

    def _partners_of(self, vertex: int) -> tuple[int, ...]:
        """Return the ranks of other hosts at the other ends of a node's topics."""
        if self._partners is None:
            runtime = self._runtime
            found: dict[int, set[int]] = {node.vertex: set() for node in runtime.present}
            for _, subscribers in subscriptions(runtime.vertices).values():
                for each in subscribers:
                    if each.vertex in found:
                        found[each.vertex].update(runtime.ranks[p] for p in each.publishers)
                    for publisher in found.keys() & each.publishers:
                        found[publisher].add(runtime.ranks[each.vertex])
            self._partners = {v: self._spread(ranks) for v, ranks in found.items()}
        return self._partners.get(vertex, ())

    def _spread(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return those of other hosts, as many as may be asked: the first of each host first."""
        engine, hosts = self._engine, self._runtime.hosts
        here = hosts.host_of(engine.rank)
        seen: dict[int, int] = {}
        turns = []
        for rank in sorted(ranks):
            host = hosts.host_of(rank) if rank < engine.size else here  # a guest has none
            if host != here:
                seen[host] = seen.get(host, 0) + 1
                turns.append((seen[host], rank))
        return tuple(rank for _, rank in sorted(turns)[:_MOST])

    # -- what is told --------------------------------------------------------------------------

    def _tell(self, quiet: Quiet) -> None:
        runtime = self._runtime
        waits = self._waits()
        if not waits:  # it computes, or moves a large message on
            waits = [
                f"rank {self._engine.rank} waits for {call.about}"
                for call in list(self._engine.pending.values())
                if runtime.ranks[call.target_vertex] in quiet.silent
            ][:4]
        busy = (
            "computes without letting mpiml run: in code that holds Python's lock or, below "
            "MPI_THREAD_MULTIPLE, does not call mpiml.poll()"
        )
        cause = (
            f"The host is there, so that is a process that {busy}; or one that is stopped"
            if quiet.answering
            else "The link, a switch, or the host itself may be down, which TCP does not tell for "
            f"many minutes; or what runs there {busy}"
        )
        lines = [self._line(quiet), *waits, f"{cause}. The program waits on."]
        runtime.say(f"mpiml: {runtime.name}: " + "\n  ".join(lines) + "\n")

    def _line(self, quiet: Quiet) -> str:
        name = self._runtime.hosts.rows[quiet.host].name
        who, seconds = _few(quiet.silent), f"for {quiet.seconds:.1f} s"
        if quiet.answering:
            return (
                f"{who} of host {name}: no answer to rank {self._engine.rank} {seconds}, though "
                f"{_few(quiet.answering)} of that host did answer"
            )
        return (
            f"nothing has come from host {name} ({who}) to rank {self._engine.rank} {seconds}"
        )


def _few(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"
