"""Programs that lose a host, or a node on it; test_losing.py runs them."""

import os
import time
from pathlib import Path

import mpiml


class Service:
    def ask(self):
        return os.uname().nodename


def asks(service, until):
    """Ask a service of another host again and again, until a file is there."""
    while not Path(until).exists():
        assert service.ask() != os.uname().nodename
        if not mpiml.context().stopping:
            print("asked", flush=True)
        time.sleep(0.01)


def link(host: str, until: str) -> mpiml.Program:
    program = mpiml.Program("link")
    service = program.add_node(
        mpiml.ServiceNode(Service), label="far", placement={"host": host}
    )
    program.add_node(mpiml.PyNode(asks, service, until), label="near")
    return program


def bad(service):
    service.ask()
    raise ValueError("boom")


def waits():
    mpiml.context().wait_for_stop()


def failing(host: str) -> mpiml.Program:
    """The bad one is on another host than the service, and than one of the others."""
    program = mpiml.Program("failing")
    service = program.add_node(mpiml.ServiceNode(Service), label="service")
    program.add_node(mpiml.PyNode(bad, service), label="bad", placement={"host": host})
    program.add_node(mpiml.PyNode(waits), label="other", replicas=mpiml.FILL)
    return program
