"""The Python side of calls.c."""

import threading

import numpy as np

import mpiml
from mpiml.optim import SGD


class Net:
    def __init__(self):
        self.released = {}

    def echo(self, x):
        return x

    def indices(self, x):
        rows, columns = x.shape
        assert x.flags.f_contiguous
        np.testing.assert_array_equal(x, 1000 * np.arange(rows)[:, None] + np.arange(columns))
        return x

    def several(self, a, b):
        assert a.shape == ()
        return a + b.sum(), a * b, np.int32(len(b))

    def nothing(self):
        pass

    def half(self):
        return 0.5

    def fails(self):
        raise ValueError("boom")

    def text(self):
        return "no array"

    def numbers(self):
        yield 1.0

    def hold(self, who, x):
        assert self.released.setdefault(int(who), threading.Event()).wait(30)
        return x

    def release(self, who):
        self.released.setdefault(int(who), threading.Event()).set()


def build():
    program = mpiml.Program("calls")
    net = program.add_node(mpiml.ServiceNode(Net), label="net", concurrency=4)
    program.add_node(mpiml.ServiceNode(Net), label="other")  # not given to the solver
    tree = {"layers": {"one": np.zeros((2, 3), "f4")}, "bias": np.zeros(3, "f4")}
    server = program.add_node(mpiml.ParameterServerNode(tree, SGD(0.1), "async"), label="ps")
    solver = mpiml.ExternalNode(calls=[net, server])
    program.add_node(solver, label="solver", replicas=mpiml.FILL)
    return program
