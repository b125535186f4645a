"""Plays a program of a parameter server and its workers, in threads or on the ranks of mpiexec.

    @both
    def test_add(mode):
        def body(client):
            client.push(np.ones(3), client.pull()[1])
            return client.pull()[0]
        for value in served(mode, node(np.zeros(3)), body, body):
            ...

What bodies return comes on rank 0; elsewhere nothing does, so that loops over it are empty.
"""

import time

import numpy as np
import pytest

import mpiml
from mpiml.optim import SGD
from mpiml.roles.parameter_server.shard import Shard

__all__ = ["LIMIT", "by", "node", "read_from_memory", "served", "tree", "ways", "world"]

LIMIT = 30.0
ways = pytest.mark.parametrize("way", ["memory", "message"])


def tree(dtype="float32"):
    """Arrays of odd sizes, one split over the servers, one empty, one without axes."""
    rng = np.random.default_rng(5)
    return {
        "w": [rng.normal(size=(37, 11)).astype(dtype), rng.normal(size=(5,)).astype(dtype)],
        "b": {"x": np.array(0.5, dtype), "none": np.empty((0, 3), dtype)},
        "big": rng.normal(size=1001).astype(dtype),
    }


def node(init, consistency="async", shards=1, optimizer=None, **more):
    """Return a node with SGD(1.0), where nothing else is said."""
    return mpiml.ParameterServerNode(init, optimizer or SGD(1.0), consistency, shards, **more)


def served(mode, params, *bodies, readers=(), meet=False):
    """Run each body as a worker, ``body(client)``, each of `readers` with a handle that reads.

    With `meet`, workers get a `mpiml.roles.Barrier` too. Returns what all have returned, in this
    order, on rank 0.
    """
    program = mpiml.Program("served")
    handle = program.add_node(params, label="params")
    more = ()
    if meet:
        more = (program.add_node(mpiml.ServiceNode(mpiml.roles.Barrier), label="meet"),)
    for i, body in enumerate(bodies):
        program.add_node(mpiml.PyNode(body, handle, *more), label=f"worker{i}")
    for i, body in enumerate(readers):
        program.add_node(mpiml.PyNode(body, handle.reader()), label=f"reader{i}")
    comm = world(mode, program, params.spread)
    result = mpiml.launch(program, comm=comm)
    if comm is not None and comm.rank:
        return []
    names = [f"worker{i}" for i in range(len(bodies))]
    names += [f"reader{i}" for i in range(len(readers))]
    return [result[name][0] for name in names]


def world(mode, program, shards):
    """Return where to launch a program whose servers have so many shards.

    Ranks that are left over do nothing. Skips where there are too few: no two shards share one.
    """
    if mode != "mpi":
        return None
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if 1 < shards >= comm.size:
        pytest.skip(f"{shards} shards and who uses them are on {shards + 1} ranks")
    if comm.size > sum(role.replicas for role in program.roles):
        program.add_node(mpiml.PyNode(_nothing), label="spare", replicas=mpiml.FILL)
    return comm


def read_from_memory(client):
    """Pull until a read from the servers' memory was counted.

    While updates come, servers may be at different versions each time that it looks, and a read
    goes by message; once nobody pushes any more, they no longer are.
    """
    limit = time.monotonic() + LIMIT
    while not client.statistics()["reads"]:
        assert time.monotonic() < limit
        client.pull()


def _nothing():
    pass


def by(way, mode, monkeypatch):
    """Let reads go by message, as they do from another host, or from the servers' memory."""
    if way == "message":
        monkeypatch.setenv("MPIML_HOST_SIZE", "1")  # ranks
        monkeypatch.setattr(Shard, "_shares", lambda *_: False)  # threads of one rank
    elif mode == "mpi":
        monkeypatch.delenv("MPIML_HOST_SIZE", raising=False)
