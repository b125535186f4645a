"""The Python side of topics.c."""

import numpy as np

import mpiml

ROWS, COLUMNS, MANY = 150, 100, 60
SHAPES = [(3, 4), (ROWS, COLUMNS), (ROWS, COLUMNS), (ROWS // 2, COLUMNS)]


def expected(number, tag):
    flat = tag + 1e-6 * np.arange(ROWS * COLUMNS)
    if number % 4 == 0:
        return flat[:12].reshape(3, 4)
    if number % 4 == 2:
        return flat.reshape(ROWS, COLUMNS, order="F")
    full = flat.reshape(ROWS, COLUMNS)
    return full[::2] if number % 4 == 3 else full


def read(fields):
    came = {0: 0, 1: 0}
    for array in fields:
        rank = int(array[0, 0] // 1000)
        np.testing.assert_array_equal(array, expected(came[rank], array[0, 0]))
        assert array[0, 0] == 1000 * rank + came[rank]
        came[rank] += 1
    assert came == {0: MANY, 1: MANY}, came


def overtaken(latest, drops):
    assert all(array[0, 0] == -1 for array in latest)
    lasts = [array for array in drops if array[0, 0] >= 0]  # the newest is never dropped
    assert sorted(float(array[0, 0]) for array in lasts) == [MANY - 1, 1000 + MANY - 1]


def work(jobs):
    return sorted(int(job) for job in jobs)


def collect(workers):
    done = sorted(job for worker in workers for job in worker.result())
    assert done == sorted([*range(20), *range(20)]), done


def serve(go, params):
    for number in go:
        values = 1e4 * float(number) + np.add.outer(100 * np.arange(ROWS), np.arange(COLUMNS))
        turned = [np.ascontiguousarray, np.asfortranarray, lambda x: np.repeat(x, 2, 0)[::2]]
        params.put(turned[int(number) % 3](values))


def keep(kept):
    me = mpiml.context().index
    for number in range(1, 11):
        kept.put(np.array([me, number]))


def build():
    program = mpiml.Program("topics")
    fields = program.topic("fields", policy=mpiml.Keep(4))
    latest = program.topic("latest")
    drops = program.topic("drops", policy=mpiml.Keep(2, on_full="drop_oldest"))
    jobs = program.topic("jobs", policy=mpiml.Keep(2), deliver="round_robin")
    go = program.topic("go", policy=mpiml.Keep(1))
    params = program.topic("params")
    kept = program.topic("kept", policy=mpiml.Keep(3))
    program.add_node(mpiml.PyNode(read, fields.subscriber()), label="read")
    node = mpiml.PyNode(overtaken, latest.subscriber(), drops.subscriber())
    program.add_node(node, label="overtaken")
    workers = program.add_node(mpiml.PyNode(work, jobs.subscriber()), label="work", replicas=2)
    program.add_node(mpiml.PyNode(collect, workers), label="collect")
    program.add_node(mpiml.PyNode(serve, go.subscriber(), params.publisher()), label="serve")
    program.add_node(mpiml.PyNode(keep, kept.publisher()), label="keep", replicas=2)
    solver = mpiml.ExternalNode(
        publishes={
            fields: mpiml.Array("float64", (None, None)),
            **dict.fromkeys((latest, drops, jobs, go)),
        },
        subscribes={params: None, kept: mpiml.Array("int64", (2,))},
    )
    program.add_node(solver, label="solver", replicas=mpiml.FILL)
    return program
