"""`mpiml.ParameterServerNode` in programs: values against a serial run, for each consistency."""

import copy

import numpy as np
import optree
import pytest

import mpiml
from mpiml.consistency import BSP, SSP, Async, Backup, BoundedDelay, DropStale
from mpiml.optim import SGD, Adam, Momentum
from mpiml.roles.parameter_server import Downpour
from tests.playing import both
from tests.roles.parameter_server.serving import by, node, read_from_memory, served, tree, ways

STEPS = 5
shards = pytest.mark.parametrize("shards", [1, 2, 3])
workers = pytest.mark.parametrize("workers", [1, 2, 3])


def gradient(like, worker, step):
    """One that depends on nothing else, so that a serial run can do the same."""
    leaves, treedef = optree.tree_flatten(like)
    rng = np.random.default_rng([worker, step])
    return treedef.unflatten([rng.normal(size=x.shape).astype(x.dtype) for x in leaves])


def training(worker, steps=STEPS):
    def body(client):
        for step in range(steps):
            params, version = client.pull()
            assert version == step
            assert client.push(gradient(params, worker, step), version) is True
        # as if there was one iteration more: the last step of all is waited for
        return client.pull()

    return body


def serial(params, optimizer, workers, steps=STEPS):
    """Return what is left of `params` after as many steps, each with the mean of all workers."""
    leaves, treedef = optree.tree_flatten(copy.deepcopy(params))
    states = [optimizer.init(leaf) for leaf in leaves]
    for step in range(steps):
        grads = [optree.tree_leaves(gradient(params, w, step)) for w in range(workers)]
        for i, leaf in enumerate(leaves):
            mean = grads[0][i]
            if workers > 1:
                mean = np.multiply(mean, 1 / workers, dtype=leaf.dtype)
                for other in grads[1:]:
                    mean += np.multiply(other[i], 1 / workers, dtype=leaf.dtype)
            optimizer.apply(leaf, mean, states[i], step + 1)
    return treedef.unflatten(leaves)


def same(found, expected):
    """Tell whether trees are alike in every bit."""
    a, one = optree.tree_flatten(found)
    b, two = optree.tree_flatten(expected)
    return one == two and all(
        x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
        for x, y in zip(a, b, strict=True)
    )


@both
@ways
@shards
@workers
def test_sequential_is_the_serial_run_in_every_bit(mode, way, shards, workers, monkeypatch):
    by(way, mode, monkeypatch)
    expected = serial(tree(), Adam(0.01), workers)
    consistency = BSP() if workers == 2 else BoundedDelay(0)
    params = node(tree(), consistency, shards, Adam(0.01))
    for found, version in served(mode, params, *map(training, range(workers))):
        assert version == STEPS
        assert same(found, expected)


@both
@pytest.mark.parametrize("optimizer", [SGD(0.1, weight_decay=0.01), Momentum(0.1, 0.9)])
@pytest.mark.parametrize("init", [np.arange(100.0), np.float64(3.5), [np.ones((4, 4), "f4")]])
def test_single_arrays_and_lists_are_trees_too(mode, optimizer, init):
    expected = serial(init if isinstance(init, list) else np.asarray(init), optimizer, 2)
    for found, _ in served(mode, node(init, "bsp", 1, optimizer), training(0), training(1)):
        assert same(found, expected)


@both
@shards
@workers
@pytest.mark.parametrize(
    "consistency", [Async(), SSP(0), SSP(2), BoundedDelay(2), DropStale(50), "async"], ids=repr
)
def test_all_gradients_count_once(mode, shards, workers, consistency):
    """With whole numbers and plain steps, the sum does not depend on the order."""

    def body(client):
        for _ in range(STEPS):
            params, version = client.pull()
            assert client.push(optree.tree_map(np.ones_like, params), version)
            if isinstance(consistency, SSP):
                client.clock()

    def last(client):
        while client.statistics()["pushes"] < workers * STEPS:
            pass
        return client.pull(), client.statistics()

    init = optree.tree_map(np.zeros_like, tree())
    params = node(init, consistency, shards)
    *_, after = served(mode, params, *[body] * workers, readers=[last]) or [None]
    if after is not None:
        (found, version), statistics = after
        delayed = isinstance(consistency, BoundedDelay)  # steps with the mean of the workers
        steps = STEPS if delayed else workers * STEPS
        assert version == statistics["version"] == steps
        assert statistics["pushes"] == workers * STEPS
        assert statistics["dropped"] == 0
        for leaf in optree.tree_leaves(found):
            np.testing.assert_allclose(leaf, -steps, rtol=1e-5)


@both
@ways
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("s", [0, 1, 3])
def test_ssp_reads_have_all_that_they_must(mode, way, shards, s, monkeypatch):
    """Column w counts what worker w has pushed: up to clock - s - 1 all, of its own all."""
    by(way, mode, monkeypatch)
    count = 3

    def training(worker):
        def body(client):
            mine = np.zeros((40, count), "f4")
            mine[:, worker] = -1
            for clock in range(8):
                found, version = client.pull()
                assert (found == found[0]).all()
                assert found[0].min() >= clock - s
                assert found[0, worker] == clock
                if clock % 2:
                    assert client.push(mine, version)
                else:
                    client.futures.push(mine, version)
                    assert client.pull()[0][:, worker].tolist() == [clock + 1] * 40
                (client.clock if clock % 3 else client.futures.clock)()
            if way == "memory":
                read_from_memory(client)
            return client.statistics()["reads"]

        return body

    params = node(np.zeros((40, count), "f4"), SSP(s), shards)
    reads = served(mode, params, *map(training, range(count)))
    if reads and way == "memory":
        assert all(reads)


@both
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
def test_backup_drops_as_many_as_are_too_many(mode, shards, b):
    """All push for the same step: the first are taken, the others dropped and counted."""
    count = 3

    def body(client, meet):
        used = []
        for step in range(STEPS):
            _, version = client.pull()
            assert version == step
            meet.wait("pulled")
            used.append(client.push(np.ones(100, "f4"), version))
            meet.wait("pushed")
        meet.wait("done")
        found, version = client.pull()
        return used, found, version, client.statistics()

    params = node(np.zeros(100, "f4"), Backup(b), shards)
    told = served(mode, params, *[body] * count, meet=True)
    for _, found, version, statistics in told:
        assert version == STEPS
        assert statistics["dropped"] == b * STEPS
        assert statistics["pushes"] == count * STEPS
        np.testing.assert_allclose(found, -STEPS, rtol=1e-6)
    for step in range(STEPS if told else 0):
        assert sum(used[step] for used, *_ in told) == count - b


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_that_are_too_old_are_dropped(mode, shards):
    def body(client):
        one = np.ones(64, "f4")
        used = [client.push(one, 0) for _ in range(4)]  # 0, 1, 2, 3 updates old
        used.append(client.futures.push(one, 1).result(30))
        found, version = client.pull()
        return used, found[0], version, client.statistics()

    for used, value, version, statistics in served(
        mode, node(np.zeros(64, "f4"), DropStale(2), shards), body
    ):
        assert used == [True, True, True, False, True]
        assert (value, version) == (-4, 4)
        assert statistics["dropped"] == 1
        assert statistics["staleness"] == {0: 1, 1: 1, 2: 2}


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_steps_by_staleness(mode, shards):
    def body(client):
        one = np.ones(64, "f8")
        for version in (0, 0, 0, 2):  # 0, 1, 2, 1 updates old
            client.push(one, version)
        return client.pull()[0]

    params = node(np.zeros(64), Async(by_staleness=True), shards)
    for found in served(mode, params, body):
        np.testing.assert_allclose(found, -(1 + 1 / 2 + 1 / 3 + 1 / 2), rtol=1e-15)


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_delay_compensation(mode, shards):
    """g + λ g g (w_now - w_then), by hand, where another worker has moved w meanwhile."""
    init = np.linspace(1, 2, 64)

    def slow(client, meet):
        then, version = client.pull()
        meet.wait("pulled")
        meet.wait("moved")
        client.push(0.5 * then, version)
        return then, client.pull()[0], client.statistics()["reads"]

    def fast(client, meet):
        meet.wait("pulled")
        client.push(np.full(64, 0.25), client.pull()[1])
        meet.wait("moved")

    params = node(init, Async(compensate=0.1), shards, SGD(0.5))
    told = served(mode, params, slow, fast, meet=True)
    if told:
        then, found, reads = told[0]
        assert (then == init).all()
        assert reads == 0  # the servers have to know what was pulled
        now, g = init - 0.125, 0.5 * init
        np.testing.assert_allclose(found, now - 0.5 * (g + 0.1 * g * g * (now - init)))


@both
@pytest.mark.parametrize("tau", [1, 2])
def test_bounded_delay_lets_workers_ahead_so_far_and_no_further(mode, tau):
    """A worker pulls tau + 1 times before the others have pushed anything."""

    def first(client, meet):
        for _ in range(tau):
            found, version = client.pull()
            assert version == 0
            assert not found.any()
            client.push(np.ones(32, "f4"), version)
        client.pull()
        client.push(np.ones(32, "f4"), 0)
        meet.wait("ahead")
        found, version = client.pull()  # waits for iteration 0 of the other
        assert version >= 1
        return float(found[0])

    def second(client, meet):
        meet.wait("ahead")
        assert client.pull()[1] == 0
        client.push(np.full(32, 3, "f4"), 0)

    params = node(np.zeros(32, "f4"), BoundedDelay(tau))
    told = served(mode, params, first, second, meet=True)
    if told:  # the mean of both, and perhaps what the first has pushed since, alone
        assert told[0] in (-2.0, -3.0, -4.0, -5.0)


@both
@shards
def test_downpour_learns_what_there_is_to_learn(mode, shards):
    """Least squares: everybody pulls and pushes every few steps, Adagrad at the servers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 40))
    truth = rng.normal(size=40)
    y = x @ truth

    def training(worker):
        mine = slice(worker * 128, worker * 128 + 128)

        def body(client):
            with Downpour(client, fetch=3, push=2, rate=0.05) as replica:
                for _ in range(150):
                    error = x[mine] @ replica.params["w"] - y[mine]
                    replica.step({"w": x[mine].T @ error / 128})
                statistics = replica.statistics()
            return client.pull()[0]["w"], statistics

        return body

    params = node({"w": np.zeros(40)}, "async", shards, mpiml.optim.Adagrad(0.5))
    found = served(mode, params, training(0), training(1))
    for _, statistics in found:
        assert (statistics.steps, statistics.pulls, statistics.pushes) == (150, 51, 75)
    if found:
        best = min(float(((x @ w - y) ** 2).mean()) for w, _ in found)
        assert best < 0.02 * float((y**2).mean())
