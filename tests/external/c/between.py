"""The Python side of between.c."""

import numpy as np

import mpiml


def publish(big):
    for number in range(1, 101):
        big.put(np.full(200_000, float(number)))


def build(kept: int):
    program = mpiml.Program("between")
    big = program.topic("big", policy=mpiml.Keep(kept) if kept else "latest")
    program.add_node(mpiml.PyNode(publish, big.publisher()), label="publisher", replicas=2)
    program.add_node(mpiml.ExternalNode(subscribes=big), label="solver")
    return program
