"""Programs that fail or stop, each in its own way; test_failure.py and test_stop.py run them.

Role "bad" fails. "other" is what the rest of the program is doing at that time.
"""

import os
import sys
import threading
import time

import numpy as np

import mpiml


class Boom(Exception):
    """Cannot be pickled, and does not load again either."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")
        self.lock = threading.Lock()


class Service:
    def __init__(self):
        self.gate = threading.Event()

    def echo(self, x=None):
        return x

    def never(self):
        """Answer when the program ends, at the latest."""
        mpiml.context().wait_for_stop()

    def items(self):
        yield 1
        mpiml.context().wait_for_stop()

    def leave(self, code):
        sys.exit(code)

    def fail(self):
        raise ValueError("only for the caller")


class Broken:
    def __init__(self, wait=0.0):
        time.sleep(wait)
        raise ValueError("boom in the constructor")

    def echo(self, x=None):
        return x


class Runs(Service):
    def run(self):
        raise ValueError("boom")


# -- what the others do -------------------------------------------------------------------------


def in_call(service):
    service.never()


def in_future(service):
    service.futures.never().result()


def in_gather(service):
    mpiml.gather([service.futures.never(), service.futures.never()])


def in_stream(service):
    for _ in service.stream.items():
        pass


def in_stop(service):
    mpiml.context().wait_for_stop()


def in_sleep(service):
    time.sleep(60)


async def in_await(service):
    await service.futures.never()


def in_big_messages(service):
    x = np.zeros(5 << 20, np.uint8)
    while True:
        futures = [service.futures.echo(x) for _ in range(8)]
        mpiml.gather(futures)


OTHERS = {
    "call": in_call,
    "future": in_future,
    "gather": in_gather,
    "stream": in_stream,
    "stop": in_stop,
    "sleep": in_sleep,
    "await": in_await,
    "big": in_big_messages,
}


# -- how a node fails ---------------------------------------------------------------------------


def raises(service):
    service.echo()
    time.sleep(0.2)
    raise ValueError("boom")


def raises_unpicklable(service):
    raise Boom("boom", 2)


def raises_large(service):
    error = ValueError("boom")
    error.data = np.ones(1 << 20)
    raise error


def exits(service):
    service.echo()
    time.sleep(0.2)
    sys.exit(7)


def exits_with_text(service):
    sys.exit("boom, says the node")


def starts_thread(service):
    def work():
        raise ValueError("boom")

    threading.Thread(target=work).start()
    mpiml.context().wait_for_stop()


def starts_bound_thread(service):
    def work():
        raise ValueError("boom")

    threading.Thread(target=mpiml.context().bind(work)).start()
    mpiml.context().wait_for_stop()


async def raises_later(service):
    await service.futures.echo()
    raise ValueError("boom")


def lets_through(service):
    service.fail()


def stops_then_raises(service):
    mpiml.context().stop()
    try:
        mpiml.context().wait_for_stop()
        service.never()
    finally:
        raise ValueError("boom")


def raises_in_callback(service):
    def callback():
        raise ValueError("boom")

    mpiml.context().on_stop(callback)


def method_exits(service):
    service.leave(7)


WAYS = {
    "raise": raises,
    "unpicklable": raises_unpicklable,
    "large": raises_large,
    "exit": exits,
    "text": exits_with_text,
    "thread": starts_thread,
    "bound": starts_bound_thread,
    "async": raises_later,
    "through": lets_through,
    "late": stops_then_raises,
    "callback": raises_in_callback,
    "method exit": method_exits,
}


def build(
    way: str = "raise", other: str = "call", others: int = 1, first: bool = False
) -> mpiml.Program:
    """One node that fails in a way, a service, and others that wait for it."""
    program = mpiml.Program("failing")
    service = mpiml.ServiceNode(Service)
    if first:  # the failing node on rank 0
        bad = mpiml.PyNode(WAYS[way])
        program.add_node(bad, label="bad")
        handle = program.add_node(service, label="service", concurrency=8)
        bad.configure(handle)
    else:
        handle = program.add_node(service, label="service", concurrency=8)
    for i in range(others):
        program.add_node(mpiml.PyNode(OTHERS[other], handle), label=f"other{i}")
    if not first:
        program.add_node(mpiml.PyNode(WAYS[way], handle), label="bad")
    return program


def build_constructor(wait: float = 0.2) -> mpiml.Program:
    """A constructor fails while clients wait for it."""
    program = mpiml.Program("constructor")
    program.add_node(mpiml.PyNode(time.time), label="first")
    bad = program.add_node(mpiml.ServiceNode(Broken, wait), label="bad")
    program.add_node(mpiml.PyNode(ask, bad), label="client", replicas=2)
    return program


def ask(service):
    try:
        service.echo(1)
    except Exception as error:
        raise RuntimeError("the client is confused") from error


def build_run() -> mpiml.Program:
    """``run()`` of a service fails."""
    program = mpiml.Program("run")
    bad = program.add_node(mpiml.ServiceNode(Runs), label="bad")
    program.add_node(mpiml.PyNode(in_call, bad), label="client", replicas=2)
    return program


class RunsWithBatches:
    """``run()`` fails while a batch runs and others are queued."""

    def __init__(self):
        self.begun = threading.Event()

    @mpiml.batched(1, 0.0)
    def one(self, x):
        self.begun.set()
        time.sleep(0.5)
        return x

    @mpiml.batched(64, 60.0)
    def many(self, x):
        return x

    def items(self):
        yield 1

    def run(self):
        self.begun.wait()
        time.sleep(0.2)
        raise ValueError("boom")


def in_batches(service):
    calls = [getattr(service.futures, name)(i) for i in range(3) for name in ("one", "many")]
    stream = service.stream.items()
    for call in calls:
        call.result()
    next(stream)


def build_batches() -> mpiml.Program:
    """``run()`` of a service fails, with calls of every kind in its queue."""
    program = mpiml.Program("batches")
    bad = program.add_node(mpiml.ServiceNode(RunsWithBatches), label="bad")
    program.add_node(mpiml.PyNode(in_batches, bad), label="client", replicas=2)
    return program


def both(n):
    time.sleep(0.2)
    raise ValueError(f"boom {n}")


def build_two() -> mpiml.Program:
    """Two nodes raise at once."""
    program = mpiml.Program("two")
    program.add_node(mpiml.PyNode(mpiml_wait), label="waits")
    program.add_node(mpiml.PyNode(both, 1), label="bad")
    program.add_node(mpiml.PyNode(both, 2), label="worse")
    return program


def mpiml_wait():
    mpiml.context().wait_for_stop()


def caller_copes(service, log):
    try:
        service.fail()
    except ValueError as error:
        print(f"coped with {error} from {error.__cause__}")


def build_copes() -> mpiml.Program:
    """A method fails, its caller copes: the program ends well."""
    program = mpiml.Program("copes")
    service = program.add_node(mpiml.ServiceNode(Service), label="service")
    program.add_node(mpiml.PyNode(caller_copes, service, None), label="caller")
    return program


def build_import() -> mpiml.Program:
    """Fail while the program is built, on one rank only."""
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "1")) == "1":
        raise ImportError("boom while loading")
    return build()


def asks_result(node):
    print("result", node.result())


def build_result() -> mpiml.Program:
    """A node waits for the value of one that fails, and neither is on rank 0."""
    program = mpiml.Program("result")
    program.add_node(mpiml.PyNode(mpiml_wait), label="first")
    bad = program.add_node(mpiml.PyNode(both, 1), label="bad")
    program.add_node(mpiml.PyNode(asks_result, bad), label="asks")
    return program


class Relay:
    def __init__(self, service):
        self.service = service

    def leave(self, code):
        return self.service.leave(code)


def build_nested_exit() -> mpiml.Program:
    """A method waits for one that calls ``sys.exit``, and so never answers."""
    program = mpiml.Program("nested")
    service = program.add_node(mpiml.ServiceNode(Service), label="bad")
    relay = program.add_node(mpiml.ServiceNode(Relay, service), label="relay")
    program.add_node(mpiml.PyNode(method_exits, relay), label="caller")
    return program
