"""Who drives where one thread makes all calls of MPI: its waits and `poll`, nobody else."""

import threading
import time
import types

import pytest

from mpiml import funnel, threads
from mpiml.driver import Driver
from mpiml.errors import ServiceGoneError, UsageError
from mpiml.polling import poll
from mpiml.scope import BodyScope, enter, leave
from mpiml.waits import Wait
from tests.test_driver import LIMIT, Link, start


@pytest.fixture(autouse=True)
def _funneled(monkeypatch):
    """Let MPI have FUNNELED, on this thread."""
    monkeypatch.setattr(threads, "_level", threads.FUNNELED)
    monkeypatch.setattr(threads, "HOME", [threading.get_ident()])


def at_home():
    """Return a driver of this thread, connected."""
    driver = Driver(0, 0)
    link = Link()
    link.home = threading.get_ident()
    driver.connect(link)
    return driver


@pytest.fixture
def driver():
    driver = at_home()
    yield driver
    driver.shut()
    assert driver.link.closed
    assert driver.link.pollers <= {"MainThread"}
    assert driver not in funnel.DRIVERS


@pytest.fixture
def inside(driver):
    """Make the calling thread that of a node."""
    runtime = types.SimpleNamespace(engine=driver)
    token = enter(BodyScope(types.SimpleNamespace(runtime=runtime, vertex=0, title="node/0")))
    yield
    leave(token)


def test_a_waiter_elsewhere_sleeps_until_home_polls(driver):
    waits = [Wait(str(i)) for i in range(3)]
    each = [start(driver.wait, w, time.monotonic() + LIMIT, None) for w in waits]
    while len(driver.sleepers) < len(each):
        time.sleep(0)
    for wait in waits:
        driver.link.put(lambda w=wait: driver.fulfil(w))
    assert not driver.link.pollers  # nobody has looked yet
    assert driver.poll()
    for thread in each:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert not driver.poll()


def test_home_drives_in_a_wait_for_others_and_itself(driver):
    mine, other = Wait(), Wait()
    thread = start(driver.wait, other, time.monotonic() + LIMIT, None)
    driver.link.put(lambda: driver.fulfil(other))
    driver.link.put(lambda: driver.fulfil(mine))
    assert driver.wait(mine, time.monotonic() + LIMIT, None)
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_waiter_elsewhere_has_deadlines_and_is_ended(driver):
    assert not driver.wait(Wait(), time.monotonic() + 0.01, None)
    box = []

    def work():
        box.append(driver.wait(Wait(), time.monotonic() + 0.01, None))
        try:
            driver.wait(Wait(), None, None)
        except ServiceGoneError as error:
            box.append(error)

    thread = start(work)
    while len(box) < 1 or not driver.sleepers:
        time.sleep(0)
    driver.shut()
    thread.join(LIMIT)
    assert box[0] is False
    assert isinstance(box[1], ServiceGoneError)


def test_there_is_no_helper(driver):
    assert "mpiml-helper" not in {thread.name for thread in threading.enumerate()}


def test_polling_takes_in_a_limited_number_of_frames(driver, inside):
    taken = []
    for i in range(200):
        driver.link.put(lambda i=i: taken.append(i))
    assert poll()
    assert 0 < len(taken) < 200
    while poll():
        pass
    assert taken == list(range(200))


def test_polling_runs_what_finalisers_have_left(driver, inside):
    ran = []
    driver.later(lambda: ran.append(1))
    assert poll()
    assert ran == [1]


def test_polling_in_what_polling_runs_does_nothing(driver, inside):
    found = []
    driver.link.put(lambda: found.append(poll()))
    assert poll()
    assert found == [False]


def test_polling_elsewhere_is_refused(driver):
    box = []

    def work():
        runtime = types.SimpleNamespace(engine=driver)
        enter(BodyScope(types.SimpleNamespace(runtime=runtime, vertex=0, title="node/0")))
        with pytest.raises(UsageError, match=r"mpiml\.poll\(\): expected thread 'MainThread'"):
            poll()
        box.append(True)

    start(work).join(LIMIT)
    assert box


def test_polling_outside_of_programs_is_refused():
    with pytest.raises(UsageError, match=r"mpiml\.poll\(\): .* code outside of any"):
        poll()


def test_who_waits_in_an_inner_program_drives_the_outer_one(driver):
    inner = at_home()
    try:
        wait, seen = Wait(), []
        driver.link.put(lambda: (seen.append(1), inner.fulfil(wait)))
        assert inner.wait(wait, time.monotonic() + LIMIT, None)
        assert seen == [1]
        driver.link.put(lambda: seen.append(2))
        assert funnel.drive()  # as waits in collectives do
        assert seen == [1, 2]
    finally:
        inner.shut()
    assert [driver] == funnel.DRIVERS


def test_who_waits_in_the_outer_program_drives_the_inner_one(driver):
    inner = at_home()
    try:
        wait = Wait()
        inner.link.put(lambda: driver.fulfil(wait))
        assert driver.wait(wait, time.monotonic() + LIMIT, None)
    finally:
        inner.shut()


def test_a_link_that_breaks_is_told_and_raised(driver, inside):
    told = []
    driver.on_broken = told.append
    driver.link.put(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        poll()
    assert len(told) == 1
    assert not poll()  # the seat is free


def test_the_end_has_a_reason(driver):
    driver.ended_by = UsageError("MPI was finalised")
    driver.shut()
    with pytest.raises(UsageError, match="MPI was finalised"):
        driver.wait(Wait(), None, None)
    assert driver.poll() is False
