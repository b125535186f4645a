"""The Python side of lists.c and late.c."""

import numpy as np

import mpiml
from mpiml.optim import SGD


def build():
    program = mpiml.Program("lists")
    first = {"w": np.zeros((2, 3), "f4"), "b": np.zeros(3, "f4")}
    tree = {"layers": [first, {"w": np.zeros(3, "f4")}], "0": np.zeros(3, "f4")}
    server = program.add_node(mpiml.ParameterServerNode(tree, SGD(0.5), "async"), label="ps")
    solver = mpiml.ExternalNode(calls=[server])
    program.add_node(solver, label="solver", replicas=mpiml.FILL)
    return program
