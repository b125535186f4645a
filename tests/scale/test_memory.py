"""What a rank holds of all others: a few bytes of each, and not much more while it starts."""

import gc
import os
import tracemalloc
from array import array

import pytest

import mpiml
from mpiml.config import Config
from mpiml.ending import Ending
from mpiml.handshake import SIZE, Record
from mpiml.hosts import local_facts
from mpiml.layout import lay_out, split_layers
from tests.scale.test_trees import Job

PER_HOST = 128


class Service:
    def echo(self, x):
        return x


def work(service):
    pass


def program():
    built = mpiml.Program("many")
    service = built.add_node(mpiml.ServiceNode(Service), label="service")
    built.add_node(mpiml.PyNode(work, service), label="worker", replicas=mpiml.FILL)
    return built


def records_of(n):
    """Records of ranks that are bound to a core each, on hosts of `PER_HOST`, as bytes."""
    facts = local_facts(Config())
    return [
        Record(
            0, 0, None, bytes(32),
            facts._replace(name=f"node{i // PER_HOST}", cores=frozenset({i % PER_HOST})),
            os.urandom(8),
        ).pack()
        for i in range(n)
    ]  # fmt: skip


def started(data):
    """What a rank keeps of the start, as `mpiml.session` does it."""
    seen = {}
    records = [Record.unpack(one, rank, seen) for rank, one in enumerate(data)]
    built = program()
    plan, hosts = lay_out(built, [r.facts for r in records], [r.attached for r in records])
    vertices = built.expand(plan.replicas)
    ranks = array("i", vertices.owners(plan.ranks))
    split_layers(vertices, ranks, 0)
    return vertices, ranks, hosts, plan.gpus, plan.notes


def measured(make):
    """Return how many bytes `make` leaves behind, and how many it had at most."""
    gc.collect()
    tracemalloc.start()
    try:
        held = make()
        peak = tracemalloc.get_traced_memory()[1]
        gc.collect()
        return tracemalloc.get_traced_memory()[0], peak, held
    finally:
        tracemalloc.stop()


def test_a_rank_keeps_a_few_bytes_of_each_other():
    found = {}
    for n in (100, 1000):
        data = records_of(n)
        started(data)  # what is made once for a process
        kept, peak, held = measured(lambda data=data: started(data))
        found[n] = kept, peak
        assert len(held[0]) == n
        assert list(held[1]) == list(range(n))
    kept = (found[1000][0] - found[100][0]) / 900
    peak = (found[1000][1] - found[100][1]) / 900
    assert kept <= 80  # bytes; docs/scale.md says so
    assert peak <= 2000  # while it starts, beside the record itself
    assert SIZE == 512


def test_a_rank_keeps_nothing_of_most_others_for_the_end():
    """Whatever the number of ranks: only those above and below it in the tree."""
    kept = {}
    for n in (1000, 10_000):
        job = Job(1)
        engine = job.engines[0]
        engine.rank, engine.size = 50, n
        Ending(engine, n, lambda note: None)
        kept[n] = measured(lambda engine=engine, n=n: Ending(engine, n, lambda note: None))[0]
    assert abs(kept[10_000] - kept[1000]) < 500


@pytest.mark.parametrize("n", [1000, 10_000])
def test_the_nodes_of_a_program_take_no_more_for_many_replicas(n):
    built = program()
    few = measured(lambda: built.expand([1, 10]))[0]
    many, _, vertices = measured(lambda: built.expand([1, n]))
    assert many < few + 200
    assert vertices[n].title == f"worker/{n - 1}"
