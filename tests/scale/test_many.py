"""Real ranks: what a program sends to start and to end, and that many ranks on few cores do both."""

import os
from collections import Counter

import pytest

import mpiml
from mpiml.wire import (
    AGREE_COUNT,
    AGREE_TARGET,
    RETURN,
    STATUS,
    STOP,
    STOP_REQUEST,
    TOPIC_ASK,
    WAITS_QUERY,
)
from tests.mpi import ROOT, environment, mpiexec

LEG = os.environ.get("MPIML_TEST_LEG")


class Desk:
    def echo(self, x):
        return x


def call(desk):
    return desk.echo(mpiml.context().index)


def stand_by():
    while not mpiml.context().agree_stop():
        pass


def stop():
    mpiml.context().stop()


@pytest.fixture
def counted(monkeypatch):
    """Return a function that launches on 4 ranks in a tree of fan-out 2, and counts frames."""
    from mpi4py import MPI

    from mpiml import control
    from mpiml.engine import Engine

    sent = Counter()
    transmit = Engine.transmit

    def count(self, rank, kind, *args, **kwargs):
        if rank != self.rank:
            sent[kind] += 1
        transmit(self, rank, kind, *args, **kwargs)

    monkeypatch.setattr(control, "FANOUT", 2)
    monkeypatch.setattr(Engine, "transmit", count)
    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < 4 else MPI.UNDEFINED)

    def run(build):
        if part == MPI.COMM_NULL:
            return None
        program = mpiml.Program("counted")
        build(program)
        sent.clear()
        mpiml.launch(program, part)
        return part.allgather(dict(sent))

    yield run
    if part != MPI.COMM_NULL:
        part.Free()


@pytest.mark.mpi(min_size=4)
def test_a_program_that_is_done_sends_its_share(counted):
    def build(program):
        desk = program.add_node(mpiml.ServiceNode(Desk), label="desk")
        program.add_node(mpiml.PyNode(call, desk), label="caller", replicas=3)

    for sent in counted(build) or ():
        assert sent.get(STATUS, 0) <= 2  # bodies are open; none is
        assert sent.get(STOP, 0) <= 2
        assert sent.get(RETURN, 0) <= 1
        assert sent.get(AGREE_COUNT, 0) <= 1
        assert sent.get(AGREE_TARGET, 0) <= 2 * 2  # where to stop; that all have left
        assert sent.keys().isdisjoint({STOP_REQUEST, TOPIC_ASK, WAITS_QUERY})


@pytest.mark.mpi(min_size=4)
def test_a_role_that_is_stopped_sends_its_share(counted):
    def build(program):
        program.add_node(mpiml.PyNode(stop), label="stop")
        program.add_node(mpiml.PyNode(stand_by), label="loop", replicas=3)

    found = counted(build)
    for sent in found or ():
        assert sent.get(STOP_REQUEST, 0) <= 1
        assert sent.get(STOP, 0) <= 2
        assert sent.get(AGREE_COUNT, 0) <= 1
        assert sent.get(AGREE_TARGET, 0) <= 2 * 2  # where to stop; that all have left
    if found:
        assert sum(sent.get(AGREE_COUNT, 0) for sent in found) == 2
        assert sum(sent.get(STOP, 0) for sent in found) == 3


MANY = """
import mpiml
from mpiml.bench.scale_inside import Desk

def work(desks):
    me = mpiml.context()
    return sum(desks[(me.index + i) % len(desks)].echo(1) for i in range(20))

program = mpiml.Program("many")
desks = program.add_node(mpiml.ServiceNode(Desk), label="desk", replicas=4)
program.add_node(mpiml.PyNode(work, desks), label="worker", replicas=mpiml.FILL)
result = mpiml.launch(program)
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    print("calls", sum(result["worker"]), flush=True)
"""


@pytest.mark.skipif(
    LEG not in (None, "openmpi"), reason="once is enough: it is about the number"
)
def test_many_ranks_on_few_cores_start_call_and_end(mpi_launcher, tmp_path):
    script = tmp_path / "many.py"
    script.write_text(MANY)
    env = environment(PYTHONPATH=str(ROOT))
    ended = mpiexec(32, script, timeout=240, env=env).check()
    assert "calls 560" in ended.stdout
    assert not ended.leftovers
