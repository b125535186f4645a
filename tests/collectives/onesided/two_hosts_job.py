"""Ranks 0 and 1 on one host, 2 and 3 on another: one-sided memory and neighbours over a link.

Started by test_two_hosts.py. Each rank asserts; rank 0 says how memory was read.
"""

import numpy as np
from mpi4py import MPI

from mpiml import topology
from mpiml.bench.several_hosts import link_bytes
from mpiml.collectives import RingModel, SharedModel, Window
from mpiml.collectives.neighbors import neighbor_allreduce

COMM = MPI.COMM_WORLD
COUNT = 300_001  # 2.4 MB: three pieces


def shared_model():
    with SharedModel(COMM, {"w": np.zeros(COUNT), "few": np.zeros(5, "f4")}) as model:
        model.barrier()
        for _ in range(200):
            model.add_at("few", np.array([COMM.rank, 4]), np.ones(2, "f4"))
        model.add({"w": np.arange(COUNT), "few": np.zeros(5)}, scale=0.5)
        own, version = model.snapshot()
        assert own["few"][COMM.rank] == 200
        assert version >= 201
        model.barrier()
        assert model["few"].tolist() == [200] * 4 + [800]
        assert (model["w"] == 2 * np.arange(COUNT)).all()
        tree, version = model.snapshot()
        assert (tree["w"] == 2 * np.arange(COUNT)).all()
        assert version == model.version == 4 * 201
        COMM.Barrier()
        before = link_bytes()
        model.pull("few", 3)
        COMM.Barrier()
        assert link_bytes() - before < 500_000  # not the whole model, of 2.4 MB
        return model.statistics()["way"]


def window():
    with Window(COMM, {"x": np.zeros(1000), "n": np.zeros(1)}) as own:
        following = (COMM.rank + 1) % COMM.size
        for k in range(1, 30):
            own.accumulate(COMM.rank, {"x": np.ones(1000), "n": np.zeros(1)})
            own.accumulate(following, {"x": np.ones(1000), "n": np.ones(1)})
            tree, _ = own.read((COMM.rank + k) % COMM.size)
            assert len({*tree["x"].tolist()}) == 1
        own.barrier()
        assert (own["x"] == 58).all()
        assert own["n"][0] == 29


def ring_model():
    with RingModel(COMM, np.zeros(4), delay=1, tolerance=0.0) as model:
        for _ in range(100):
            model.add_at(None, np.array([COMM.rank]), np.ones(1))
        model.barrier()
        tree, _ = model.snapshot()
        assert np.isfinite(tree).all()
        assert tree[COMM.rank] > 0
        assert model.statistics()["clusters"] == 2


def neighbours():
    x = np.full(100_000, float(COMM.rank))
    for step in range(2):
        x = neighbor_allreduce(x, topology.one_peer_exponential(4), COMM, step=step)
    assert (x == 1.5).all()


way = shared_model()
window()
ring_model()
neighbours()
if COMM.rank == 0:
    print(f"all is well, read by {way}")
