"""Filters in programs, and pushes that are not waited for."""

import numpy as np
import optree
import pytest

import mpiml
from mpiml.collectives.compression import QSGD, Cast, OneBit, TopK
from mpiml.errors import UsageError
from mpiml.filters import (
    KKT,
    Compressed,
    KeyCaching,
    RandomSkip,
    SignificantlyModified,
    ZeroSuppression,
)
from mpiml.optim import Adam
from tests.playing import both
from tests.roles.parameter_server.serving import by, node, served, ways

shards = pytest.mark.parametrize("shards", [1, 2])
STEPS = 6
INIT = {
    "a": np.zeros(3, "f4"),
    "b": [np.linspace(-1, 1, 101), np.zeros((9, 5), "f4")],
    "c": np.float32(0.5),
}


def gradient(step):
    """Mostly zeros, of eighths, so that sums are exact."""
    rng = np.random.default_rng(step)

    def one(leaf):
        values = rng.integers(-8, 9, np.shape(leaf)) / 8
        return np.where(rng.random(np.shape(leaf)) < 0.3, values, 0).astype(leaf.dtype)

    return optree.tree_map(one, INIT)


def expected(steps=STEPS):
    total = optree.tree_map(np.array, INIT)
    for step in range(steps):
        total = optree.tree_map(lambda x, g: x - g, total, gradient(step))
    return total


def alike(found, wanted):
    for x, y in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tolist() == y.tolist()


LOSSLESS = {
    "none": ((), ()),
    "zeros": ((ZeroSuppression(),), ()),
    "keys": ((KeyCaching(),), ()),
    "zeros, keys": ((ZeroSuppression(), KeyCaching()), ()),
    "modified": ((SignificantlyModified(0.0),), (SignificantlyModified(0.0),)),
    "pulls": ((), (SignificantlyModified(0.0), KeyCaching())),
    "pulled zeros": ((), (ZeroSuppression(),)),
    "skip none": ((RandomSkip(0.0),), (RandomSkip(0.0),)),
    "all": (
        (SignificantlyModified(0.0), ZeroSuppression(), KeyCaching()),
        (SignificantlyModified(0.0), ZeroSuppression(), KeyCaching()),
    ),
    "cast": ((Compressed(Cast("float16")),), ()),  # eighths fit
}


@both
@ways
@shards
@pytest.mark.parametrize("kind", LOSSLESS)
def test_what_filters_leave_out_is_not_missed(mode, way, shards, kind, monkeypatch):
    by(way, mode, monkeypatch)
    push, pull = LOSSLESS[kind]

    def body(client):
        for step in range(STEPS):
            found, version = client.pull()
            alike(found, expected(step))
            if step % 3 == 0:
                assert client.push(gradient(step), version)
            elif step % 3 == 1:
                assert client.futures.push(gradient(step), version).result(30)
            else:
                alike(client.push_pull(gradient(step), version)[0], expected(step + 1))
        return client.pull()[0], client.statistics()

    params = node(INIT, "bsp", shards, push_filters=push, pull_filters=pull)
    for found, statistics in served(mode, params, body):
        alike(found, expected())
        if push:
            counts = statistics["filters"]["all"]
            assert counts["entries_seen"] > 0
            assert counts["bytes_before"] > 0


@both
@shards
def test_several_workers_each_have_their_filters(mode, shards):
    filters = (SignificantlyModified(0.0), ZeroSuppression(), KeyCaching(2))

    def body(client):
        for step in range(STEPS):
            found, version = client.pull()
            alike(found, expected(step))
            client.push(gradient(step), version)
        return client.pull()[0]

    params = node(INIT, "bsp", shards, push_filters=filters, pull_filters=filters[:1])
    look = [lambda client: client.pull()[0]["b"][0].shape]
    for found in served(mode, params, body, body, readers=look):
        if isinstance(found, dict):
            alike(found, expected())


@both
@shards
def test_small_changes_come_later(mode, shards):
    def body(client):
        gradient = np.full(40, 0.25)
        seen = []
        for _ in range(8):
            found, version = client.pull()
            seen.append(float(found[7]))
            client.push(gradient, version)
        return seen

    params = node(np.zeros(40), "bsp", shards, push_filters=[SignificantlyModified(0.6)])
    for seen in served(mode, params, body):
        assert seen == [0, 0, 0, -0.75, -0.75, -0.75, -1.5, -1.5]


@both
@shards
def test_gradients_that_leave_zeros_at_zero_are_not_sent(mode, shards):
    init = np.zeros(64)
    init[::2] = 1

    def body(client):
        with pytest.raises(UsageError, match=r"KKT looks at the parameters.*pull\(\) first"):
            client.push(np.full(64, 0.5), 0)
        _, version = client.pull()
        client.push(np.full(64, 0.5), version)
        return client.pull()[0].tolist()

    for found in served(mode, node(init, "async", shards, push_filters=[KKT(1.0)]), body):
        assert found == [0.5, 0.0] * 32


@both
@shards
@pytest.mark.parametrize(
    "codec", [TopK(0.1), OneBit(), QSGD(4)], ids=lambda c: type(c).__name__
)
def test_compressed_gradients_get_there_in_the_end(mode, shards, codec):
    """Down a bowl: what was not sent is made good by error feedback."""

    def body(client):
        for _ in range(300):
            found, version = client.pull()
            found, version = client.push_pull(found - 3, version)
        return float(np.abs(found - 3).max())

    params = node(
        np.zeros(200), "bsp", shards, mpiml.optim.SGD(0.05), push_filters=[Compressed(codec)]
    )
    for away in served(mode, params, body):
        assert away < 0.3


@both
@shards
def test_skipped_entries_are_right_on_average(mode, shards):
    def body(client):
        for _ in range(200):
            client.push(np.ones(400), 0)
        return client.pull()[0]

    params = node(np.zeros(400), "async", shards, push_filters=[RandomSkip(0.5, seed=3)])
    for found in served(mode, params, body):
        assert abs(found.mean() + 200) < 2
        assert len(set(found.tolist())) > 5


@both
@shards
def test_key_ranges_go_as_they_are(mode, shards):
    init = {"t": mpiml.Keys(10**12, width=2), "w": np.zeros(50, "f4")}
    keys = {"t": np.array([3, 10**12 - 1])}
    filters = (SignificantlyModified(0.0), ZeroSuppression(), KeyCaching())

    def body(client):
        for step in range(3):
            found, version = client.pull(["w"], keys)
            assert (found["t"] == -step).all()
            assert (found["w"] == -step).all()
            client.push(
                {"t": np.ones((2, 2), "f4"), "w": np.ones(50, "f4")}, version, ["w"], keys
            )
        return client.pull(["w"])[1]

    params = node(init, "bsp", shards, push_filters=filters, pull_filters=filters)
    assert all(v == 3 for v in served(mode, params, body))


@both
@shards
def test_a_codec_of_the_user(mode, shards):
    params = node(
        INIT, "bsp", shards, encode=lambda x: (x * 8).astype("i1"), decode=lambda x: x / 8.0
    )

    def body(client):
        for step in range(STEPS):
            client.push(gradient(step), step)
        return client.pull()[0]

    for found in served(mode, params, body):
        alike(found, expected())


def _refuses(x):
    if x[0] == 7:
        raise ValueError("cannot decode a seven")
    return x


@both
@shards
def test_what_the_first_server_cannot_decode_is_its_workers_error(mode, shards):
    def body(client):
        gradient = np.ones(64)
        gradient[0] = 7
        with pytest.raises(ValueError, match="cannot decode a seven"):
            client.push(gradient, 0)
        client.push(np.ones(64), 0)
        found, version = client.pull()
        assert (found == -1).all()
        return version

    params = node(np.zeros(64), "bsp", shards, encode=np.copy, decode=_refuses)
    assert all(v == 1 for v in served(mode, params, body))


def test_what_another_server_cannot_decode_ends_the_program():
    """The first one has counted it, so that they would not be alike any more."""

    def body(client):
        gradient = np.ones(64)
        gradient[32] = 7
        client.futures.push(gradient, 0)
        client.pull()

    params = node(np.zeros(64), "async", 2, encode=np.copy, decode=_refuses)
    with pytest.raises(ValueError, match="cannot decode a seven"):
        served("threads", params, body)


# -- pushes that are not waited for ----------------------------------------------------------------


@both
@ways
@shards
@pytest.mark.parametrize("filters", [(), (ZeroSuppression(), KeyCaching())], ids=["plain", "f"])
def test_what_was_pushed_may_be_changed_at_once(mode, way, shards, filters, monkeypatch):
    by(way, mode, monkeypatch)
    size = 50_000

    def body(client):
        gradient = {"w": np.empty(size, "f4"), "v": np.empty((7, 3))}
        for step in range(1, 31):
            gradient["w"][:] = gradient["v"][:] = step
            future = client.futures.push(gradient, 0)
            gradient["w"][:] = gradient["v"][:] = np.nan
        assert future.result(30) is True
        rows = np.arange(7)
        some = np.ones((7, 3))
        future = client.futures.push({"v": some}, 0, indices={"v": rows})
        some[:], rows[:] = 99, 0
        found, version = client.pull()
        return set(found["w"].tolist()), set(found["v"].ravel().tolist()), version

    init = {"w": np.zeros(size, "f4"), "v": np.zeros((7, 3))}
    for told in served(mode, node(init, "async", shards, push_filters=filters), body):
        assert told == ({-465.0}, {-466.0}, 31)


@both
@shards
def test_an_error_of_a_push_that_nobody_looked_at_is_told(mode, shards, capfd):
    def body(client):
        client.futures.push(np.ones(64), 7)
        client.pull()
        assert client.push(np.ones(64), 0)
        return client.pull()[1]

    told = served(mode, node(np.zeros(64), "async", shards), body)
    assert told in ([], [1])
    err = capfd.readouterr().err
    if mode == "threads":
        assert "params/0.push() failed and nobody looked at it" in err
        assert "expected one that pull() has returned, 0 to 0, got 7" in err


@both
@ways
@shards
def test_push_pull(mode, way, shards, monkeypatch):
    """The same bits as push and then pull, with and without the servers' memory."""
    by(way, mode, monkeypatch)

    def body(client):
        one = client.pull()
        for step in range(STEPS):
            one = client.push_pull(gradient(step), one[1])
        return one

    def apart(client):
        one = client.pull()
        for step in range(STEPS):
            client.push(gradient(step), one[1])
            one = client.pull()
        return one

    told = [served(mode, node(INIT, "bsp", shards, Adam(0.1)), each) for each in (body, apart)]
    if told[0]:
        (((found, version),), ((other, _),)) = told
        assert version == STEPS
        alike(found, other)
