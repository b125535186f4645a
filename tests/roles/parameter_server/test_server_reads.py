"""What a pull returns: never half of an update, by which way; parts by name, row and key."""

import threading
from collections import OrderedDict

import numpy as np
import optree
import pytest

import mpiml
from tests.playing import both
from tests.roles.parameter_server.serving import (
    LIMIT,
    by,
    node,
    read_from_memory,
    served,
    tree,
    ways,
)

shards = pytest.mark.parametrize("shards", [1, 2, 3])
LARGE = {"a": np.zeros(70_001, "f4"), "b": [np.zeros((301, 7), "f4"), np.zeros((), "f4")]}


def whole(found, version):
    """Assert that all numbers have seen the same updates: as many as the version says."""
    for leaf in optree.tree_leaves(found):
        assert (leaf == -version).all()


@both
@ways
@shards
def test_nobody_sees_half_of_an_update(mode, way, shards, monkeypatch):
    """Workers push ones as fast as they can, others look: threads of them too."""
    by(way, mode, monkeypatch)
    count = 60

    def push(client):
        ones = optree.tree_map(np.ones_like, LARGE)
        for i in range(count):
            (client.push if i % 8 == 0 else client.futures.push)(ones, 0)
            if i % 4 == 0:
                whole(*client.pull())
        return client.statistics()

    def look(client):
        def read():
            last = -1
            try:
                while last < 2 * count:
                    found, version = client.pull()
                    assert version >= last
                    whole(found, version)
                    part, version = client.pull(indices={"a": [70_000, 3, 40_000]}, names=["b"])
                    whole(part, version)
                    last = version
            except BaseException as error:
                errors.append(error)

        errors = []
        bind = mpiml.context().bind
        threads = [threading.Thread(target=bind(read)) for _ in range(2)]
        for thread in threads:
            thread.start()
        read()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        if errors:
            raise errors[0]
        if way == "memory":
            read_from_memory(client)
        return client.statistics()

    told = served(mode, node(LARGE, "async", shards), push, push, readers=[look])
    if told:
        statistics = told[-1]
        assert statistics["version"] == 2 * count
        assert (statistics["reads"] > 0) == (way == "memory")
        assert statistics["pulls"] > 0


@both
@ways
@shards
def test_threads_of_a_worker_pull_and_push_at_once(mode, way, shards, monkeypatch):
    by(way, mode, monkeypatch)
    each = 15

    def body(client):
        def work():
            try:
                for i in range(each):
                    found, version = client.pull()
                    whole(found, version)
                    ones = optree.tree_map(np.ones_like, found)
                    if i % 3 == 0:
                        client.push(ones, version)
                    elif i % 3 == 1:
                        client.futures.push(ones, version)
                    else:
                        whole(*client.push_pull(ones, version))
            except BaseException as error:
                errors.append(error)

        errors = []
        bind = mpiml.context().bind
        threads = [threading.Thread(target=bind(work)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        if errors:
            raise errors[0]
        return client.pull()

    for found, version in served(mode, node(LARGE, "async", shards), body):
        assert version == 4 * each
        whole(found, version)


@both
@ways
@shards
def test_parts_by_name(mode, way, shards, monkeypatch):
    by(way, mode, monkeypatch)

    def body(client):
        all_of, _ = client.pull()
        for names in (["w"], ["big", "b"], ("b", "w", "big"), ["b", "b"], []):
            found, version = client.pull(names)
            assert version == 0
            assert list(found) == list(dict.fromkeys(names))
            for name in found:
                assert optree.tree_structure(found[name]) == optree.tree_structure(all_of[name])
                for x, y in zip(
                    optree.tree_leaves(found[name]),
                    optree.tree_leaves(all_of[name]),
                    strict=True,
                ):
                    assert x.dtype == y.dtype
                    assert x.shape == y.shape
                    assert (x == y).all()
        part, version = client.pull(["b"])
        assert client.push(optree.tree_map(np.ones_like, part), version, ["b"])
        now, version = client.pull()
        assert version == 1
        assert float(now["b"]["x"]) == -0.5
        assert (now["big"] == all_of["big"]).all()
        now["big"][:] = 0  # what was pulled is the worker's own
        assert (client.pull()[0]["big"] == all_of["big"]).all()
        return True

    assert all(served(mode, node(tree(), "async", shards), body))


@both
@shards
@pytest.mark.parametrize("shape", [(97,), (97, 3), (50, 2, 2)])
def test_rows_lie_across_servers_and_come_twice(mode, shards, shape):
    init = np.arange(np.prod(shape), dtype="f8").reshape(shape)

    def body(client):
        rng = np.random.default_rng(0)
        expected = init.copy()
        for n in (0, 1, 7, 200):
            rows = rng.integers(0, shape[0], n)
            found, version = client.pull(indices=rows)
            assert found.shape == (n, *shape[1:])
            assert found.tolist() == expected[rows].tolist()
            assert client.push(np.ones_like(found), version, indices=list(rows))
            np.subtract.at(expected, rows, 1)
        found, version = client.pull()
        assert (found == expected).all()
        return version

    for version in served(mode, node(init, "async", shards), body):
        assert version == 4


@both
@shards
def test_rows_by_name(mode, shards):
    init = {"w": np.arange(60.0).reshape(20, 3), "v": np.zeros(5), "x": np.float64(1)}

    def body(client):
        part, version = client.pull(["v"], {"w": [19, 0, 19]})
        assert sorted(part) == ["v", "w"]
        assert part["w"].tolist() == init["w"][[19, 0, 19]].tolist()
        gradient = {"v": np.ones(5), "w": np.ones((3, 3))}
        client.push(gradient, version, names=["v"], indices={"w": np.array([19, 0, 19])})
        now, _ = client.pull()
        expected = init["w"].copy()
        expected[19] -= 2
        expected[0] -= 1
        assert (now["w"] == expected).all()
        assert (now["v"] == -1).all()
        assert now["x"] == 1
        return True

    assert all(served(mode, node(init, "bsp", min(shards, 3)), body))


@both
@shards
@pytest.mark.parametrize("consistency", ["async", "bsp"])
def test_key_ranges(mode, shards, consistency):
    """Rows that exist once something was pushed to them, from ends and middle of the range."""
    n = 10**12
    keys = np.array([0, n - 1, n // 2, n // 3, n // 3 + 1, 2 * n // 3, 7])
    init = {"table": mpiml.Keys(n, width=3, fill=0.25), "w": np.zeros(200, "f4")}

    def body(client):
        found, version = client.pull(["w"], {"table": keys})
        assert found["table"].shape == (7, 3)
        assert (found["table"] == 0.25).all()
        gradient = {
            "w": np.ones(200, "f4"),
            "table": np.arange(21, dtype="f4").reshape(7, 3),
        }
        client.push(gradient, version, ["w"], {"table": keys})
        found, version = client.pull(["w"], {"table": keys[::-1]})
        assert version == 1
        assert (found["table"] == 0.25 - gradient["table"][::-1]).all()
        assert (found["w"] == -1).all()
        twice = [n - 1, 5, n - 1]
        client.push({"table": np.ones((3, 3), "f4")}, version, indices={"table": twice})
        found, version = client.pull(indices={"table": [5, n - 1, 6]})
        assert found["table"][:, 0].tolist() == [-0.75, 0.25 - 3 - 2, 0.25]
        empty, version = client.pull(indices={"table": []})
        assert empty["table"].shape == (0, 3)
        return version

    for version in served(mode, node(init, consistency, shards), body):
        assert version == 2


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_only_a_key_range(mode, shards):
    def body(client):
        found, version = client.pull(indices=[2**40, 1])
        assert found.shape == (2, 1)
        assert found.dtype == np.float64
        client.push(np.array([[1.0], [2.0]]), version, indices=[2**40, 1])
        return client.pull(indices=[1, 2**40, 2])[0].ravel().tolist()

    for found in served(mode, node(mpiml.Keys(2**50, dtype="f8"), "async", shards), body):
        assert found == [-2, -1, 0]


@both
def test_other_trees(mode):
    for init in (
        OrderedDict([("z", np.ones(40)), ("a", np.zeros(3))]),
        (np.ones(3, "f4"), [np.zeros((2, 2))]),
        [],
    ):

        def body(client, init=init):
            found, version = client.pull()
            assert optree.tree_structure(found) == optree.tree_structure(init)
            client.push(optree.tree_map(np.ones_like, found), version)
            found, version = client.pull()
            for x, y in zip(optree.tree_leaves(found), optree.tree_leaves(init), strict=True):
                assert (x == y - 1).all()
            return version

        if init:
            assert all(v == 1 for v in served(mode, node(init), body))


@both
def test_gradients_of_torch(mode):
    torch = pytest.importorskip("torch")

    def body(client):
        found, version = client.pull()
        w = torch.from_numpy(found["w"]).requires_grad_()
        (w * w).sum().backward()
        assert client.push({"w": w.grad}, version)
        return client.pull()[0]["w"]

    for found in served(mode, node({"w": np.arange(6, dtype="f4").reshape(2, 3)}), body):
        assert found.tolist() == (-np.arange(6, dtype="f4").reshape(2, 3)).tolist()


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_arrays_of_both_dtypes_whose_bytes_end_anywhere(mode, shards):
    """In a message, the next array may begin at an odd place; updates want aligned memory."""
    init = {
        "a": np.zeros(3, "f4"),
        "b": np.zeros(40),
        "c": np.zeros(5, "f4"),
        "d": np.zeros((), "f8"),
    }

    def body(client):
        for step in range(3):
            found, version = client.pull()
            for leaf in found.values():
                assert leaf.flags.aligned
                assert leaf.flags.writeable
                assert (leaf == -step).all()
            client.push({name: np.ones_like(leaf) for name, leaf in found.items()}, version)
        return client.pull()[1]

    assert all(v == 3 for v in served(mode, node(init, "bsp", shards), body))


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_key_ranges_of_another_dtype_than_the_arrays(mode, shards):
    init = {"a": np.zeros(37, "f4"), "t": mpiml.Keys(100, width=2, dtype="f8")}
    keys = {"t": [99, 0, 50]}

    def body(client):
        for step in range(3):
            found, version = client.pull(["a"], keys)
            assert (found["a"] == -step).all()
            assert (found["t"] == -step).all()
            gradient = {"t": np.ones((3, 2)), "a": np.ones(37, "f4")}
            client.push(gradient, version, ["a"], keys)
        return client.pull(["a"])[1]

    assert all(v == 3 for v in served(mode, node(init, "bsp", shards), body))


@both
def test_names_need_not_be_sorted(mode):
    """Two arrays of the same shape: each gets its own gradient."""

    def body(client):
        found, version = client.pull(["z", "a"])
        client.push({"z": found["z"] + 1, "a": found["a"] + 2}, version, ["z", "a"])
        rows = {"z": [0], "a": [1]}
        client.push({"z": np.array([10.0]), "a": np.array([20.0])}, 1, indices=rows)
        return {name: leaf.tolist() for name, leaf in client.pull()[0].items()}

    for found in served(mode, node({"a": np.zeros(2), "z": np.zeros(2)}), body):
        assert found == {"a": [-2, -22], "z": [-11, -1]}
