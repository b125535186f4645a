"""The client beside pulls and pushes: deadlines, codecs, clients by label, where shards are."""

import numpy as np
import pytest

import mpiml
from mpiml.filters import SignificantlyModified
from mpiml.optim import SGD
from tests.playing import both
from tests.roles.parameter_server.serving import node, served

ZERO = {"w": np.zeros(40), "v": np.zeros(3, "f4")}
ONE = {"w": np.ones(40), "v": np.ones(3, "f4")}


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_a_pull_that_waits_for_another_worker_has_a_deadline(mode, shards):
    def early(params, meet):
        _, version = params.pull()
        params.push(ONE, version)
        with pytest.raises(mpiml.DeadlineError, match=r"expected a reply within 0\.01 s"):
            params.with_options(timeout=0.01).pull()
        meet.wait()
        tree, version = params.with_options(timeout=30.0).pull()
        assert version == 1
        np.testing.assert_array_equal(tree["w"], -np.ones(40))
        return True

    def late(params, meet):
        _, version = params.pull()
        meet.wait()
        params.push(ONE, version)
        return True

    assert all(served(mode, node(ZERO, "bsp", shards), early, late, meet=True))


def test_filters_of_pulls_need_every_answer():
    def body(params):
        with pytest.raises(mpiml.UsageError, match="expected a server without pull_filters"):
            params.with_options(timeout=1.0)
        return True

    assert served("threads", node(ZERO, pull_filters=[SignificantlyModified(0.1)]), body) == [
        True
    ]


@both
@pytest.mark.parametrize("shards", [1, 2])
def test_a_codec_sits_on_every_array_of_a_push(mode, shards):
    def encode(array):
        assert array.ndim == 1
        return "coded", array.astype("f2").tobytes()

    def decode(message):
        assert message[0] == "coded"
        return np.frombuffer(message[1], "f2")

    def body(params):
        _, version = params.pull()
        assert params.push({"w": np.arange(40.0), "v": ONE["v"]}, version)
        assert params.push({"v": ONE["v"]}, version, names=["v"])
        assert params.push(
            {"w": np.ones(2)}, version, indices={"w": [0, 39]}
        )  # rows as they are
        return params.pull()[0]

    for tree in served(mode, node(ZERO, shards=shards, encode=encode, decode=decode), body):
        expected = -np.arange(40.0)
        expected[[0, 39]] -= 1
        np.testing.assert_array_equal(tree["w"], expected)
        np.testing.assert_array_equal(tree["v"], [-2, -2, -2])


@pytest.mark.parametrize(
    "more",
    [
        dict(encode=bytes),
        dict(encode=bytes, decode=bytes, push_filters=[SignificantlyModified(0.1)]),
        dict(encode=1, decode=2),
    ],
)
def test_a_codec_has_two_functions_and_no_filters(more):
    with pytest.raises(mpiml.UsageError, match="encode"):
        node(ZERO, **more)


@pytest.mark.parametrize("held", [True, False])
def test_attached_code_is_a_worker_if_its_node_holds_the_handle(held):
    program = mpiml.Program("attached")
    handle = program.add_node(node(ZERO), label="params")
    program.add_node(mpiml.PyNode(print, *([handle] if held else [])), label="solver")
    with mpiml.attach(program, label="solver") as me:
        params = me.clients["params"]
        tree, version = params.pull()
        assert sorted(tree) == ["v", "w"]
        if held:
            assert params.push(ONE, version)
            assert params.pull()[1] == 1
        else:
            with pytest.raises(mpiml.UsageError, match=r"holds handle\.reader\(\)"):
                params.push(ONE, version)


def test_attached_code_that_never_uses_its_handle_leaves_too():
    program = mpiml.Program("attached")
    handle = program.add_node(node(ZERO, "bsp"), label="params")

    def work(params):
        for _ in range(3):
            params.push(ONE, params.pull()[1])

    program.add_node(mpiml.PyNode(print, handle), label="solver")
    program.add_node(mpiml.PyNode(work, handle), label="worker")
    with mpiml.attach(program, label="solver"):
        pass


def test_what_a_drawing_says():
    program = mpiml.Program("drawn")
    program.add_node(
        mpiml.ParameterServerNode(ZERO, SGD(0.1), mpiml.consistency.SSP(2), 2), label="params"
    )
    assert "ParameterServerNode(SGD, SSP(s=2), shards=2)" in str(program)
