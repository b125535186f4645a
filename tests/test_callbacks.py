"""Callbacks of users: on a thread of their own, and counted for the program they belong to."""

import threading

from mpiml.callbacks import Callbacks


def test_callbacks_count_for_their_program_until_they_have_run():
    callbacks, gate, done = Callbacks(), threading.Event(), threading.Event()
    one, two = object(), object()

    def fails():
        gate.wait(30)
        raise ValueError("nobody hears it")

    callbacks.put(fails, one)
    callbacks.put(lambda: None, one)
    callbacks.put(lambda: None)
    assert (callbacks.under_way(one), callbacks.under_way(two)) == (2, 0)
    callbacks.put(done.set)
    gate.set()
    assert done.wait(30)
    assert callbacks.under_way(one) == 0
