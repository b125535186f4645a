"""Alarms: called once, or called off; and then nothing is held."""

import gc
import threading
import weakref

from mpiml.alarms import Alarm

LIMIT = 10.0


def test_an_alarm_is_called():
    called = threading.Event()
    Alarm(0.0, called.set, "a test")
    assert called.wait(LIMIT)


def test_one_that_is_called_off_holds_nothing_whatever_its_thread_does():
    class Held:
        def act(self):
            raise AssertionError

    held = Held()
    alarm = Alarm(1000.0, held.act, "a test")
    gone = weakref.ref(held)
    del held
    assert gone() is not None
    alarm.cancel()
    gc.collect()
    assert gone() is None
    alarm.join(LIMIT)
    assert not alarm.is_alive()
    alarm.cancel()


def test_an_alarm_may_call_itself_off():
    done = threading.Event()
    alarms = []

    def act():
        assert ready.wait(LIMIT)
        alarms[0].cancel()
        done.set()

    ready = threading.Event()
    alarms.append(Alarm(0.0, act, "a test"))
    ready.set()
    assert done.wait(LIMIT)
