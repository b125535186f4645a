"""Methods that wait, at the stop, for what comes only then: the main thread may be in one of them."""

import threading

import pytest

import mpiml
from mpiml.scope import current_scope
from mpiml.waits import Wait
from tests.playing import both, launched


class Waiting:
    """Waits for `at_end`, or in a topic, on as many threads as there are calls."""

    def __init__(self, publisher, subscriber):
        self.publisher = publisher
        self.subscriber = subscriber
        self.node = mpiml.context()._node
        self.over = Wait("the end of the bodies")
        self.node.at_end.append(lambda: self.engine.fulfil(self.over))
        self.threads = []

    @property
    def engine(self):
        return self.node.runtime.engine

    def wait(self, how):
        """Return, or raise, once the bodies of this rank are over."""
        self.threads.append(threading.current_thread())
        if how == "take":
            self.subscriber.get()
        elif how == "put":
            while not self.over.ready:  # it waits as soon as the topic is full
                self.publisher.put(0)
        else:
            self.engine.wait(self.over, None, current_scope(required=False))

    def on_main(self):
        """Return whether one of those who wait is the main thread; True where it serves nothing."""
        alone = len(self.node.runtime.nodes) == 1 and not self.engine.home
        return not alone or threading.main_thread() in self.threads


class Idle:
    def __init__(self, subscriber, publisher):
        pass


@both
@pytest.mark.parametrize("how", ["at_end", "take", "put"])
def test_the_program_ends_while_the_main_thread_waits_in_a_method(mode, how):
    def body(waiting):
        calls = 0
        while not waiting.on_main():  # soon: it is idle else, and takes one of the calls
            waiting.futures.wait(how)
            calls += 1
            assert calls < 20
        waiting.futures.wait(how)
        mpiml.context().stop()

    program = mpiml.Program("waits")
    full, never = program.topic("full", mpiml.Keep(1)), program.topic("never")
    waiting = program.add_node(
        mpiml.ServiceNode(Waiting, full.publisher(), never.subscriber()), label="waiting"
    )
    program.add_node(mpiml.PyNode(body, waiting), label="body")
    program.add_node(
        mpiml.ServiceNode(Idle, full.subscriber(), never.publisher()), label="idle"
    )
    launched(mode, program)
