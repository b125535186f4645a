"""The Python side of ends.c: python -m mpiml.run ends.py --how fails."""

import threading

import numpy as np

import mpiml


class Net:
    def __init__(self):
        self.lost = threading.Event()

    def large(self):
        return np.arange(100_000.0)

    def last(self):
        self.lost.set()
        return self.large()

    def until_lost(self):
        assert self.lost.wait(60)

    def hold(self):
        mpiml.context().wait_for_stop()


def deep(n):
    if n:
        deep(n - 1)
    raise ValueError("boom")


def listen(numbers, net, how):
    if how == "lost":
        net.until_lost()
        raise ValueError("boom")
    if how in ("stopped", "fails"):
        numbers.get()  # the solver is at work
        if how == "fails":
            deep(200)
        mpiml.context().stop()
    if how != "early":
        mpiml.context().wait_for_stop()
        return None
    return list(map(float, numbers))


def show(listener):
    print("heard", listener.result(), flush=True)


def build(how: str = "stop"):
    program = mpiml.Program("ends")
    numbers = program.topic("numbers", policy=mpiml.Keep(2))
    net = program.add_node(mpiml.ServiceNode(Net), label="net", concurrency=4)
    listener = program.add_node(
        mpiml.PyNode(listen, numbers.subscriber(), net, how), label="listener"
    )
    if how == "early":
        program.add_node(mpiml.PyNode(show, listener), label="show")
    solver = mpiml.ExternalNode(publishes=numbers, calls=net)
    program.add_node(solver, label="solver", replicas=mpiml.FILL)
    return program
