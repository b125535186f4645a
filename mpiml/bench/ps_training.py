"""On the ranks: how soon digits are learnt where one worker is slow, by consistency.

The compute time of an iteration is simulated: a worker waits until so many milliseconds have
passed since its pull, the last worker three times as many, as on machines of their own. What a
worker really computes, its gradient and at worker 0 the loss, is done within them.
"""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import mpiml
from mpiml.bench.ps_crowd import crowd
from mpiml.consistency import SSP, Async, BoundedDelay, Consistency
from mpiml.optim import SGD

__all__ = ["MODES", "best_rate", "gradient", "initial", "loss", "many", "training"]

HIDDEN, CLASSES, PIXELS = 32, 10, 64
BATCH = 32
SEEN = 512  # images, of which worker 0 looks at the loss
_Plan = dict[str, Any]
_Tree = dict[str, Any]
MODES: dict[str, Consistency] = {
    "bsp": BoundedDelay(0),
    "delay": BoundedDelay(2),
    "ssp": SSP(3),
    "async": Async(),
}


def initial(seed: int) -> _Tree:
    """Return a network of one hidden layer at random, float32. Local: a pure function."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    return {
        "w1": normal(PIXELS, HIDDEN), "b1": np.zeros(HIDDEN, np.float32),
        "w2": normal(HIDDEN, CLASSES), "b2": np.zeros(CLASSES, np.float32),
    }  # fmt: skip


def _forward(tree: _Tree, images: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Return what is hidden, (n, HIDDEN), log p, (n, CLASSES), and the loss of each image."""
    hidden = np.maximum(images @ tree["w1"] + tree["b1"], 0)  # (n, PIXELS) -> (n, HIDDEN)
    logits = hidden @ tree["w2"] + tree["b2"]
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return hidden, log_p, -log_p[np.arange(len(labels)), labels]


def loss(tree: _Tree, images: Any, labels: Any) -> float:
    """Return the mean cross-entropy. Local: a pure function."""
    return float(_forward(tree, images, labels)[2].mean())


def gradient(tree: _Tree, images: Any, labels: Any) -> _Tree:
    """Return the gradient of `loss`. Local: a pure function."""
    hidden, log_p, _ = _forward(tree, images, labels)
    error = np.exp(log_p)
    error[np.arange(len(labels)), labels] -= 1
    error /= np.float32(len(labels))
    back = (error @ tree["w2"].T) * (hidden > 0)  # (n, CLASSES) -> (n, HIDDEN)
    return {
        "w1": images.T @ back, "b1": back.sum(axis=0),
        "w2": hidden.T @ error, "b2": error.sum(axis=0),
    }  # fmt: skip


def _work(server: Any, data: Any, clocks: bool, seed: int, plan: _Plan) -> Any:
    """Train until worker 0 sees the target, or the time is up; return its seconds and updates."""
    me = mpiml.context()
    images, labels = data
    mine = slice(me.index, None, me.replicas)
    rng = np.random.default_rng([seed, me.index])
    slow = me.index == me.replicas - 1
    step = plan["step"] * (plan["slower"] if slow else 1)
    start = perf_counter()
    while not me.stopping:
        tree, version = server.pull()
        began = perf_counter()
        if me.index == 0:
            there = loss(tree, images[:SEEN], labels[:SEEN]) <= plan["target"]
            if there or began - start > plan["limit"]:
                me.stop()
                return began - start if there else None, version
        batch = rng.integers(len(labels[mine]), size=BATCH)
        update = gradient(tree, images[mine][batch], labels[mine][batch])
        time.sleep(max(0.0, began + step - perf_counter()))
        server.push(update, version)
        if clocks:
            server.clock()
    return None, 0


def _seconds(comm: Any, mode: str, rate: float, seed: int, data: Any, plan: _Plan) -> float:
    """Train once; return the seconds to the target on rank 0, or the limit."""
    consistency = MODES[mode]
    program = mpiml.Program("bench ps")
    node = mpiml.ParameterServerNode(partial(initial, seed), SGD(rate), consistency)
    server = program.add_node(node, label="server")
    clocks = isinstance(consistency, SSP)
    work = mpiml.PyNode(_work, server, data, clocks, seed, plan)
    program.add_node(work, label="worker", replicas=comm.size - 1)
    result = mpiml.launch(program, comm=comm)
    if comm.rank:
        return 0.0
    took, _ = result["worker"][0]
    return plan["limit"] if took is None else float(took)


def best_rate(found: Sequence[tuple[float, Sequence[float]]]) -> float:
    """Return the rate with the least median of seconds. Local: a pure function."""
    return min(found, key=lambda one: median(one[1]))[0]


def _digits(comm: Any) -> Any:
    """Return images in [0, 1], (n, 64) float32, and labels, (n,); None without scikit-learn."""
    data = None
    if comm.rank == 0:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            data = None
        else:
            images, labels = load_digits(return_X_y=True)
            order = np.random.default_rng(0).permutation(len(labels))
            data = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    return comm.bcast(data)


def training(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Measure the seconds to a loss with each consistency, each at its own best rate.

    Collective over `comm`: a server, and workers of which the last is slow.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``step`` in seconds and how much ``slower`` one is; ``target`` and ``limit`` in seconds;
        ``rates`` to search and ``search``, seeds for it; ``seeds`` to measure with.

    Returns
    -------
    dict
        On rank 0: ``rates`` and ``seconds``, by consistency; ``missed``: runs that did not reach
        the target. Empty without scikit-learn.
    """
    data = _digits(comm)
    if data is None:
        return {}
    rates: dict[str, float] = {}
    for mode in MODES:
        found = [
            (rate, [_seconds(comm, mode, rate, seed, data, plan) for seed in plan["search"]])
            for rate in plan["rates"]
        ]
        rates[mode] = comm.bcast(best_rate(found))
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in plan["seeds"]:
        for mode, rate in rates.items():
            seconds[mode].append(_seconds(comm, mode, rate, seed, data, plan))
    missed = sum(took >= plan["limit"] for each in seconds.values() for took in each)
    return {"rates": rates, "seconds": seconds, "missed": missed}


def many(comm: Any, plan: _Plan) -> dict[str, Any]:
    """Do `mpiml.bench.ps_crowd.crowd`, and `training`, with a plan for each.

    Collective over `comm`.
    """
    return {"crowd": crowd(comm, plan["crowd"]), "training": training(comm, plan["training"])}
