"""Turns as a state machine: how many methods run, whoever waits, whatever is left behind."""

import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpiml.server import Server
from mpiml.turns import MethodScope
from mpiml.waits import Wait


class Engine:
    rank = 0
    pause_us = 0

    def fulfil(self, wait):
        wait.ready = True


class Owner:
    vertex, title = 0, "svc/0"


class Held:
    """A method under way: its scope, and how many of its tasks wait or ask for a turn."""

    def __init__(self, scope):
        self.scope = scope
        self.waiting = 0
        self.ticket = None


class Turns(RuleBasedStateMachine):
    """Methods start, wait in several tasks, go on and end, in any order."""

    limit = 2

    def __init__(self):
        super().__init__()
        self.server = Server(Engine(), Owner(), self.limit)
        self.server.open = True
        self.methods = []

    def running(self):
        return [m for m in self.methods if m.scope.holds]

    @precondition(lambda self: len(self.methods) < 6)
    @rule()
    def start(self):
        with self.server.lock:
            if not self.server.resuming and self.server.take_turn():
                self.methods.append(Held(MethodScope(self.server)))

    @precondition(lambda self: self.methods)
    @rule(which=st.integers(0, 5))
    def wait(self, which):
        method = self.methods[which % len(self.methods)]
        assert method.scope.suspend()
        method.waiting += 1
        assert not method.scope.holds or method.ticket is not None
        if method.ticket is not None and method.ticket.ready:
            method.ticket = None

    @precondition(lambda self: any(m.waiting for m in self.methods))
    @rule(which=st.integers(0, 5))
    def go_on(self, which):
        waiting = [m for m in self.methods if m.waiting]
        method = waiting[which % len(waiting)]
        method.waiting -= 1
        method.ticket = method.scope._ask()
        if method.waiting:
            assert method.ticket is None  # as long as another task waits, no turn is needed

    @precondition(lambda self: self.methods)
    @rule(which=st.integers(0, 5))
    def end(self, which):
        method = self.methods.pop(which % len(self.methods))
        method.scope.end()
        assert not method.scope.suspend()  # what is left behind holds nothing
        assert method.scope._ask() is None

    @invariant()
    def turns_add_up(self):
        running = self.running()
        assert len(running) == self.server.running
        assert 0 <= len(running) <= self.limit
        for method in self.methods:
            if method.waiting:
                assert not method.scope.holds

    @invariant()
    def nobody_waits_for_a_turn_that_is_free(self):
        if self.server.resuming:
            assert self.server.running == self.limit


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_thread_waits_for_its_turn_and_gets_it():
    class Blocking(Engine):
        def fulfil(self, wait):
            super().fulfil(wait)
            woken.set()

        def wait(self, wait, deadline, scope):
            asked.set()
            assert woken.wait(10)
            return wait.ready

    woken, asked = threading.Event(), threading.Event()
    server = Server(Blocking(), Owner(), 1)
    server.open = True
    with server.lock:
        assert server.take_turn()
    first = MethodScope(server)
    assert first.suspend()
    with server.lock:
        assert server.take_turn()
        assert not server.take_turn()
    second = MethodScope(server)
    thread = threading.Thread(target=first.resume)
    thread.start()
    assert asked.wait(10)
    second.end()
    thread.join(10)
    assert first.holds
    assert server.running == 1


class Waits:
    """A task in the middle of which its method waits."""

    def run(self, server, scope):
        assert scope.suspend()
        self.seen = (server.running, server.active)  # the next one has not started
        scope.resume()


def test_a_method_that_waits_without_a_turn_is_under_way():
    server = Server(Engine(), Owner(), 1)
    ended = Wait("the end")
    first, second = Waits(), Waits()
    server._queue.append(second)  # the loop takes it, but the service is not open yet
    with server.lock:
        server._running += 1
        server._busy += 1
    ended.ready = True
    server.work(first, ended)
    assert first.seen == (0, 2)
    assert server.active == 1
    server._queue.clear()
    assert (server.active, server.running) == (0, 0)


class Plain:
    """A task that only runs."""

    def run(self, server, scope):
        assert server.active == 1 + len(server._queue)


def test_a_task_counts_from_the_queue_to_its_end_on_every_way():
    class Resting(Engine):
        driving = None

        def wait(self, ticket, deadline, scope):
            counts.append(server.active)
            if len(counts) == 1:  # the idle thread gets one through `enqueue`
                server.enqueue(tasks[1])
                counts.append(server.active)
                server._queue.append(tasks[2])  # and finds this one itself
                counts.append(server.active)
            else:
                ended.ready = True
                server.wake()

    counts = []
    ended = Wait("the end")
    server = Server(Resting(), Owner(), 1)
    server.open = True
    tasks = [Plain() for _ in range(3)]
    server._queue.append(tasks[0])
    server.work(None, ended)
    assert counts == [0, 1, 2, 0]
    assert server.active == 0


def test_a_stop_that_comes_while_a_task_runs_is_not_slept_through():
    """The servers are woken before anybody can see that the program has stopped."""

    class Sleepless(Engine):
        def wait(self, ticket, deadline, scope):
            raise AssertionError("it rests, and nobody wakes it again")

    class Ending:
        def run(self, server, scope):
            server.wake()  # as a thread that drives meanwhile does

    server = Server(Sleepless(), Owner(), 1)
    with server.lock:
        server._running += 1
        server._busy += 1
    server.work(Ending(), Wait("the end"))
    assert (server.active, server.running) == (0, 0)
