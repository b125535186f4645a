"""Who waits and who drives progress in one process.

Whoever waits drives: a thread that needs a reply takes the *seat*, polls the link and hands
out what arrives, until its own wait is over; a leaving driver wakes the next waiter. While
user code computes and nobody waits, a helper thread takes the seat. It starts only after a
whole tick without a driver, so a service that answers short calls in a row never shares its
interpreter lock with it.

In a process without MPI there is no link and no driver: waiting is waiting for a lock. Where one
thread makes all calls of MPI (`mpiml.funnel`), only that thread takes the seat, in its waits and in
`poll`; there is no helper, and all others wait for what it hands out.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpiml import _native
from mpiml.callbacks import callbacks
from mpiml.errors import ServiceGoneError, Stopped, UsageError
from mpiml.funnel import DRIVERS, drive
from mpiml.scope import Scope
from mpiml.seat import Sleeper, nap, release
from mpiml.waits import Wait

__all__ = ["Driver", "Sleeper"]

_TICK = 0.001  # seconds that the helper waits for somebody else to drive
_QUIET_TICKS = 20  # ticks with a driver that stays, until the helper sleeps
_FRAMES = 64  # that one `poll` takes in at most
_TURNS = 16  # looks after a ring, before its message is given up for now
_BUSY_SPIN = 0.002  # seconds to watch a transfer without a pause

_stuck: list[Any] = []  # links that a thread still polls: their memory must not go


class Driver:
    """Waits and progress of one rank; `Engine` adds what the frames mean.

    Parameters
    ----------
    rank
        This rank.
    spin_us
        How long a waiting thread spins before it sleeps; 0 where ranks outnumber cores.

    Attributes
    ----------
    home
        Identity of the one thread that drives; 0 where any may.
    ended_by
        What every wait raises once the driver is closed, if there is a reason to tell.
    """

    def __init__(self, rank: int, spin_us: int) -> None:
        self.rank = rank
        self.spin_us = spin_us
        self.crowd = 1.0  # ranks of the host for each of its cores, if more than one
        self.link: Any = None
        self.home = 0
        self.closed = False
        self.ended_by: Exception | None = None
        self.sleepers: dict[int, Sleeper] = {}
        self.on_broken: Callable[[BaseException], None] = lambda error: None
        self._seat = threading.Lock()
        self.driving: Any = None
        self._driver = 0
        self._parked: dict[Any, list[Any]] = {}  # changed under `_mutex` only
        self._mutex = threading.Lock()
        self._later: deque[Callable[[], None]] = deque()
        self._helper_wait = Wait("helper")
        self._helper_park = threading.Lock()
        self._helper_parked = False
        self._departures = 0
        self._slack = 0  # the thread whose timer slack was changed
        self.stuck = False  # a thread polls that did not come back: nothing may be freed
        self._helper: threading.Thread | None = None

    def connect(self, link: Any) -> None:
        """Take `link` as the way to the other ranks; start the helper, where threads may drive."""
        self.link = link
        _native.set_timer_slack(1000)  # ns: else a sleep of 20 us takes 70; threads inherit it
        self._slack = threading.get_ident()
        self.home = getattr(link, "home", 0)
        if self.home:
            DRIVERS.append(self)
            return
        self._helper_park.acquire()
        self._helper = threading.Thread(target=self._help, name="mpiml-helper", daemon=True)
        self._helper.start()

    def shut(self, last: Callable[[], None] | None = None) -> None:
        """End the helper and every wait. Local; a second call does nothing.

        Parameters
        ----------
        last
            Called once no other thread polls, before the link is closed.
        """
        if self.closed:
            return
        self.closed = True
        self.interrupt()
        helper = self._helper
        if helper is not None and helper is not threading.current_thread():
            self._helper_wait.ready = True
            self._wake_helper()
            helper.join(5.0)
        # The seat is kept for good: a thread that a program has left behind, in a method that
        # never ended, say, must not poll what is freed here.
        if self.link is None:
            return
        if self in DRIVERS:
            DRIVERS.remove(self)
        if self._slack == threading.get_ident():
            _native.set_timer_slack(50_000)  # what Linux gives a thread
        if self._seat.acquire(True, 5.0):
            if last is not None:
                last()
            self.link.drain(1.0)
            self.link.close()
        else:
            self.stuck = True
            _stuck.append(self.link)

    def later(self, action: Callable[[], None]) -> None:
        """Run `action` at the next turn of the engine: safe from ``__del__`` and handlers."""
        self._later.append(action)
        if self.link is not None:
            self.link.bell.ring(self.rank)
        else:
            callbacks.put(self.turn)  # nobody drives

    def turn(self) -> None:
        """Run what `later` collected."""
        while self._later:
            try:
                action = self._later.popleft()
            except IndexError:
                return
            action()

    # -- waiting ---------------------------------------------------------------------------

    def fulfil(self, wait: Any) -> None:
        """Set `wait` ready and wake whoever waits for it."""
        wait.ready = True
        if self._parked:
            with self._mutex:
                locks = self._parked.pop(wait, ())
            for lock in locks:
                release(lock)
        if self.driving is wait and self._driver != threading.get_ident():
            self.link.bell.ring(self.rank)

    def interrupt(self) -> None:
        """Make every waiting thread look whether it is to stop."""
        with self._mutex:
            asleep = [lock for locks in self._parked.values() for lock in locks]
        for lock in asleep:
            release(lock)
        if self.link is not None:
            self.link.bell.ring(self.rank)

    def wait(self, wait: Any, deadline: float | None, scope: Scope | None) -> bool:
        """Wait until `wait` is ready, driving progress meanwhile; False after `deadline`.

        Local. A method gives up its turn in the service while it waits.

        Raises
        ------
        Stopped
            In a body, once the program stops.
        UsageError
            From inside another wait of the same thread, which it would wait for in turn.
        """
        if wait.ready:
            return True
        if self._driver == threading.get_ident():  # there only if this thread put it there
            raise UsageError(
                f"{wait.about}: expected no wait inside of another one of the same thread, got "
                "one from a signal handler or a finaliser that interrupted it. Set a flag there "
                "and call later, or call from a thread made with context().bind."
            )
        held = scope is not None and scope.nested and scope.suspend()
        try:
            while not wait.ready:
                if self.ended_by is not None:
                    raise self.ended_by
                if scope is not None and scope.halt:
                    raise Stopped("the program is stopping")
                if self.closed:
                    raise ServiceGoneError(f"{wait.about}: the program has ended")
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                if self._sit_down():
                    try:
                        self._drive(wait, deadline, scope)
                    finally:
                        self._leave_seat()
                        self._departures += 1
                else:
                    self._park(wait, deadline, scope)
        finally:
            # Whoever leaves hands on, for whatever reason: one that was woken to drive may have
            # been woken just as its own wait ended.
            if self.link is not None and not self.home and not self._seat.locked():
                self._hand_on()
            if held and scope is not None:
                scope.resume()
        return True

    def poll(self) -> bool:
        """Make one turn of progress; return whether there was anything to do.

        Local: never waits. Does nothing where another thread drives, or this one does already.

        Raises
        ------
        Exception
            What the link raises where it is broken.
        """
        if self.closed or self.link is None or not self._seat.acquire(False):
            return False
        self._driver = threading.get_ident()
        moved = bool(self._later)
        try:
            if moved:
                self.turn()
            poll = self.link.poll
            frames = _FRAMES
            while frames and poll():
                moved = True
                frames -= 1
        except self.link.errors as error:
            self.on_broken(error)
            raise
        finally:
            self._departures += 1
            self._leave_seat()
            if not self.home and (self._parked or self._helper_parked):
                self._hand_on()  # the helper sleeps while somebody drives for long
        return moved

    def _sit_down(self) -> bool:
        """Take the seat, if this thread may have it."""
        if self.link is None or (self.home and self.home != threading.get_ident()):
            return False
        return self._seat.acquire(False) or self._take_over()

    def _hand_on(self) -> None:
        """Let somebody else drive: a waiter, or for want of one the helper."""
        if not (self._parked and self._wake_one()) and self._helper_parked:
            self._wake_helper()

    def _leave_seat(self) -> None:
        self.driving = None
        self._driver = 0
        self._seat.release()

    def _take_over(self) -> bool:
        """Take the seat from the helper, which drives only for want of anybody else."""
        if self.driving is self._helper_wait:
            self._helper_wait.ready = True
            self.link.bell.ring(self.rank)
            return self._seat.acquire(True, 0.01)
        return False

    def _wake_one(self) -> bool:
        """Let a waiter take the seat; False if there is none but idle threads of services.

        Those have no hurry: the helper drives for them, should nobody else come.
        """
        with self._mutex:
            for wait, locks in self._parked.items():
                if not getattr(wait, "patient", False):
                    release(locks[0])
                    return True
        return False

    def _wake_helper(self) -> None:
        self._helper_parked = False
        release(self._helper_park)

    def _park(self, wait: Any, deadline: float | None, scope: Scope | None) -> None:
        lock = threading.Lock()
        lock.acquire()
        with self._mutex:
            self._parked.setdefault(wait, []).append(lock)
        sleeper = self.sleepers.setdefault(
            threading.get_ident(), Sleeper(wait, scope, deadline)
        )
        try:
            if wait.ready or self.closed or (scope is not None and scope.halt):
                return
            if self.link is not None and not self.home and not self._seat.locked():
                return  # the driver left before it could see us
            timeout = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            lock.acquire(True, timeout)
        finally:
            with self._mutex:
                locks = self._parked.get(wait)
                if locks is not None and lock in locks:
                    locks.remove(lock)
                    if not locks:
                        del self._parked[wait]
            if self.sleepers.get(sleeper.thread) is sleeper:
                del self.sleepers[sleeper.thread]

    def _drive(self, wait: Any, deadline: float | None, scope: Scope | None) -> None:
        link = self.link
        bell, poll = link.bell, link.poll
        others = bool(self.home) and len(DRIVERS) > 1  # no program begins or ends on home here
        far = link.far or others
        self._driver = threading.get_ident()  # first: see `wait`
        self.driving = wait
        misses = 0
        quiet_since = 0.0
        sleeper: Sleeper | None = None
        try:
            while not wait.ready and not self.closed:
                if scope is not None and scope.halt:
                    return
                seen = bell.value()
                if self._later:
                    self.turn()
                if poll() or (others and drive(self)):
                    misses, quiet_since = 0, 0.0
                    continue
                misses += 1
                if wait.ready or (misses < 20 and far):
                    continue  # no bell rings for a rank of another host
                if not quiet_since and link.busy:
                    quiet_since = time.monotonic()
                if not quiet_since:
                    turns = _TURNS if bell.wait(seen, self.spin_us, 0) else 0
                    while turns and not poll():
                        turns -= 1  # a ring may come a few turns before its message shows
                    if not turns:
                        quiet_since = time.monotonic()
                    continue
                now = time.monotonic()
                busy = link.busy
                if busy and self.spin_us and now - quiet_since < _BUSY_SPIN:
                    continue  # a transfer moves on only while both sides look
                if sleeper is None and not busy:
                    sleeper = Sleeper(wait, scope, deadline)
                    self.sleepers[self._driver] = sleeper
                if deadline is not None and now >= deadline:
                    return
                bell.wait(seen, 0, nap(now, now - quiet_since, busy, far, deadline, self.crowd))
        except link.errors as error:
            # Anything else was thrown into this thread, by a signal handler say, or leaves with
            # the body that waits: it is not for the engine to end the program.
            self.on_broken(error)
            raise
        finally:
            if sleeper is not None:
                self.sleepers.pop(self._driver, None)

    # -- the helper ------------------------------------------------------------------------

    def _help(self) -> None:
        """Drive while user code computes; sleep while somebody else drives."""
        while not self.closed:
            self._helper_parked = True
            if self._seat.locked():  # its driver sees the flag when it leaves
                self._helper_park.acquire()
            self._helper_parked = False
            quiet = 0
            while not self.closed and quiet < _QUIET_TICKS:
                before = self._departures
                time.sleep(_TICK * max(1.0, 0.4 * self.crowd))
                if self._seat.locked():
                    quiet = quiet + 1 if self._departures == before else 0
                elif self._departures == before and self._seat.acquire(False):
                    self._helper_wait.ready = self.closed
                    try:
                        self._drive(self._helper_wait, None, None)
                    except Exception as error:
                        self.on_broken(error)
                        return
                    finally:
                        self._leave_seat()
                        if self._parked:
                            self._wake_one()
