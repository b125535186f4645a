"""Programs that the jobs of these tests run."""

import os
import sys
import time

import mpiml


class Register:
    def __init__(self):
        self.nodes = []

    def enter(self, name):
        self.nodes.append(name)
        return len(self.nodes)

    def on(self):
        return os.environ.get("SLURMD_NODENAME")


def work(register):
    me = mpiml.context()
    here = os.environ.get("SLURMD_NODENAME")
    register.enter(me.index)
    threads = os.environ.get("OMP_NUM_THREADS")
    print(f"worker on {here}, register on {register.on()}, {threads} threads", flush=True)
    print(f"drew {me.rng.integers(1 << 60)}", flush=True)


def build():
    """Workers that enter their names at a service."""
    program = mpiml.Program("names")
    register = program.add_node(mpiml.ServiceNode(Register), label="register")
    program.add_node(mpiml.PyNode(work, register), label="worker", replicas=mpiml.FILL)
    return program


def wait():
    print("up", flush=True)
    while not mpiml.context().stopping:  # a program that only waits would end by itself
        time.sleep(0.01)
    print("told", flush=True)


def waiting(slow: float = 0.0):
    """Nodes that wait for the stop; the file takes its time before."""
    print("loading", flush=True)
    time.sleep(slow)
    program = mpiml.Program("waiting")
    program.add_node(mpiml.PyNode(wait), label="node", replicas=mpiml.FILL)
    return program


def leave(status):
    sys.exit(status)


def leaving(status: int = 75):
    """One node that ends with a status."""
    program = mpiml.Program("leaving")
    program.add_node(mpiml.PyNode(leave, status), label="node")
    program.add_node(mpiml.PyNode(wait), label="waiter", replicas=mpiml.FILL)
    return program


class Trainer:
    def double(self, x):
        return 2 * x


def fit():
    print("fitting", flush=True)


def coupled(solvers: int = 2):
    """Ranks of solver.c beside a service and a body."""
    program = mpiml.Program("coupled")
    trainer = program.add_node(mpiml.ServiceNode(Trainer), label="trainer")
    program.add_node(mpiml.ExternalNode(calls=[trainer]), label="solver", replicas=solvers)
    program.add_node(mpiml.PyNode(fit), label="fitter")
    return program
