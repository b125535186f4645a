"""Optimizers on a real device: the formulas by CuPy, and state in stripes of device memory."""

import numpy as np
import pytest

import mpiml
from mpiml import optim
from mpiml.collectives import Bucket, ShardedOptimizer

pytestmark = pytest.mark.gpu

RULES = {
    "sgd": lambda: optim.SGD(0.1, weight_decay=0.01),
    "nesterov": lambda: optim.Momentum(0.1, nesterov=True),
    "adagrad": lambda: optim.Adagrad(0.1),
    "adam": lambda: optim.Adam(0.1, weight_decay=0.01),
    "adamw": lambda: optim.AdamW(0.1),
}


def normal(seed, dtype="f4", count=100_003):
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "low"), [("f4", "f4"), ("f8", "f8"), ("f4", "f2")])
def test_device_and_host_agree(rule, dtype, low, cupy):
    optimizer = RULES[rule]()
    host, device = normal(0, dtype), cupy.asarray(normal(0, dtype))
    state, there = optimizer.init(host), optimizer.init(device)
    for step in (1, 2, 3):
        grad = normal(step, low)
        optimizer.apply(host, grad, state, step)
        optimizer.apply(device, cupy.asarray(grad), there, step)
    close = 1e-5 if dtype == "f4" else 1e-13
    np.testing.assert_allclose(device.get(), host, rtol=close, atol=close)
    for a, b in zip(state, there, strict=True):
        np.testing.assert_allclose(b.get(), a, rtol=close, atol=close)


def sharded(rule):
    import cupy

    index = mpiml.context().index
    found = []
    for xp in (np, cupy):
        like = {"w": xp.zeros(100_003, "f4"), "h": xp.zeros((7, 3), "f2")}
        params, gradients = Bucket(like=like), Bucket(like=like)
        params["w"][...] = xp.asarray(normal(0))
        params["h"][...] = 1
        model = ShardedOptimizer(params, gradients, RULES[rule]())
        for step in (1, 2):
            gradients["w"][...] = xp.asarray(normal([index, step]))
            gradients["h"][...] = index + step
            model.step("mean")
        kept = model.state_dict()
        model.load_state_dict(kept)
        found.append([x if xp is np else x.get() for x in (params["w"], params["h"])])
        assert isinstance(kept["params"]["w"], np.ndarray)
    for a, b, close in zip(*found, (1e-5, 1e-2), strict=True):
        np.testing.assert_allclose(a.astype("f8"), b.astype("f8"), rtol=close, atol=close)


@pytest.mark.parametrize("rule", RULES)
def test_state_in_stripes_of_device_memory(rule):
    program = mpiml.Program("device")
    program.add_node(mpiml.PyNode(sharded, rule), label="learner", replicas=3)
    mpiml.launch(program)
