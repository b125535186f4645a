"""Driver: whoever waits drives, one at a time, and nobody is left asleep."""

import threading
import time

import pytest

from mpiml.driver import Driver
from mpiml.errors import ServiceGoneError, Stopped, UsageError
from mpiml.scope import BodyScope
from mpiml.waits import Wait

LIMIT = 20.0


class Owner:
    vertex = 0
    title = "role/0"


class Bell:
    """A bell of one process: rings are counted, sleepers wait on a condition."""

    def __init__(self):
        self.count = 0
        self.changed = threading.Condition()

    def ring(self, rank):
        with self.changed:
            self.count += 1
            self.changed.notify_all()

    def value(self):
        return self.count

    def wait(self, seen, spin_us, timeout_us):
        with self.changed:
            return self.changed.wait_for(lambda: self.count != seen, timeout_us * 1e-6)


class Link:
    """Delivers actions put into it; notices when two threads poll at once."""

    far = False
    busy = False
    errors = (ZeroDivisionError,)

    def __init__(self):
        self.bell = Bell()
        self.inbox = []
        self.polling = threading.Lock()
        self.overlaps = 0
        self.pollers = set()
        self.closed = False

    def put(self, action):
        self.inbox.append(action)
        self.bell.ring(0)

    def poll(self):
        if not self.polling.acquire(False):
            self.overlaps += 1
            return False
        try:
            self.pollers.add(threading.current_thread().name)
            if not self.inbox:
                return False
            self.inbox.pop(0)()
            return True
        finally:
            self.polling.release()

    def drain(self, seconds):
        return True

    def close(self):
        self.closed = True


@pytest.fixture
def driver():
    driver = Driver(0, 0)
    link = Link()
    driver.connect(link)
    yield driver
    driver.shut()
    assert link.closed
    assert link.overlaps == 0
    assert not driver.sleepers


def start(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def test_the_thread_that_waits_polls(driver):
    wait = Wait()
    driver.link.put(lambda: driver.fulfil(wait))
    assert driver.wait(wait, time.monotonic() + LIMIT, None)
    assert "MainThread" in driver.link.pollers


def test_a_leaving_driver_hands_the_seat_on(driver):
    first, second = Wait(), Wait()
    one = start(driver.wait, first, time.monotonic() + LIMIT, None)
    two = start(driver.wait, second, time.monotonic() + LIMIT, None)
    driver.link.put(lambda: driver.fulfil(first))
    one.join(LIMIT)
    driver.link.put(lambda: driver.fulfil(second))
    two.join(LIMIT)
    assert not one.is_alive()
    assert not two.is_alive()


def test_many_waiters_in_any_order_all_return(driver):
    waits = [Wait(str(i)) for i in range(16)]
    threads = [start(driver.wait, w, time.monotonic() + LIMIT, None) for w in waits]
    for i in [*range(1, 16, 2), *range(0, 16, 2)]:
        driver.link.put(lambda w=waits[i]: driver.fulfil(w))
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)


def test_the_helper_drives_while_nobody_waits(driver):
    done = threading.Event()
    wait = Wait()
    driver.link.put(lambda: driver.fulfil(wait))
    driver.wait(wait, time.monotonic() + LIMIT, None)  # somebody has driven, and left
    driver.link.put(done.set)
    assert done.wait(LIMIT)
    assert "mpiml-helper" in driver.link.pollers


def test_a_waiter_takes_the_seat_from_the_helper(driver):
    running = threading.Event()
    wait = Wait()
    driver.link.put(lambda: driver.fulfil(wait))
    driver.wait(wait, time.monotonic() + LIMIT, None)
    driver.link.put(running.set)
    assert running.wait(LIMIT)
    driver.link.pollers.clear()
    again = Wait()
    driver.link.put(lambda: driver.fulfil(again))
    assert driver.wait(again, time.monotonic() + LIMIT, None)


def test_fulfilled_by_another_thread_while_driving(driver):
    wait = Wait()
    timer = threading.Timer(0.01, driver.fulfil, (wait,))
    timer.start()
    assert driver.wait(wait, time.monotonic() + LIMIT, None)
    timer.join()


def test_a_deadline_ends_a_wait_that_nothing_fulfils(driver):
    assert not driver.wait(Wait(), time.monotonic() + 0.01, None)
    assert not driver.wait(Wait(), time.monotonic() - 1, None)


def test_a_halted_scope_raises_stopped_whether_it_drives_or_sleeps(driver):
    scopes = [BodyScope(Owner), BodyScope(Owner)]
    ended = []

    def body(scope):
        try:
            driver.wait(Wait(), time.monotonic() + LIMIT, scope)
        except Stopped:
            ended.append(scope)

    threads = [start(body, scope) for scope in scopes]
    for scope in scopes:
        scope.stop()
    driver.interrupt()
    for thread in threads:
        thread.join(LIMIT)
    assert len(ended) == 2


def test_a_poll_that_lasts_leaves_the_helper_awake(driver):
    end = time.monotonic() + LIMIT

    def last_long():
        while not driver._helper_parked and time.monotonic() < end:
            time.sleep(0)

    driver.link.put(last_long)
    while not driver.poll():  # the helper may have been first
        driver.link.put(last_long)
    taken = threading.Event()
    driver.link.put(taken.set)
    assert taken.wait(LIMIT)


def test_shutting_ends_every_wait():
    driver = Driver(0, 0)
    driver.connect(Link())
    errors = []

    def body():
        try:
            driver.wait(Wait("x"), None, None)
        except ServiceGoneError as error:
            errors.append(error)

    threads = [start(body) for _ in range(3)]
    driver.shut()
    for thread in threads:
        thread.join(LIMIT)
    assert len(errors) == 3


def test_without_a_link_waiting_is_waiting_for_a_lock():
    driver = Driver(0, 0)
    wait = Wait()
    thread = start(driver.wait, wait, time.monotonic() + LIMIT, None)
    driver.fulfil(wait)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert not driver.wait(Wait(), time.monotonic() + 0.01, None)


def test_later_runs_in_the_next_turn(driver):
    wait = Wait()
    driver.later(lambda: driver.fulfil(wait))
    assert driver.wait(wait, time.monotonic() + LIMIT, None)


def test_an_error_in_a_handler_is_told_not_swallowed(driver):
    told = []
    driver.on_broken = told.append

    def broken():
        raise ZeroDivisionError

    driver.link.put(broken)
    with pytest.raises(ZeroDivisionError):
        driver.wait(Wait(), time.monotonic() + LIMIT, None)
    assert isinstance(told[0], ZeroDivisionError)


def test_what_is_thrown_into_a_waiting_thread_leaves_its_wait_only(driver):
    """A signal handler's exception, for instance: the engine is not broken by it."""
    told = []
    driver.on_broken = told.append

    def thrown():
        raise TimeoutError

    driver.link.put(thrown)
    with pytest.raises(TimeoutError):
        driver.wait(Wait(), time.monotonic() + LIMIT, None)
    assert not told
    wait = Wait()
    driver.link.put(lambda: driver.fulfil(wait))
    assert driver.wait(wait, time.monotonic() + LIMIT, None)


def test_a_wait_inside_a_wait_of_the_same_thread_is_refused(driver):
    """As a call in a signal handler would be: it could wait for itself for ever."""
    outer = Wait()
    refused = []

    def handler():
        with pytest.raises(UsageError, match="signal handler"):
            driver.wait(Wait("inner"), None, None)
        refused.append(True)
        driver.fulfil(outer)

    driver.link.put(handler)
    assert driver.wait(outer, time.monotonic() + LIMIT, None)
    assert refused


def test_who_drove_before_is_not_taken_for_the_driver():
    """A thread that has driven waits again just as another one takes the seat."""
    taken, go_on = threading.Event(), threading.Event()

    class Slow(Driver):
        """Stands still where another thread may see half of what `_drive` notes."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name in ("driving", "_driver") and threading.current_thread().name == "second":
                taken.set()
                assert go_on.wait(LIMIT)

    driver = Slow(0, 0)
    link = Link()
    driver.connect(link)
    outcomes = []

    def first():
        wait = Wait("first")
        link.put(lambda: driver.fulfil(wait))
        driver.wait(wait, time.monotonic() + LIMIT, None)
        two.start()
        assert taken.wait(LIMIT)
        outcomes.append(driver.wait(Wait("again"), time.monotonic(), None))

    last = Wait("second")
    two = threading.Thread(
        target=driver.wait, args=(last, time.monotonic() + LIMIT, None), name="second"
    )
    one = start(first)
    one.join(LIMIT)
    go_on.set()
    driver.later(lambda: driver.fulfil(last))
    two.join(LIMIT)
    assert not two.is_alive()
    driver.shut()
    assert outcomes == [False]  # no refusal: its deadline had come


def test_shutting_waits_for_the_thread_that_polls():
    driver = Driver(0, 0)
    link = Link()
    inside, leave = threading.Event(), threading.Event()
    closed_inside = []

    def slow():
        inside.set()
        leave.wait(LIMIT)
        closed_inside.append(link.closed)

    driver.connect(link)
    link.put(slow)

    def wait():
        with pytest.raises(ServiceGoneError):
            driver.wait(Wait("x"), None, None)

    thread = start(wait)
    assert inside.wait(LIMIT)
    threading.Timer(0.05, leave.set).start()
    driver.shut()
    thread.join(LIMIT)
    assert closed_inside == [False]
    assert link.closed
    with pytest.raises(ServiceGoneError):  # and nobody polls any more
        driver.wait(Wait("y"), None, None)


def test_a_waiter_that_leaves_without_driving_hands_the_seat_on(driver):
    """A leaving driver wakes one waiter; if that one's time is over, others must not sleep on."""
    first, doomed, last = Wait("first"), Wait("doomed"), Wait("last")
    one = start(driver.wait, first, time.monotonic() + LIMIT, None)
    while driver.driving is not first:
        time.sleep(0.001)
    two = start(driver.wait, doomed, time.monotonic() + 0.05, None)  # parks, then times out
    while doomed not in driver._parked:
        time.sleep(0.001)
    three = start(driver.wait, last, time.monotonic() + LIMIT, None)
    while last not in driver._parked:
        time.sleep(0.001)
    two.join(LIMIT)
    driver.link.put(lambda: driver.fulfil(first))
    driver.link.put(lambda: driver.fulfil(last))
    for thread in (one, three):
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_a_wait_that_ends_by_its_deadline_hands_on(driver, monkeypatch):
    """The waiter woken to drive finds its deadline over: the next one drives."""
    rest = Wait("rest")
    handed = []
    hand_on = driver._hand_on
    monkeypatch.setattr(driver, "_hand_on", lambda: (handed.append(1), hand_on()))
    assert not driver.wait(Wait("over"), time.monotonic() - 1, None)
    assert handed
    driver.link.put(lambda: driver.fulfil(rest))
    assert driver.wait(rest, time.monotonic() + LIMIT, None)
