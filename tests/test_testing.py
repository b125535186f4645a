"""`mpiml.testing.running`: what a user's own test may rely on."""

import threading
import traceback

import pytest

import mpiml
from mpiml.testing import running


class Counter:
    def __init__(self, start=0):
        self.total = start

    def add(self, n=1):
        self.total += n
        return self.total

    def fail(self):
        raise KeyError("asked to")

    def block(self):
        mpiml.context().wait_for_stop()


class Learner:
    def __init__(self, counter):
        self.counter = counter
        self.first = counter.add()  # the client works in the constructor

    def run(self):
        if mpiml.context().replicas == 1:
            raise RuntimeError("a manual node is not run")
        mpiml.context().wait_for_stop()

    def step(self):
        return self.counter.add()

    def where(self):
        context = mpiml.context()
        return context.role, context.index


def graph(*nodes, counter=Counter):
    """Return a program with a counter and nodes ``(label, function(handle) -> node, settings)``."""
    program = mpiml.Program("tested")
    handle = program.add_node(mpiml.ServiceNode(counter), label="counter")
    for label, make, settings in nodes:
        program.add_node(make(handle), label=label, **settings)
    return program


def learner(**settings):
    return "learner", lambda counter: mpiml.PyClassNode(Learner, counter), settings


def waits(counter):
    mpiml.context().wait_for_stop()


def test_a_manual_node_is_constructed_and_stepped_but_not_run():
    with running(graph(learner()), manual=["learner"]) as run:
        assert type(run["learner"]) is Learner
        assert run["learner"].first == 1
        assert [run["learner"].step() for _ in range(10)] == list(range(2, 12))
        assert run.client("counter").add(0) == 11
        assert not run.stopping
    assert run.result["learner"] == [None]
    assert "left the block" in run.result.stopped_by


def test_the_test_belongs_to_its_only_manual_node():
    with running(graph(learner()), manual="learner") as run:
        assert run["learner"].where() == ("learner", 0)
        assert mpiml.context().seed > 0


def test_replicas_are_a_list_and_each_has_its_context_inside():
    with running(graph(learner(replicas=3)), manual=["learner"]) as run:
        assert len(run["learner"]) == 3
        with run.inside("learner", 2) as context:
            assert context.index == 2
            assert run["learner"][2].where() == ("learner", 2)
        with pytest.raises(mpiml.UsageError, match=r"run\.inside"):
            mpiml.context()


def test_a_function_is_a_callable_with_its_arguments_bound():
    def work(counter, n, scale=1):
        return mpiml.context().role, counter.add(n * scale)

    node = ("worker", lambda counter: mpiml.PyNode(work, counter, 3, scale=2), {})
    with running(graph(node), manual=["worker"]) as run:
        assert run["worker"]() == ("worker", 6)
        assert run["worker"]() == ("worker", 12)
    assert run.result["worker"] == [("worker", 12)]


def test_an_async_function_is_run_to_its_end():
    async def work(counter):
        return await counter.futures.add(4)

    node = ("worker", lambda counter: mpiml.PyNode(work, counter), {})
    with running(graph(node), manual=["worker"]) as run:
        assert run["worker"]() == 4


def test_a_manual_service_answers_and_is_the_object():
    def work(counter):
        return counter.add(5)

    node = ("worker", lambda counter: mpiml.PyNode(work, counter), {})
    with running(graph(node), manual=["counter"]) as run:
        assert run.client("worker").result(timeout=10) == 5
        assert run["counter"].total == 5
    assert run.result["worker"] == [5]


def test_nothing_manual_runs_the_program_beside_the_test():
    with running(graph(("w", lambda counter: mpiml.PyNode(waits, counter), {}))) as run:
        assert run.client("counter").add(7) == 7
    assert run.result["w"] == [None]


def test_one_node_alone():
    program = mpiml.Program("alone")
    program.add_node(mpiml.ServiceNode(Counter, 3), label="counter")
    with running(program) as run:
        assert run.client("counter").add() == 4


def test_a_node_that_fails_fails_the_test_with_its_own_traceback():
    started = threading.Event()

    def crash_here(counter):
        started.wait(10)
        raise ZeroDivisionError("boom")

    node = ("w", lambda counter: mpiml.PyNode(crash_here, counter), {})
    with pytest.raises(ZeroDivisionError, match="boom") as caught:  # noqa: PT012
        with running(graph(learner(), node), manual=["learner"]) as run:
            started.set()
            while True:  # would go on for ever if waits did not raise
                run["learner"].step()
    assert "crash_here" in "".join(traceback.format_exception(caught.value))


def test_a_wait_of_the_test_ends_when_a_node_fails():
    def crash(counter):
        counter.add()
        raise ZeroDivisionError("boom")

    nodes = [learner(), ("w", lambda counter: mpiml.PyNode(crash, counter), {})]
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        with running(graph(*nodes), manual=["learner"]) as run:
            while True:  # a stop ends the method too; the next call must not start
                run.client("counter").block()


@pytest.mark.parametrize("manual", [[], ["learner"]])
def test_a_wait_ends_with_no_or_several_manual_nodes_too(manual):
    entered = threading.Event()

    def crash(counter):
        entered.wait(10)
        raise ZeroDivisionError("boom")

    nodes = [learner(replicas=2), ("w", lambda counter: mpiml.PyNode(crash, counter), {})]
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        with running(graph(*nodes), manual=[*manual]) as run:
            entered.set()
            while True:
                run.client("counter").add()


def test_a_failing_constructor_of_a_manual_node_is_raised_at_once():
    class Broken(Learner):
        def __init__(self, counter):
            raise OSError("no file")

    node = ("learner", lambda counter: mpiml.PyClassNode(Broken, counter), {})
    with pytest.raises(OSError, match="no file"):
        with running(graph(node), manual=["learner"]):
            pytest.fail("the block was entered")


def test_the_tests_own_error_wins_with_a_note_about_the_node():
    entered = threading.Event()

    def crash(counter):
        entered.wait(10)
        raise ZeroDivisionError("boom")

    node = ("w", lambda counter: mpiml.PyNode(crash, counter), {})
    with pytest.raises(AssertionError, match="mine") as caught:  # noqa: PT012
        with running(graph(learner(), node), manual=["learner"]) as run:
            entered.set()
            while not run.stopping:
                pass
            raise AssertionError("mine")
    assert "w/0 failed too: ZeroDivisionError('boom')" in caught.value.__notes__[0]


def test_an_error_of_a_method_goes_to_the_test_alone():
    with running(graph(learner()), manual=["learner"]) as run:
        with pytest.raises(KeyError, match="asked to"):
            run.client("counter").fail()
        assert run["learner"].step() == 2


def test_a_failing_test_stops_the_program():
    ended = []

    def work(counter):
        try:
            mpiml.context().wait_for_stop()
        finally:
            ended.append(True)

    node = ("w", lambda counter: mpiml.PyNode(work, counter), {})
    with pytest.raises(AssertionError, match="mine"):
        with running(graph(node)):
            raise AssertionError("mine")
    assert ended == [True]


def test_stop_from_the_test_raises_stopped_in_its_waits_and_leaves_cleanly():
    with running(graph(learner()), manual=["learner"]) as run:
        run.stop()
        while True:
            run["learner"].step()
    assert run.result.stopped_by == "the test stopped it"


def test_a_node_that_never_ends_is_reported_after_the_grace():
    release = threading.Event()

    def stuck(counter):
        release.wait(30)

    node = ("w", lambda counter: mpiml.PyNode(stuck, counter), {})
    with pytest.raises(mpiml.MpimlError, match=r"still ran after the grace(?s:.)*in stuck"):
        with running(graph(node), grace=0.2):
            pass
    release.set()


def test_fill_is_threads():
    with running(graph(learner(replicas=mpiml.FILL)), manual=["learner"], threads=2) as run:
        assert len(run["learner"]) == 2


def test_twice_in_a_row_and_one_inside_the_other():
    for _ in range(2):
        with running(graph(learner()), manual=["learner"]) as outer:
            with running(graph(learner()), manual=["learner"]) as inner:
                assert inner["learner"].step() == 2
            assert outer["learner"].step() == 2
    with pytest.raises(mpiml.UsageError, match="outside of any"):
        mpiml.context()


@pytest.mark.parametrize("manual", [["nobody"], "nobody"])
def test_an_unknown_manual_role_is_refused(manual):
    with pytest.raises(
        mpiml.UsageError, match=r"no such role; the program has counter, learner"
    ):
        with running(graph(learner()), manual=manual):
            pass


def test_asking_for_a_role_that_is_not_manual():
    with running(graph(learner()), manual=["learner"]) as run:
        with pytest.raises(mpiml.UsageError, match=r"run\.client\('counter'\)"):
            run["counter"]
        with pytest.raises(mpiml.UsageError, match="no such role"):
            run.client("nobody")
