"""Programs whose nodes wait; test_survey.py and test_signals.py run them."""

import os
import time

import mpiml


class Asker:
    """Its method waits for a body, which waits for another, which waits for the method."""

    def __init__(self, node=None):
        self.node = node

    def ask(self):
        return self.node.result()

    def echo(self, x=None):
        return x


def first(service):
    return service.ask()


def second(first_one):
    return first_one.result()


async def second_async(first_one):
    return await first_one.futures.result()


def cycle(asynchronous: bool = False) -> mpiml.Program:
    """Everybody waits: first for the service, the service for second, second for first."""
    program = mpiml.Program("cycle")
    node = mpiml.ServiceNode(Asker)
    service = program.add_node(node, label="service")
    one = program.add_node(mpiml.PyNode(first, service), label="first")
    two = program.add_node(
        mpiml.PyNode(second_async if asynchronous else second, one), label="second"
    )
    node.configure(two)
    return program


def computes(service):
    service.echo()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        sum(range(1000))


def waits_for(node):
    node.result()


def with_deadline(service, node):
    impatient = node.with_options(timeout=0.8)  # longer than the warning
    for _ in range(2):
        try:
            impatient.result()
        except mpiml.DeadlineError:
            service.echo()


def sits():
    mpiml.context().wait_for_stop()


async def naps(service):
    import asyncio

    await service.futures.echo()
    await asyncio.sleep(1.0)


def lively(what: str) -> mpiml.Program:
    """Nodes that wait without a deadlock."""
    program = mpiml.Program("lively")
    service = program.add_node(mpiml.ServiceNode(Asker), label="service")
    if what == "services":
        program.add_node(mpiml.PyNode(sits), label="one", daemon=True)
    elif what == "deadline":
        one = program.add_node(mpiml.PyNode(sits), label="one", daemon=True)
        program.add_node(mpiml.PyNode(with_deadline, service, one), label="two")
    elif what == "idle":
        program.add_node(mpiml.PyNode(sits), label="one")
        program.add_node(mpiml.PyNode(keeps_open), label="two")
    else:
        function = {"computes": computes, "naps": naps}[what]
        one = program.add_node(mpiml.PyNode(function, service), label="one")
        program.add_node(mpiml.PyNode(waits_for, one), label="two")
    return program


def keeps_open():
    time.sleep(1.0)


def ready(seconds):
    context = mpiml.context()
    print(f"ready {context.index} {os.getpid()}", flush=True)
    if seconds:
        time.sleep(seconds)
    context.wait_for_stop()
    print(f"told {context.index}", flush=True)


def build(sleep: float = 0.0) -> mpiml.Program:
    """Wait for a signal; a body keeps the program open."""
    program = mpiml.Program("signals")
    service = program.add_node(mpiml.ServiceNode(Asker), label="service")
    program.add_node(mpiml.PyNode(ready, sleep), label="node", replicas=2)
    program.add_node(mpiml.PyNode(held_open, service), label="open")
    return program


def held_open(service):
    try:
        while True:
            service.echo()
            time.sleep(0.01)
    finally:
        print("open is told", flush=True)
