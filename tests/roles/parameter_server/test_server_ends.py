"""Workers that return early, fail or are stopped, services as workers, and what is left behind."""

import contextlib
import gc
import os
import re
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import mpiml
from mpiml.consistency import BSP, SSP, Async, Backup, BoundedDelay
from mpiml.filters import SignificantlyModified
from tests.playing import both
from tests.roles.parameter_server.serving import LIMIT, by, node, served, ways, world

shards = pytest.mark.parametrize("shards", [1, 2])
waiting = pytest.mark.parametrize(
    "consistency", [BSP(), BoundedDelay(1), SSP(0), Backup(1)], ids=repr
)
ONES = np.ones(64, "f4")


def zeros():
    return np.zeros(64, "f4")


def step(client, consistency, count=1):
    for _ in range(count):
        _, version = client.pull()
        client.push(ONES, version)
        if isinstance(consistency, SSP):
            client.clock()


@both
@ways
@shards
@waiting
def test_nobody_waits_for_who_has_returned(mode, way, shards, consistency, monkeypatch):
    by(way, mode, monkeypatch)

    def short(client):
        step(client, consistency, 2)

    def never(client):
        pass  # a worker that does nothing at all

    def long(client):
        step(client, consistency, 8)
        return client.pull()[1]

    found = served(mode, node(zeros(), consistency, shards), long, short, never)
    assert all(v is None or v >= 8 for v in found)


@both
@shards
def test_pushes_that_were_not_waited_for_come_before_the_end_of_their_worker(mode, shards):
    def hasty(client):
        for _ in range(20):
            client.futures.push(ONES, 0)

    def patient(client):
        for _ in range(20):
            client.push(ONES, 0)
        found, version = client.pull()
        return float(found.min()), float(found.max()), version

    for found in served(mode, node(zeros(), BSP(), shards), hasty, patient):
        assert found in (None, (-20.0, -20.0, 20))


@both
@shards
@waiting
def test_a_worker_that_fails_ends_the_program_though_others_wait_for_it(
    mode, shards, consistency
):
    def fails(client, meet):
        step(client, consistency)
        meet.wait("before")
        raise ValueError("boom")

    def waits(client, meet):
        step(client, consistency)
        meet.wait("before")
        step(client, consistency, 50)
        mpiml.context().wait_for_stop()

    params = node(zeros(), consistency, shards)
    with pytest.raises((ValueError, mpiml.MpimlError), match="boom"):
        served(mode, params, waits, fails, waits, meet=True)


@both
@shards
@waiting
def test_a_stop_while_pulls_wait(mode, shards, consistency):
    """It comes while one worker can go on only if the other does."""

    def stops(client):
        client.pull()
        client.statistics()
        mpiml.context().stop()
        mpiml.context().wait_for_stop()

    def waits(client):
        step(client, consistency, 50)
        mpiml.context().wait_for_stop()

    served(mode, node(zeros(), consistency, shards), waits, stops, stops)


@both
@ways
@shards
@pytest.mark.parametrize("filters", [(), (SignificantlyModified(0.0),)], ids=["plain", "pulls"])
def test_a_service_is_a_worker_too(mode, way, shards, filters, monkeypatch):
    """Its methods wait for the servers, and let each other in meanwhile."""
    by(way, mode, monkeypatch)
    each, callers = 10, 3

    class Trainer:
        def __init__(self, client):
            self.client = client

        def train(self):
            found, version = self.client.pull()
            assert (found == found[0]).all()
            self.client.push(ONES, version)
            return self.client.push_pull(ONES, version)[1]

    def body(trainer):
        futures = [trainer.futures.train() for _ in range(each)]
        return max(future.result(LIMIT) for future in futures)

    program = mpiml.Program("trainer")
    params = node(zeros(), "async", shards, pull_filters=filters)
    handle = program.add_node(params, label="params")
    trainer = program.add_node(mpiml.ServiceNode(Trainer, handle), label="trainer")
    program.add_node(mpiml.PyNode(body, trainer), label="body", replicas=callers)
    comm = world(mode, program, shards)
    result = mpiml.launch(program, comm=comm)
    if comm is None or comm.rank == 0:
        assert max(result["body"]) == 2 * each * callers


@both
@shards
def test_several_servers_in_one_program(mode, shards):
    def body(one, two):
        a, version = one.pull()
        one.push(np.ones_like(a), version)
        b, version = two.pull(["x"])
        two.push({"x": b["x"] + 1}, version, ["x"])
        return float(one.pull()[0][0]), two.pull()[0]["x"].tolist(), one.pull()[1]

    program = mpiml.Program("two")
    one = program.add_node(node(zeros(), "bsp", shards), label="one")
    two = program.add_node(node({"x": np.zeros(2), "y": np.zeros(99)}), label="two")
    program.add_node(mpiml.PyNode(body, one, two), label="body")
    comm = world(mode, program, shards)
    result = mpiml.launch(program, comm=comm)
    if comm is None or comm.rank == 0:
        assert result["body"] == [(-1.0, [-1.0, -1.0], 1)]


def test_an_update_function_that_raises_ends_the_program():
    def update(parameter, gradient, state, step):
        if step == 2:
            raise ZeroDivisionError("in update")
        parameter -= gradient

    def body(client):
        for _ in range(3):
            client.push(ONES, client.pull()[1])

    for count in (1, 2):
        params = mpiml.ParameterServerNode(zeros(), update, shards=count)
        with pytest.raises(ZeroDivisionError, match="in update"):
            served("threads", params, body)


def test_init_is_called_on_each_server_and_may_fail_there():
    calls = []

    def init():
        calls.append(threading.get_ident())
        return {"w": np.ones(100)}

    (found,) = served("threads", node(init, "async", 2), lambda client: client.pull()[0])
    assert (found["w"] == 1).all()
    assert len(calls) == 2

    def fails():
        raise FileNotFoundError("no checkpoint")

    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        served("threads", node(fails, "async", 2), lambda client: client.pull())

    def differs():
        calls.append(0)
        return np.ones(64 + 16 * len(calls))

    with pytest.raises(mpiml.UsageError, match="expected the same tree on all servers, got"):
        served("threads", node(differs, "async", 2), lambda client: client.pull())


@both
@ways
@shards
def test_memory_stays_as_it_is(mode, way, shards, monkeypatch):
    """200 pulls and pushes of 1 MiB; then nothing more is held than after the first ones."""
    by(way, mode, monkeypatch)

    def body(client):
        ones = np.ones(1 << 18, "f4")

        def train(count):
            for i in range(count):
                _, version = client.pull()
                (client.push if i % 2 else client.futures.push)(ones, version)

        tracemalloc.start()
        train(20)
        client.push(ones, 0)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        train(200)
        client.push(ones, 0)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return after - before

    for more in served(mode, node(np.zeros(1 << 18, "f4"), Async(), shards), body):
        assert more < 3 << 20


@both
@ways
def test_nothing_is_left_open(mode, way, monkeypatch):
    by(way, mode, monkeypatch)

    def body(client):
        step(client, None, 3)

    def fails(client):
        step(client, None, 3)
        raise ValueError("boom")

    def once():
        served(mode, node(zeros(), "async", 2), body, body, readers=[lambda c: c.pull()])
        with pytest.raises((ValueError, mpiml.MpimlError), match="boom"):
            served(mode, node(zeros(), "async", 2), body, fails)
        gc.collect()

    def there():
        maps = Path("/proc/self/maps").read_text().count("mpiml parameters")
        held = {}
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the list itself
                held[fd] = os.readlink(f"/proc/self/fd/{fd}")
        # the bell of a program between ranks is let go a little later, in any program
        return {fd: file for fd, file in held.items() if "/dev/shm/mpiml-" not in file}, maps

    once()  # what is made once for a process
    shm, (descriptors, maps) = set(os.listdir("/dev/shm")), there()
    for _ in range(3):
        once()
    now, held = there()
    new = [now[fd] for fd in now.keys() - descriptors.keys()]
    assert len(now) <= len(descriptors), new
    assert held <= maps
    if mode == "threads":  # others come and go
        mine, new = str(os.getpid()), set(os.listdir("/dev/shm")) - shm
        assert not [f for f in new if mine in re.split(r"[\W_]+", f)]
