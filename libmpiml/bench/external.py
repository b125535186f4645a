"""The Python side of external.c: python -m mpiml.run libmpiml/bench/external.py."""

from typing import Any

import numpy as np

import mpiml


class Service:
    """What calls are made to."""

    def echo(self, x: np.ndarray) -> np.ndarray:
        """Return the array."""
        return x

    def take(self, x: np.ndarray) -> None:
        """Return nothing."""


def read(stream: Any, latest: Any, rounds: Any, done: Any) -> None:
    """Take what is streamed; after each round say so."""
    for number in rounds:
        for _ in range(int(number)):
            stream.get()
        done.put(number)


def build(only: str = "reader") -> mpiml.Program:
    """One service, or one reader."""
    program = mpiml.Program("external")
    if only == "service":
        service = program.add_node(mpiml.ServiceNode(Service), label="service")
        solver = mpiml.ExternalNode(calls=service)
        program.add_node(solver, label="solver", replicas=mpiml.FILL)
        return program
    stream = program.topic("stream", policy=mpiml.Keep(8))
    latest = program.topic("latest")
    rounds = program.topic("rounds", policy=mpiml.Keep(1))
    done = program.topic("done")
    reader = mpiml.PyNode(
        read, stream.subscriber(), latest.subscriber(), rounds.subscriber(), done.publisher()
    )
    program.add_node(reader, label="reader")
    solver = mpiml.ExternalNode(publishes=[stream, latest, rounds], subscribes=done)
    program.add_node(solver, label="solver", replicas=mpiml.FILL)
    return program
