"""Pulls and pushes that meet at the servers: two clients of a node, errors, workers far ahead."""

import threading

import numpy as np
import pytest

import mpiml
from mpiml.consistency import Async, BoundedDelay, Consistency
from mpiml.filters import KeyCaching
from mpiml.roles.parameter_server import Keys
from tests.playing import both
from tests.roles.parameter_server.serving import LIMIT, by, node, served, ways, world

ONE = {"w": np.ones(64), "v": np.ones(3, "f4")}


def of_all(mode, found):
    """Return what the bodies of all ranks have put into a list."""
    if mode != "mpi":
        return found
    from mpi4py import MPI

    return [item for each in MPI.COMM_WORLD.allgather(found) for item in each]


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_a_node_that_holds_the_handle_twice_pulls_by_both_at_once(mode, shards):
    def body(params, reader):
        def pull(client):
            for _ in range(50):
                tree, _ = client.pull(indices={"w": [0, 63]})
                assert len(set(tree["w"])) == 1

        thread = threading.Thread(target=mpiml.context().bind(pull), args=(reader,))
        thread.start()
        pull(params)
        thread.join(LIMIT)
        assert not thread.is_alive()

    program = mpiml.Program("both")
    handle = program.add_node(node(ONE, shards=shards), label="params")
    program.add_node(mpiml.PyNode(body, handle, handle.reader()), label="body")
    mpiml.launch(program, comm=world(mode, program, shards))


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_an_error_of_push_pull_leaves_nobody_waiting(mode, shards, monkeypatch):
    monkeypatch.setenv("MPIML_HOST_SIZE", "1")  # so that it is one round trip, of messages

    def body(params):
        for _ in range(3):
            with pytest.raises(mpiml.UsageError, match="expected one that pull"):
                params.push_pull(ONE, 99)
        tree, version = params.push_pull(ONE, 0)
        assert version == 1
        np.testing.assert_array_equal(tree["w"], 0 * ONE["w"])
        return params.statistics()["waiting"]

    assert served(mode, node(ONE, shards=shards), body) in ([0], [])


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_a_worker_that_only_pushes_waits_for_the_others(mode, shards):
    """Its gradients are held by the servers: no more than the delay allows, and a few on the way."""

    def ahead(params, meet):
        _, version = params.pull()
        for _ in range(2):
            assert params.push(ONE, version)  # of this iteration and the next
        late = [params.futures.push(ONE, version) for _ in range(3)]
        with pytest.raises(mpiml.DeadlineError):
            params.with_options(timeout=0.01).push(
                ONE, version
            )  # it has been sent all the same
        assert not any(future.done() for future in late)
        meet.wait()
        assert all(future.result() for future in late)
        return params.pull()[1]

    def behind(params, meet):
        meet.wait()
        for _ in range(6):
            params.push(ONE, params.pull()[1])
        return 0

    found = served(mode, node(ONE, BoundedDelay(1), shards), ahead, behind, meet=True)
    for version in found[:1]:
        assert version >= 5


def test_too_many_pushes_that_wait_are_refused():
    def ahead(params, meet):
        futures = [params.futures.push(ONE, 0) for _ in range(40)]
        errors = []
        for future in futures[20:]:
            with pytest.raises(
                mpiml.UsageError, match="expected at most 16 pushes of a worker"
            ):
                future.result()
            errors.append(future)
        meet.wait()
        return sum(future.exception() is None for future in futures), len(errors)

    def behind(params, meet):
        meet.wait()
        for _ in range(20):
            params.push(ONE, params.pull()[1])

    done, _ = served("threads", node(ONE, "bsp"), ahead, behind, meet=True)
    assert done == (17, 20)


@pytest.mark.parametrize("nonfinite", [True, False])
def test_backup_goes_on_without_who_has_nothing(nonfinite):
    def body(params, meet):
        me = mpiml.context().role
        _, version = params.pull()
        if me != "worker0":
            params.push(ONE, version)
        elif nonfinite:
            assert not params.push({**ONE, "v": np.full(3, np.nan, "f4")}, version)
        else:
            params.clock()
        return params.pull()[1]

    params = node(ONE, mpiml.consistency.Backup(0), nonfinite="drop")
    assert served("threads", params, body, body, body, meet=True) == [1, 1, 1]


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_keys_that_come_again_are_sent_once(mode, shards):
    def body(params):
        keys, other = np.arange(0, 1000, 7), np.array([999, 3])
        for step in range(1, 5):
            for some in (keys, other):
                _, version = params.pull(indices=some)
                assert params.push(np.ones((len(some), 2), "f4"), version, indices=some)
            values, _ = params.pull(indices=keys)
            assert (values == -step).all()
        return params.pull(indices=[1, 3, 999])[0]

    params = node(Keys(1000, 2), shards=shards, push_filters=[KeyCaching()])
    for found in served(mode, params, body):
        np.testing.assert_array_equal(found, [[0, 0], [-4, -4], [-4, -4]])


def test_compensation_of_rows_of_keys_is_refused():
    with pytest.raises(
        mpiml.UsageError, match=r"expected arrays only with Async\(compensate=\)"
    ):
        served("threads", node(Keys(10), Async(compensate=0.1)), lambda params: params.pull())


def test_a_consistency_of_somebody_else_is_refused():
    class Mine(Consistency):
        pass

    with pytest.raises(mpiml.UsageError, match="consistency: expected 'bsp', 'async', or"):
        node(ONE, Mine())


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_a_stop_ends_a_loop_of_reads_from_memory(mode, shards):
    """They need no message, so nothing but a look at the stop can end them."""
    stopped = []

    def reads(reader):
        try:
            while True:
                reader.pull()
        except mpiml.Stopped:
            stopped.append(True)
            raise

    def stops(params):
        params.push(ONE, params.pull()[1])
        mpiml.context().stop()

    served(mode, node(ONE, shards=shards), stops, readers=[reads])
    assert of_all(mode, stopped) == [True]


def test_servers_that_begin_with_other_numbers_are_told():
    def init():
        return np.random.default_rng().random(64)

    with pytest.raises(mpiml.UsageError, match="expected the same numbers on all servers"):
        served("threads", node(init, shards=2), lambda params: params.pull())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [10, 10_000])
def test_large_numbers_are_finite(count):
    def body(params):
        large = np.full(count, 1e30, "f4")
        assert params.push(large, 0)
        large[-1] = np.inf
        with pytest.raises(mpiml.UsageError, match="expected finite numbers, got inf"):
            params.push(large, 1)
        return True

    assert served("threads", node(np.zeros(count, "f4")), body) == [True]


@both
@ways
@pytest.mark.parametrize("shards", [1, 2])
def test_callbacks_at_the_end_may_pull(mode, way, shards, monkeypatch):
    by(way, mode, monkeypatch)
    saved = []

    def body(params):
        params.push(ONE, params.pull()[1])

    def saves(reader):
        def save():
            tree, version = reader.pull()
            some, _ = reader.pull(indices={"w": [0, 63]})
            saved.append((version, tree["w"][0], *some["w"]))

        mpiml.context().on_stop(save)

    served(mode, node(ONE, shards=shards), body, readers=[saves])
    assert of_all(mode, saved) == [(1, 0, 0, 0)]


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_a_stop_amid_pushes_leaves_no_server_without_its_part(mode, shards):
    """They go to one server after the other, and a stop may come in between."""

    def floods(params):
        tree, version = params.pull()
        while True:
            params.futures.push(tree, version)

    def stops(params):
        for _ in range(20):
            params.pull(indices={"w": [0, 63]})
        mpiml.context().stop()

    served(mode, node(ONE, shards=shards), floods, stops)


def test_pushes_under_way_to_several_servers_are_bounded():
    def body(params):
        most = 0
        for _ in range(300):
            params.futures.push(ONE, 0)
            most = max(most, len(params._sent))
        return most

    assert served("threads", node(ONE, shards=2), body)[0] <= 2 * 32 + 2
