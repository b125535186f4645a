"""Programs over several hosts, one after the other in one job; nodes and rank 0 assert.

Started by test_hosts.py with the number of ranks of each host as its arguments.
"""

import os
import sys
import time

import numpy as np
from mpi4py import MPI

import mpiml
from mpiml.bench.several_hosts import link_bytes
from mpiml.collectives import Bucket

COUNT = 500_000  # float32: 2 MB
SLOTS = tuple(map(int, sys.argv[1:]))


def where():
    me = mpiml.context()
    assert me.host == os.uname().nodename
    return me.host, me.local_rank, me.local_size


def passed(comm, work):
    """Bytes on this host's card for a call of `work` on all ranks, acknowledgements included."""
    counts = []
    for _ in range(2):
        comm.Barrier()
        time.sleep(0.1)
        counts.append(link_bytes())
        comm.Barrier()
        if len(counts) == 1:
            work()
    return counts[1] - counts[0]


# -- members of one role ---------------------------------------------------------------------------


def reduce():
    """Allreduce over all hosts, in memory of each host, each host's part sent once."""
    me = mpiml.context()
    places = me.comm.allgather(where())
    with Bucket(like=np.zeros(COUNT, "f4")) as bucket:
        x = bucket.tree
        counts = []
        for _ in range(3):
            x[:] = me.index + 1
            counts.append(passed(me.comm, bucket.allreduce))
            assert (x == me.replicas * (me.replicas + 1) / 2).all()
        assert bucket.statistics()["hosts"] == len(SLOTS)
        device = os.stat("/dev/shm").st_dev
        if me.local_size > 1:  # it shares memory, in its own host's /dev/shm
            assert mapped(x.ctypes.data) == f"{os.major(device):02x}:{os.minor(device):02x}"
    devices = set(me.comm.allgather((me.host, device)))
    assert len(devices) == len({device for _, device in devices}) == len(SLOTS)
    return places, min(counts) / x.nbytes


def mapped(address):
    """The device of the file that lies at an address of this process."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, _, _, device, _ = line.split(maxsplit=4)
            first, last = (int(word, 16) for word in span.split("-"))
            if first <= address < last:
                return device
    raise LookupError(hex(address))


def members(comm):
    program = mpiml.Program("members")
    program.add_node(mpiml.PyNode(reduce), label="member", replicas=comm.size)
    result = mpiml.launch(program, comm)
    if comm.rank != 0:
        return
    found = result["member"]
    places = found[0][0]
    names = list(dict.fromkeys(host for host, _, _ in places))
    want = [(name, i, n) for name, n in zip(names, SLOTS, strict=True) for i in range(n)]
    assert all(places == want for places, _ in found)
    # Sums go up from host to host and results down, once each, and two cards see each. If every
    # rank sent its own array, it would be as many times more as a host has ranks.
    total = sum(
        found[places.index((name, 0, n))][1] for name, n in zip(names, SLOTS, strict=True)
    )
    once = 4 * (len(SLOTS) - 1)
    assert once <= total < 1.1 * once, found


# -- roles that are placed -------------------------------------------------------------------------


class Store:
    def where(self):
        return where()

    def twice(self, x):
        return 2 * x


def near(stores):
    """Call all stores, with arrays: one is on this host, the others are not."""
    x = np.arange(COUNT, dtype="f4")
    for store in stores:
        assert (store.twice(x) == 2 * x).all()
    return where()[0], [store.where()[0] for store in stores]


def placed(comm):
    """One store on each host, and a caller beside a store, wherever a host has room for one."""
    program = mpiml.Program("placed")
    hosts = len(SLOTS)
    store = mpiml.ServiceNode(Store)
    stores = program.add_node(store, label="store", replicas=hosts, placement={"spread": True})
    node = mpiml.PyNode(near, stores)
    program.add_node(
        node, label="near", replicas=comm.size - hosts, placement={"with_": "store"}
    )
    result = mpiml.launch(program, comm)
    if comm.rank == 0:
        for i, (mine, others) in enumerate(result["near"]):
            assert len(set(others)) == hosts, others
            assert mine == others[i]


# -- a topic ---------------------------------------------------------------------------------------


def publish(topic):
    return passed(mpiml.context().world, lambda: topic.put(np.ones(COUNT, "f4")))


def subscribe(topic):
    def get():
        assert topic.get().nbytes == 4 * COUNT

    return where()[0], passed(mpiml.context().world, get)


def topics(comm, names):
    """A large message goes once to another host, and not to each subscriber there."""
    program = mpiml.Program("topics")
    topic = program.topic("fields")
    program.add_node(
        mpiml.PyNode(publish, topic.publisher()),
        label="publisher",
        placement={"host": names[0]},
    )
    for label, host, replicas in (("here", names[0], 1), ("there", names[1], 2)):
        node = mpiml.PyNode(subscribe, topic.subscriber())
        program.add_node(node, label=label, replicas=replicas, placement={"host": host})
    result = mpiml.launch(program, comm)
    if comm.rank == 0:
        assert [host for host, _ in result["there"]] == [names[1]] * 2
        assert 4 * COUNT <= result["there"][0][1] < 1.3 * 4 * COUNT, result["there"]


def main():
    comm = MPI.COMM_WORLD
    names = list(dict.fromkeys(comm.allgather(os.uname().nodename)))
    members(comm)
    placed(comm)
    if SLOTS == (2, 2):
        topics(comm, names)
    if comm.rank == 0:
        print("all is well")


main()
