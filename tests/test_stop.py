"""How programs stop: who is told, in which order, and what still runs; on ranks and threads."""

import threading
import time

import pytest

import mpiml
from mpiml import Stopped


@pytest.fixture(params=["threads", pytest.param("ranks", marks=pytest.mark.mpi(min_size=4))])
def run(request):
    """Return what runs a program of four nodes: as threads, or on the first four ranks.

    It returns the result on rank 0 and None on the others, which then skip the checks.
    """
    if request.param == "threads":
        yield lambda program, **settings: mpiml.launch(program, **settings)
        return
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < 4 else MPI.UNDEFINED)

    def on_ranks(program, **settings):
        if part == MPI.COMM_NULL:
            return None
        try:
            result = mpiml.launch(program, part, **settings)
        finally:
            assert part.allreduce(1) == 4  # MPI is as usable as before
        return result if part.rank == 0 else None

    yield on_ranks
    if part != MPI.COMM_NULL:
        part.Free()
    MPI.COMM_WORLD.Barrier()


class Service:
    def __init__(self, waiters=()):
        self.waiters = waiters
        self.calls = 0
        self.log = []

    def add(self, x=1):
        self.calls += x
        return self.calls

    def note(self, word):
        self.log.append(word)

    def said(self):
        return list(self.log)

    def stop(self):
        mpiml.context().stop()

    def held(self, index=0):
        """Answer only when the caller has left its wait without an answer."""
        mpiml.context().wait_for_stop()
        while not self.waiters[index].done:
            time.sleep(0.002)

    def items(self, index=0):
        try:
            yield 1
            if self.waiters:
                self.held(index)
            yield 2
        finally:
            self.log.append("closed")


# -- Stopped ------------------------------------------------------------------------------------


def wait_in(kind, service):
    index = mpiml.context().index
    if kind == "call":
        service.held(index)
    elif kind == "future":
        service.futures.held(index).result()
    elif kind == "exception":
        service.futures.held(index).exception()
    elif kind == "gather":
        mpiml.gather([service.futures.held(index)])
    elif kind == "wait":
        mpiml.wait([service.futures.held(index)])
    elif kind == "stream":
        for _ in service.stream.items(index):
            pass
    else:
        while True:  # no wait: the next call
            service.add()


def waiter(kind, service):
    try:
        wait_in(kind, service)
    except Exception as error:
        return f"swallowed {error!r}"
    except Stopped:
        assert mpiml.context().stopping
        try:
            service.add()
        except Stopped:
            return "stopped"
    return "went on"


def stopper(service, way):
    service.add()
    mpiml.context().wait_for_stop(0.05)
    if way == "body":
        mpiml.context().stop()
    else:
        service.stop()
    return "asked"


def stopping(waiter, way, *args):
    """A service, two nodes that wait for it, and one that stops the program."""
    program = mpiml.Program("stop")
    node = mpiml.ServiceNode(Service)
    service = program.add_node(node, label="service", concurrency=8)
    waiters = program.add_node(mpiml.PyNode(waiter, *args, service), label="waiter", replicas=2)
    node.configure(waiters)
    program.add_node(mpiml.PyNode(stopper, service, way), label="stopper")
    return program


@pytest.mark.parametrize(
    "kind", ["call", "future", "exception", "gather", "wait", "stream", "new"]
)
def test_every_wait_and_new_call_of_a_body_raises_stopped(run, kind):
    result = run(stopping(waiter, "body", kind))
    if result is not None:
        assert result["waiter"] == ["stopped", "stopped"]
        assert result.stopped_by == "stopper/0 called stop()"


async def awaits(service):
    await service.futures.held(mpiml.context().index)


def test_a_method_may_stop_and_leaving_by_stopped_is_returning(run):
    result = run(stopping(awaits, "method"))
    if result is not None:
        assert result["waiter"] == [None, None]
        assert result["stopper"][0] in ("asked", None)  # its own call may be stopped
        assert result.stopped_by == "service/0 called stop()"


async def one(service):
    await service.futures.held(mpiml.context().index)


async def in_task_group(service):
    import asyncio

    async with asyncio.TaskGroup() as group:
        group.create_task(one(service))
        group.create_task(one(service))


def test_a_group_of_tasks_that_is_stopped_has_returned(run):
    result = run(stopping(in_task_group, "body"))
    if result is not None:
        assert result["waiter"] == [None, None]


# -- who keeps a program alive ------------------------------------------------------------------


def worker(service):
    for _ in range(20):
        service.add()
    service.note("worker done")


def daemon(service):
    context = mpiml.context()
    rounds = 0
    while not context.wait_for_stop(0.001):
        rounds += 1
    return context.stopping and "told"


def test_daemons_are_told_after_the_others(run):
    program = mpiml.Program("daemon")
    service = program.add_node(mpiml.ServiceNode(Service), label="service")
    program.add_node(mpiml.PyNode(daemon, service), label="daemon", daemon=True)
    program.add_node(mpiml.PyNode(worker, service), label="worker", replicas=2)
    result = run(program)
    if result is not None:
        assert result["daemon"] == ["told"]
        assert result.stopped_by == "finished"


class Clock(Service):
    def __init__(self):
        super().__init__()
        stop = mpiml.context().bind(mpiml.context().stop)
        threading.Timer(0.1, stop).start()


def test_a_program_of_services_runs_until_it_is_stopped(run):
    program = mpiml.Program("services")
    program.add_node(mpiml.ServiceNode(Service), label="service", replicas=3)
    program.add_node(mpiml.ServiceNode(Clock), label="clock")
    result = run(program)
    if result is not None:
        assert result.stopped_by == "clock/0 called stop()"


def sits(timeout):
    context = mpiml.context()
    early = context.wait_for_stop(0.0), context.stopping
    late = context.wait_for_stop(timeout), context.stopping
    return early, late, context.wait_for_stop()


def test_wait_for_stop_does_not_keep_the_program_alive(run):
    program = mpiml.Program("sits")
    service = program.add_node(mpiml.ServiceNode(Service), label="service")
    program.add_node(mpiml.PyNode(sits, None), label="sits", replicas=2)
    program.add_node(mpiml.PyNode(worker, service), label="worker")
    result = run(program)
    if result is not None:
        assert result["sits"] == [((False, False), (True, True), True)] * 2


def pauses(rounds):
    """A timed wait is a pause in the work, not a wish to be ended."""
    for _ in range(rounds):
        if mpiml.context().wait_for_stop(0.02):
            return "stopped"
    return "finished"


def test_a_timed_wait_for_stop_keeps_the_program_alive(run):
    program = mpiml.Program("pauses")
    program.add_node(mpiml.PyNode(pauses, 5), label="pauses", replicas=3)
    program.add_node(mpiml.PyNode(pauses, 10**6), label="daemon", daemon=True)
    result = run(program)
    if result is not None:
        assert result["pauses"] == ["finished"] * 3
        assert result["daemon"] == ["stopped"]


def waits_in_a_thread():
    """A thread that waits for the stop does not stand for the body."""
    context = mpiml.context()
    waiting = threading.Thread(target=context.bind(context.wait_for_stop))
    waiting.start()
    time.sleep(0.3)  # long enough for the program to end wrongly
    return context.stopping


def test_only_the_body_itself_counts_as_waiting(run):
    program = mpiml.Program("thread")
    program.add_node(mpiml.PyNode(waits_in_a_thread), label="node", replicas=4)
    result = run(program)
    if result is not None:
        assert result["node"] == [False] * 4


# -- the order of the end -----------------------------------------------------------------------


def leaves_calls(service, index):
    context = mpiml.context()
    futures = [service.futures.add() for _ in range(10)]
    assert len(futures) == 10
    context.on_stop(lambda: service.note(f"counted {service.add(0)}"))
    context.on_stop(lambda: service.note("second"))


class Ordered(Service):
    def add(self, x=1):
        time.sleep(0.005)
        return super().add(x)

    def run(self):
        mpiml.context().on_stop(self.check)
        mpiml.context().wait_for_stop()
        return self.log

    def check(self):
        self.log.append(f"own {self.calls}")


def test_calls_are_run_then_callbacks_then_services_stop(run):
    program = mpiml.Program("order")
    service = program.add_node(mpiml.ServiceNode(Ordered), label="service")
    program.add_node(mpiml.PyNode(leaves_calls, service, 0), label="caller", replicas=3)
    result = run(program)
    if result is not None:
        # the service is on rank 0, in the order of the nodes, so its list is the live one
        log = result["service"][0]
        assert sorted(log) == ["counted 30"] * 3 + ["own 30"] + ["second"] * 3


class Kept(Service):
    def run(self):
        mpiml.context().wait_for_stop()
        return self.log


def leaves_a_stream_open(service, kept):
    stream = service.stream.items()
    assert next(stream) == 1
    kept.append(stream)  # not dropped, not closed


def test_a_stream_left_open_is_closed_at_the_end(run):
    program = mpiml.Program("open")
    service = program.add_node(mpiml.ServiceNode(Kept), label="service", concurrency=4)
    kept = mpiml.Deferred(list)
    program.add_node(mpiml.PyNode(leaves_a_stream_open, service, kept), label="n", replicas=3)
    result = run(program)
    if result is not None:
        assert result["service"] == [["closed"] * 3]


class Streams:
    """Closes its generators by a call, which needs the other service to be there still."""

    def __init__(self, log):
        self.log = log

    def items(self):
        try:
            yield 1
            yield from range(1000)
        finally:
            self.log.note("closed")


class Log(Service):
    def run(self):
        mpiml.context().wait_for_stop()
        return self.log


def test_generators_are_closed_before_services_stop(run):
    program = mpiml.Program("open")
    log = program.add_node(mpiml.ServiceNode(Log), label="log")
    service = program.add_node(mpiml.ServiceNode(Streams, log), label="streams")
    kept = mpiml.Deferred(list)
    program.add_node(mpiml.PyNode(leaves_a_stream_open, service, kept), label="n", replicas=2)
    result = run(program)
    if result is not None:
        assert result["log"] == [["closed"] * 2]


class Relay:
    """Its methods still call others while calls are drained."""

    def __init__(self, next_one):
        self.next = next_one

    def go(self, depth):
        time.sleep(0.002)
        return self.next.go(depth - 1) if depth else 0


def starts_chain(first):
    first.futures.go(20)


def test_methods_may_call_while_the_calls_are_drained(run):
    program = mpiml.Program("chain")
    one, two = mpiml.ServiceNode(Relay), mpiml.ServiceNode(Relay)
    first = program.add_node(one, label="one")
    second = program.add_node(two, label="two")
    one.configure(second)
    two.configure(first)
    program.add_node(mpiml.PyNode(starts_chain, first), label="start", replicas=2)
    result = run(program)
    if result is not None:
        assert result.stopped_by == "finished"


# -- those who do not end -----------------------------------------------------------------------


def naps(seconds):
    time.sleep(seconds)


def asks():
    mpiml.context().stop()


def test_who_runs_on_after_the_grace_is_an_error_that_says_where(run):
    program = mpiml.Program("nap")
    program.add_node(mpiml.PyNode(naps, 1.0), label="naps")
    program.add_node(mpiml.PyNode(asks), label="asks", replicas=3)
    with pytest.raises(mpiml.MpimlError, match=r"(?s)after the grace.*naps/0.*in naps"):
        run(program, grace=0.2, on_stuck="raise")


# -- the agreed stop ----------------------------------------------------------------------------


def folded(service, pause):
    """A role whose replicas may share a process: rounds without MPI."""
    context = mpiml.context()
    rounds = 0
    while not context.agree_stop():
        assert not context.stopping
        service.add()
        rounds += 1
        context.wait_for_stop(pause * context.index)
    assert context.stopping
    return rounds


def test_a_role_leaves_its_loop_after_the_same_round(run):
    for i in range(20):
        program = mpiml.Program("agreed")
        service = program.add_node(mpiml.ServiceNode(Timed, i * 0.002), label="service")
        program.add_node(mpiml.PyNode(folded, service, 0.0003), label="role", replicas=3)
        result = run(program)
        if result is not None:
            assert len(set(result["role"])) == 1, result["role"]


class Timed(Service):
    def __init__(self, seconds):
        super().__init__()
        stop = mpiml.context().bind(mpiml.context().stop)
        threading.Timer(seconds, stop).start()


def collective(service, calls):
    """A data-parallel loop: a stop that comes at any moment must not tear a collective."""
    import numpy as np

    context = mpiml.context()
    x, total = np.ones(4), np.zeros(4)
    rounds = 0
    while not context.agree_stop():
        context.comm.Allreduce(x, total)
        if calls and rounds % 3 == context.index:
            service.add()
        rounds += 1
        seen = context.stopping
        context.comm.Allreduce(x, total)
        assert not seen  # only agree_stop turns it on
    return rounds


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("calls", [False, True])
def test_a_data_parallel_role_stopped_200_times_never_hangs(calls):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < 4 else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return
    for i in range(100):
        program = mpiml.Program("agreed")
        service = program.add_node(
            mpiml.ServiceNode(Timed, (i * 7 % 13) * 0.0007), label="service"
        )
        program.add_node(mpiml.PyNode(collective, service, calls), label="role", replicas=3)
        result = mpiml.launch(program, part, grace=5.0)
        if part.rank == 0:
            assert len(set(result["role"])) == 1, result["role"]
            assert result.stopped_by == "service/0 called stop()"
    part.Free()


def ends_by_itself(rounds):
    """The loop ends by its own count, then the body waits: the stop finds it there."""
    context = mpiml.context()
    total = 0
    for _ in range(rounds):
        if context.agree_stop():
            break
        total = context.comm.allreduce(1)
    context.wait_for_stop()
    return total


@pytest.mark.mpi(min_size=4)
def test_wait_for_stop_after_rounds_ends():
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < 4 else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return
    for _ in range(10):
        program = mpiml.Program("waits")
        program.add_node(mpiml.PyNode(ends_by_itself, 5), label="role", replicas=3)
        program.add_node(mpiml.PyNode(asks), label="asks")
        mpiml.launch(program, part, grace=5.0)
    part.Free()


class Late:
    """Rank 1 comes to the collective only when rank 0, which is in it, has answered."""

    def __init__(self, node):
        self.node = node

    def echo(self, x):
        return x

    def run(self):
        context = mpiml.context()
        if context.index == 1:
            time.sleep(0.1)
            assert self.node.echo(3) == 3
        return context.comm.allreduce(context.index)  # pickled, the first on this communicator


@pytest.mark.mpi(min_size=4)
def test_a_service_answers_while_its_rank_is_in_a_pickled_collective():
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < 4 else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return
    program = mpiml.Program("late")
    node = mpiml.ServiceNode(Late)
    services = program.add_node(node, label="role", replicas=4)
    node.configure(services[0])
    result = mpiml.launch(program, part)
    if part.rank == 0:
        assert result["role"] == [6] * 4
    part.Free()
